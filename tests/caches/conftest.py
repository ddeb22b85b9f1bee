from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.storage.objects.conftest import azurite, obstore, plain_environment, swift, swift_server
from tests.storage.objects.test_other_stores import AZURITE_KEY, make_container

__all__ = ["azurite", "obstore", "plain_environment", "swift", "swift_server"]


@pytest.fixture(scope="session")
def container(azurite: str) -> str:
    make_container(azurite)
    return azurite


@pytest.fixture
def remote(container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a cache in an object store in which nothing is built yet."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURITE_KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", container)
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "node"))
    return f"az://box/caches/{secrets.token_hex(4)}"

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.storage.objects.conftest import azurite, obstore, plain_environment, swift, swift_server
from tests.storage.objects.servers.fill import AzureContainer

__all__ = ["azurite", "obstore", "plain_environment", "swift", "swift_server"]


@pytest.fixture(scope="session")
def container(azurite: str) -> AzureContainer:
    return AzureContainer(azurite, "caches")


@pytest.fixture
def remote(container: AzureContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a cache in an object store in which nothing is built yet."""
    for name, value in container.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", container.url)
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "node"))
    return f"az://{container.name}/of/{secrets.token_hex(4)}"

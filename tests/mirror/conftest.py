"""Of all tests of mirrors."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.mirror.etcd import EtcdServer
from tests.storage.objects.conftest import obstore as obstore
from tests.storage.objects.conftest import plain_environment as plain_environment


@pytest.fixture
def fork_server() -> None:
    """A fork server that starts in this test: one of an earlier test gives workers the variables of
    that test, credentials among them."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A real etcd, which answers; without data."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()

"""Frames that are none, at the socket of a real node process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megablend.mirror.node.frames import HEAD, MAX_PAYLOAD, Kind, pack
from tests.mirror.catalog.test_datasets import keys, machine

__all__ = ["keys"]
pytestmark = pytest.mark.usefixtures("obstore", "keys")


def test_frames_that_are_none_are_logged_once_a_minute(tmp_path: Path) -> None:
    with machine(tmp_path, {}) as node:
        node.ask("list")
        for _ in range(30):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(500)
                client.connect(str(node.folder / "node.sock"))
                client.sendall(pack(Kind.DATASETS, 1, b"[1]"))
                assert HEAD.unpack(client.recv(HEAD.size))[1] == Kind.FAILED
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(500)
                client.connect(str(node.folder / "node.sock"))
                client.sendall(HEAD.pack(MAX_PAYLOAD + 1, Kind.DATASETS, 1))
                assert HEAD.unpack(client.recv(HEAD.size))[1] == Kind.FAILED
        log = (node.folder / "node.log").read_text()
        assert log.count("mirror: a request failed (TypeError)") == 1
        assert log.count(f"{node.folder}: refused a client: refused a request of") == 1
        assert node.ask("list")["revisions"] == []

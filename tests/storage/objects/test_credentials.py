"""Credentials that expire while a run reads: as those of a container, from a server that gives others each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.answers import JsonHandler

pytestmark = pytest.mark.usefixtures("obstore")


class KeyServer:
    """Gives keys, each valid for some seconds.

    `ends`: when each key that was given expires, in the clock of time.monotonic.
    """

    def __init__(self, seconds: float) -> None:
        self.ends: dict[str, float] = {}
        keys = self

        class Handler(JsonHandler):
            def answer(self) -> object:
                name = f"KEY{len(keys.ends)}"
                keys.ends[name] = time.monotonic() + seconds
                end = datetime.now(timezone.utc) + timedelta(seconds=seconds)
                fields = {"AccessKeyId": name, "SecretAccessKey": "s", "Token": "t"}
                return fields | {"Expiration": f"{end:%Y-%m-%dT%H:%M:%SZ}"}

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def is_expired(self, key: str) -> bool:
        """Whether a key is not valid any more."""
        return time.monotonic() > self.ends.get(key, 0.0)

    def close(self) -> None:
        """Stop."""
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def key_server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[KeyServer]:
    keys = KeyServer(request.param)
    (tmp_path / "token").write_text("x")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{keys.server.server_port}/keys"
    )
    yield keys
    keys.close()


@pytest.mark.parametrize(
    ("key_server", "seconds"),
    [(2.0, 4.0), pytest.param(20.0, 120.0, marks=[pytest.mark.slow])],
    indirect=["key_server"],
)
def test_keys_that_expire_are_renewed_without_an_error(
    key_server: KeyServer, seconds: float
) -> None:
    with FaultySource({"b/x": b"0123"}) as source:
        source.is_expired = key_server.is_expired
        storage = make_storage(objects=parse_options({"s3://b": {"endpoint": source.url}}))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert storage.read("s3://b/x", 0, 4) == b"0123"
            time.sleep(0.05)
        used = {
            headers["authorization"].split("Credential=")[1].split("/")[0]
            for headers in source.headers
        }
    assert len(used) >= 2
    assert used <= set(key_server.ends)

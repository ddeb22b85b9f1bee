"""Writes that lose against others, and what is missing, as the client says it."""

from __future__ import annotations

import asyncio
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest

from megablend.errors import CacheError
from megablend.storage.objects.clients import forget_clients
from megablend.storage.objects.prefix import ObjectPrefix, _create, _read
from megablend.storage.store_options import parse_options

MISSING = "Object at location a not found: Error performing GET http://h/b/a: status code: 404, body: <Code>{}</Code>"


@pytest.mark.parametrize("name", ["AlreadyExistsError", "PreconditionError"])
def test_an_object_that_exists_is_not_created(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Stores say so in two ways."""
    obstore = pytest.importorskip("obstore")

    async def refuse(*_: Any, **options: Any) -> None:
        assert options == {"mode": "create"}
        raise getattr(obstore.exceptions, name)("it exists")

    monkeypatch.setattr(obstore, "put_async", refuse)
    assert not asyncio.run(_create(None, "a", b""))


def test_a_missing_bucket_is_no_missing_object(monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    codes = ["NoSuchKey", "NoSuchBucket"]

    async def find_nothing(*_: Any) -> None:
        raise FileNotFoundError(MISSING.format(codes[0]))

    monkeypatch.setattr(obstore, "get_async", find_nothing)
    assert asyncio.run(_read(None, "a")) is None
    codes.pop(0)
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        asyncio.run(_read(None, "a"))


class WriterOnly(BaseHTTPRequestHandler):
    """A store that closes the connection where others than `writer` write, as Swift may do before it has read a large object."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}

    def do_PUT(self) -> None:
        if "Credential=writer/" not in self.headers["Authorization"]:
            self.close_connection = True
            return
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.usefixtures("obstore")
def test_a_write_whose_connection_breaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), WriterOnly)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "give_up_after": 3.0}
    prefix = ObjectPrefix("s3://b/c", parse_options({"s3://": options}))
    says = "the connection broke during a write, as happens when a server refuses a write without responding"
    try:
        for call in (prefix.write, prefix.create):
            with pytest.raises(
                CacheError,
                match=f"s3://b/c/x: cannot access the cache: {says}; .*: check that these credentials may write there",
            ):
                call("x", b"1")
        assert f"s3://b: {says}; 1 requests are being tried again" in caplog.text
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "writer")
        forget_clients()
        prefix.write("x", b"2")
        assert WriterOnly.objects == {"/b/c/x": b"2"}
    finally:
        server.shutdown()
        server.server_close()

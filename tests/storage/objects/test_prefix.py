"""Writes that lose against others, and what is missing, as the client says it."""

from __future__ import annotations

import asyncio
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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
                match=f"s3://b/c/x: cannot access the cache: {says}; .*; check the write permission",
            ):
                call("x", b"1")
        assert f"s3://b: {says}; 1 requests are being retried" in caplog.text
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "writer")
        forget_clients()
        prefix.write("x", b"2")
        assert WriterOnly.objects == {"/b/c/x": b"2"}
    finally:
        server.shutdown()
        server.server_close()


class Joining(BaseHTTPRequestHandler):
    """S3 as far as uploads in parts and removals go: the first response to the joining of parts is lost,
    and nothing is removed, for the reason that the key is."""

    protocol_version = "HTTP/1.1"
    uploads: ClassVar[list[str]] = []
    parts: ClassVar[dict[str, bytes]] = {}
    objects: ClassVar[list[bytes]] = []

    def do_PUT(self) -> None:
        self.parts[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, "")

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if "?delete" in self.path:
            key = asked.partition("<Key>")[2].partition("</Key>")[0]
            code = key.rpartition("/")[2]
            error = f"<Error><Key>{key}</Key><Code>{code}</Code><Message>m</Message></Error>"
            self._answer(200, f"<DeleteResult>{error}</DeleteResult>")
        elif "uploads" in self.path:
            self.uploads.append(str(len(self.uploads)))
            self._answer(200, _result(UploadId=self.uploads[-1]))
        elif f"uploadId={len(self.objects)}" in self.path:
            self.objects.append(b"".join(self.parts[path] for path in sorted(self.parts)))
            self.parts.clear()
            if len(self.objects) == 1:
                self.close_connection = True
            else:
                self._answer(200, _result(ETag="e"))
        else:
            self._answer(404, "<Error><Code>NoSuchUpload</Code></Error>")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


def _result(**fields: str) -> str:
    """The response to an upload in parts: to its begin with UploadId, to its end with ETag."""
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return f"<R><Bucket>b</Bucket><Key>k</Key><Location>l</Location>{inside}</R>"


@pytest.mark.usefixtures("obstore")
def test_a_lost_response_to_the_joining_of_parts_and_refused_removals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Joining)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setattr("megablend.storage.objects.prefix.PART_BYTES", 4)
    options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "give_up_after": 0.2}
    prefix = ObjectPrefix("s3://b/c", parse_options({"s3://": options}))
    (tmp_path / "file").write_bytes(b"012345")
    try:
        assert prefix.write_all({"x": tmp_path / "file"}) == {"x": "e"}
        assert Joining.objects == [b"012345"] * 2
        for code, says in {
            "AccessDenied": "access is denied (AccessDenied); grant these credentials permission to read, write, list and delete",
            "ObjectLocked": "the store did not remove the object (ObjectLocked); grant these credentials permission to delete it",
            "403": "access is denied (HTTP 403); grant these credentials permission to read, write, list and delete",
            "InternalError": "the source failed (InternalError); tried ",
            "ServiceUnavailable": "the source is busy (ServiceUnavailable); tried ",
        }.items():
            with pytest.raises(CacheError) as caught:
                prefix.remove([code])
            assert f"s3://b/c/{code}: cannot access the cache: {says}" in str(caught.value)
    finally:
        server.shutdown()
        server.server_close()


def test_a_small_object_is_not_waited_for_as_long_as_a_large_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits = list[float]()

    async def answer(seconds: float, *_: Any, **__: Any) -> bytes:
        waits.append(seconds)
        return b"0123"

    monkeypatch.setattr("megablend.storage.objects.prefix.attempt_within", answer)
    options = parse_options({"s3://": {"endpoint": "http://127.0.0.1:9"}})
    ObjectPrefix("s3://b/c", options).download("a", 4, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"0123"
    assert [round(each) for each in waits] == [35]

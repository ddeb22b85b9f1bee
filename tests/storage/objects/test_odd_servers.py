"""Web servers that answer in unusual ways: the right bytes, or soon an error that says what is wrong with the server."""

from __future__ import annotations

import gzip
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from megablend.errors import RefusedFileError, UnsupportedFileError
from megablend.storage.by_scheme import make_storage

pytestmark = pytest.mark.usefixtures("obstore")
DATA = np.random.default_rng(1).integers(0, 256, 50_000, np.uint8).tobytes()


@dataclass
class Reply:
    """An answer to a request of a range, before it is sent."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: bool = False
    """Without a Content-Length."""


def partial_reply(data: bytes, start: int, stop: int) -> Reply:
    if start >= len(data):
        return Reply(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
    body = data[start:stop]
    return Reply(
        206,
        {"Content-Range": f"bytes {start}-{start + len(body) - 1}/{len(data)}", "ETag": '"a"'},
        body,
    )


@dataclass(frozen=True)
class Server:
    """How a server differs from others."""

    change: Callable[[Reply], Reply] = lambda reply: reply
    data: bytes = DATA
    heads: int = 200
    """The status of answers to HEAD."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Paths to where they redirect."""
    etag: str = '"a"'
    """The only value of If-Match that is not answered with 412."""
    asked: list[str] = field(default_factory=list)
    """The paths of all requests."""


def without(name: str) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(
        reply.status, {k: v for k, v in reply.headers.items() if k != name}, reply.body
    )


def with_header(name: str, value: str) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(reply.status, reply.headers | {name: value}, reply.body)


def compress(reply: Reply) -> Reply:
    return Reply(
        reply.status, reply.headers | {"Content-Encoding": "gzip"}, gzip.compress(reply.body)
    )


def send_in_chunks(reply: Reply) -> Reply:
    return Reply(reply.status, reply.headers, reply.body, chunks=True)


def send_whole(reply: Reply) -> Reply:
    return Reply(200, {"ETag": '"a"'}, DATA)


def compress_whole(reply: Reply) -> Reply:
    return compress(send_whole(reply))


def fail_once(status: int) -> Callable[[Reply], Reply]:
    """As a proxy does in passing."""
    failures = iter([Reply(status, {}, b"")])
    return lambda reply: next(failures, reply)


def send_page(reply: Reply) -> Reply:
    return Reply(200, {"Content-Type": "text/html"}, b"<html>log in</html>")


SERVERS = {
    "redirects": Server(redirects={"/x": "/y?Signature=canary", "/y?Signature=canary": "/z"}),
    "refuses HEAD": Server(heads=405),
    "a weak etag": Server(with_header("ETag", 'W/"a"')),
    "no etag and no time": Server(without("ETag")),
    "an encoding that is a property of the file": Server(with_header("Content-Encoding", "gzip")),
    "one byte": Server(data=b"z"),
    "etags without quotes": Server(with_header("ETag", "a"), etag="a"),
    "409 once": Server(fail_once(409)),
    "412 once": Server(fail_once(412)),
    "empty": Server(data=b""),
    "empty, refuses HEAD": Server(data=b"", heads=405),
}
FAULTS = {
    "whole files": (
        Server(send_whole),
        "does not support byte-range requests; use a server that does, or copy",
    ),
    "a page to log in": (Server(send_page), "does not support byte-range requests"),
    "whole files, refuses HEAD": (
        Server(send_whole, heads=405),
        "does not support byte-range requests",
    ),
    "compresses": (
        Server(compress),
        r"compresses its responses \(Content-Encoding: gzip\); turn off compression",
    ),
    "compresses whole files": (
        Server(compress_whole),
        r"compresses its responses \(Content-Encoding: gzip\); turn off compression",
    ),
    "chunks": (
        Server(send_in_chunks),
        "responses have no Content-Length; use a server that sends it, or copy the file",
    ),
    "no Content-Range": (
        Server(without("Content-Range")),
        "responses have no Content-Range; use a server that sends it",
    ),
    "no size": (
        Server(with_header("Content-Range", "bytes 0-0/*")),
        "do not say how large the file is",
    ),
    "another range": (
        Server(with_header("Content-Range", "bytes 7-7/50000")),
        "responds with bytes other than those requested",
    ),
}


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a file of a server."""
    server: Server = request.param

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            server.asked.append(self.path)
            self.send_response(server.heads)
            self.send_header("Content-Length", str(len(server.data)))
            self.end_headers()

        def do_GET(self) -> None:
            server.asked.append(self.path)
            if (target := server.redirects.get(self.path)) is not None:
                self._send(Reply(302, {"Location": target}, b""))
            elif self.headers.get("If-Match", server.etag) != server.etag:
                self._send(Reply(412, {}, b""))
            elif "Range" not in self.headers:
                self._send(server.change(Reply(200, {"ETag": server.etag}, server.data)))
            else:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                self._send(server.change(partial_reply(server.data, int(first), int(last) + 1)))

        def _send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            length = (
                {"Transfer-Encoding": "chunked"}
                if reply.chunks
                else {"Content-Length": str(len(reply.body))}
            )
            for name, value in (reply.headers | length).items():
                self.send_header(name, value)
            self.end_headers()
            size = b"%x\r\n" % len(reply.body)
            self.wfile.write(size + reply.body + b"\r\n0\r\n\r\n" if reply.chunks else reply.body)

        def log_message(self, *args: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}/x"
    running.shutdown()
    running.server_close()
    thread.join(timeout=500)


@pytest.mark.parametrize("url", SERVERS.values(), ids=SERVERS, indirect=True)
def test_the_bytes_are_right(url: str, request: pytest.FixtureRequest) -> None:
    data = SERVERS[request.node.callspec.id].data
    storage = make_storage()
    assert storage.stat(url).size == len(data)
    for start, stop in (
        (0, len(data)),
        (len(data) // 2, len(data)),
        (max(0, len(data) - 1), len(data)),
    ):
        assert storage.read(url, start, stop - start) == data[start:stop]
    assert storage.stat(url) == make_storage().stat(url)


@pytest.mark.parametrize(("url", "says"), FAULTS.values(), ids=FAULTS, indirect=["url"])
def test_what_is_wrong_with_the_server_is_said_at_once(url: str, says: str) -> None:
    # with the default settings, which try again for ten minutes
    begin = time.monotonic()
    storage = make_storage()
    with pytest.raises(UnsupportedFileError) as caught:
        storage.read(url, 1000, 100)
    assert re.search(
        f"cannot be read: {'' if says.startswith('the ') else 'the server.*'}{says}",
        str(caught.value),
    )
    assert time.monotonic() - begin < 200


LOOP = Server(redirects={"/x": "/y", "/y": "/x"})


@pytest.mark.parametrize("url", [LOOP], indirect=True)
def test_a_loop_of_redirects_is_followed_once(url: str) -> None:
    """Each round takes as long as ten requests."""
    LOOP.asked.clear()
    says = "cannot be read: the server redirects in a loop; check the location, and whether it"
    with pytest.raises(RefusedFileError, match=says):
        make_storage().find(url)
    assert len(LOOP.asked) <= 2 * 11  # for the beginning of the file, and for its end

"""Ranges that are read over sockets: only the answer that is expected is taken, and the client is asked for any other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.failures import Failure, Kind
from megablend.storage.objects.in_flight import RangeRequest, Request
from megablend.storage.objects.object_version import ObjectVersion
from megablend.storage.objects.sockets import SocketReader
from megablend.storage.store_options import parse_options
from megablend.system.close_server import close_server
from tests.storage.faulty import FaultySource
from tests.storage.objects.test_failures import tls as tls  # a fixture

DATA = np.random.default_rng(5).integers(0, 256, 30_000, np.uint8).tobytes()
VERSION = ObjectVersion(size=len(DATA), etag="abc", modified=0)
START = 1_000
STOP = 21_000
BODY = DATA[START:STOP]
HEADERS = {
    "Content-Length": str(len(BODY)),
    "Content-Range": f"bytes {START}-{STOP - 1}/{len(DATA)}",
    "ETag": '"abc"',
}


def answer(status: int = 206, body: bytes = BODY, **changes: str | None) -> bytes:
    """An answer of a server; `changes`: headers in place of those that it should have, None for none."""
    headers = HEADERS | {name.replace("_", "-"): value for name, value in changes.items()}
    lines = [
        f"HTTP/1.1 {status} x",
        *(f"{name}: {value}" for name, value in headers.items() if value is not None),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Scripted:
    """A server that gives its answers one after the other, and counts connections."""

    answers: list[bytes]
    piece: int = 1 << 20
    closes: bool = False
    """After each answer."""
    connections: int = 0
    requests: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                given = self.answers.pop(0)
                for begin in range(0, len(given), self.piece):
                    writer.write(given[begin : begin + self.piece])
                    await asyncio.sleep(0)
                await writer.drain()
                if self.closes or not self.answers:
                    break
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SocketReader]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/b/x"

        async def find_url(key: str) -> str:
            return url

        def make_tls() -> Any:
            raise AssertionError

        yield SocketReader(find_url, make_tls, 1.0)
        await close_server(server)


def make_request(into: bytearray) -> Request:
    now = asyncio.get_running_loop().time()
    return Request(
        now, RangeRequest("x", START, STOP, VERSION, into=memoryview(into)), num_responses=0
    )


async def ask_client(request: Request) -> str | Failure:
    return "client"


def read(server: Scripted, times: int = 1) -> tuple[list[Any], bytes]:
    """What a reader returns, and what is in the memory in the end."""
    into = bytearray(len(BODY))

    async def run() -> list[Any]:
        async with server.running() as reader:
            return [await reader.read(make_request(into), ask_client) for _ in range(times)]

    return asyncio.run(run()), bytes(into)


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_the_bytes_are_in_their_memory(piece: int) -> None:
    found, into = read(Scripted([answer()], piece))
    assert found == [None]
    assert into == BODY


def test_a_connection_is_used_again() -> None:
    server = Scripted([answer(), answer(503, b"busy", Content_Length="4"), answer()])
    found, into = read(server, 3)
    assert found[0] is found[2] is None
    assert found[1].kind is Kind.BUSY
    assert (server.connections, server.requests) == (1, 3)
    assert into == BODY


def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    server = Scripted([answer(), answer()], closes=True)
    assert read(server, 2) == ([None, None], BODY)
    assert server.connections == 2


OTHERS: dict[str, tuple[bytes, Kind | str]] = {
    "another version": (answer(ETag='"other"'), "client"),
    "a weak etag": (answer(ETag='W/"abc"'), "client"),
    "no etag": (answer(ETag=None), "client"),
    "another place": (answer(Content_Range=f"bytes 0-{STOP - START - 1}/{len(DATA)}"), "client"),
    "another size of the object": (
        answer(Content_Range=f"bytes {START}-{STOP - 1}/{STOP}"),
        "client",
    ),
    "no place": (answer(Content_Range=None), "client"),
    "fewer bytes": (answer(Content_Length="100"), "client"),
    "more bytes": (answer(Content_Length=str(len(BODY) + 1), body=BODY + b"x"), "client"),
    "no length": (answer(Content_Length=None), "client"),
    "chunks": (answer(Transfer_Encoding="chunked"), "client"),
    "compressed": (answer(Content_Encoding="gzip"), "client"),
    "the whole object": (
        answer(200, DATA, Content_Length=str(len(DATA)), Content_Range=None),
        "client",
    ),
    "a redirect": (answer(302, b"", Content_Length="0", Location="/elsewhere"), "client"),
    "it was replaced": (answer(412, b"", Content_Length="0"), "client"),
    "access is denied": (answer(403, b"no", Content_Length="2"), "client"),
    "no HTTP": (b"220 mail.example.com ESMTP\r\n\r\n", "client"),
    "a head that is too long": (b"HTTP/1.1 206 x\r\n" + b"a: b\r\n" * 2000, "client"),
    "it is busy": (answer(429, b"", Content_Length="0"), Kind.BUSY),
    "it failed": (answer(500, b"", Content_Length="0"), Kind.AGAIN),
    "it ends in the body": (answer()[:-1], Kind.AGAIN),
    "it ends in the head": (answer()[:30], Kind.AGAIN),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_answer_is_not_taken(name: str) -> None:
    given, expected = OTHERS[name]
    found, into = read(Scripted([given]))
    assert (found[0].kind if isinstance(found[0], Failure) else found[0]) == expected
    if expected == "client":
        assert into == bytes(len(BODY)), "something of it is in the memory"


def test_a_source_that_only_the_client_understands_is_left_to_it() -> None:
    async def run(answers: list[bytes]) -> bool:
        async with Scripted(answers).running() as reader:
            while answers:
                await reader.read(make_request(bytearray(len(BODY))), ask_client)
            return reader.is_usable

    moved = answer(302, b"", Content_Length="0")
    assert asyncio.run(run([moved, moved, answer(), moved, moved]))
    assert not asyncio.run(run([moved, moved, moved]))


def test_a_failure_of_the_client_says_nothing_about_sockets() -> None:
    async def fail(request: Request) -> str | Failure:
        return Failure(Kind.CHANGED, "was replaced", "")

    async def run(answers: list[bytes]) -> bool:
        async with Scripted(answers).running() as reader:
            while answers:
                assert isinstance(
                    await reader.read(make_request(bytearray(len(BODY))), fail), Failure
                )
            return reader.is_usable

    assert asyncio.run(run([answer(412, b"", Content_Length="0")] * 5))


@pytest.mark.parametrize("how", ["cancelled", "interrupted"])
def test_nothing_is_written_after_the_end(how: str) -> None:
    """Neither where the caller gives up, nor where a second request was faster: the memory is another's by then."""
    into = bytearray(len(BODY))

    async def run() -> None:
        may_go_on = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer()[:-5_000])
            await may_go_on.wait()
            with contextlib.suppress(ConnectionError):
                writer.write(answer()[-5_000:])
                await writer.drain()
            writer.close()

        server = Scripted([])
        server.serve = serve  # type: ignore[method-assign]
        async with server.running() as reader:
            request = make_request(into)
            task = asyncio.ensure_future(reader.read(request, ask_client))
            while into.count(0) > 5_500:
                await asyncio.sleep(0.001)
            if how == "cancelled":
                task.cancel()
            else:
                request.interrupt()
            with pytest.raises(asyncio.CancelledError):
                await task
            into[:] = bytes(len(BODY))
            may_go_on.set()
            for _ in range(20):
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert not any(into)


class Impatient(Request):
    """Ends each wait for a connection before it begins."""

    @property
    def waits_for(self) -> asyncio.Future[Any] | None:
        return None

    @waits_for.setter
    def waits_for(self, awaited: asyncio.Future[Any] | None) -> None:
        if isinstance(awaited, asyncio.Task):
            awaited.cancel()


def test_a_connection_that_nobody_waits_for_is_not_begun() -> None:
    """As at the end of a process; and without a warning of Python's."""

    async def run() -> int:
        server = Scripted([answer()])
        async with server.running() as reader:
            wanted = RangeRequest("x", START, STOP, VERSION, into=memoryview(bytearray(len(BODY))))
            with pytest.raises(asyncio.CancelledError):
                await reader.read(Impatient(0.0, wanted, num_responses=0), ask_client)
            return server.connections

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert asyncio.run(run()) == 0
        gc.collect()
    assert not caught


@pytest.fixture
def keys(obstore: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


def refuse_client(monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("the client is asked")

    monkeypatch.setattr(obstore, "get_async", refuse)


def test_ranges_of_a_bucket_are_read_without_the_client(
    keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultySource({"b/a key+%.x": DATA}) as source:
        storage = make_storage(objects=parse_options({"s3://b": {"endpoint": source.url}}))
        storage.stat("s3://b/a key+%.x")
        refuse_client(monkeypatch)
        assert storage.read("s3://b/a key+%.x", START, STOP - START) == BODY


def test_ranges_of_a_url_are_read_without_the_client(
    keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultySource({"b/a key+%.x": DATA}) as source:
        storage = make_storage()
        url = f"{source.url}/b/a%20key+%25.x"
        storage.stat(url)
        refuse_client(monkeypatch)
        assert storage.read(url, START, STOP - START) == BODY


def test_certificates_of_a_ca_file_are_trusted(
    tls: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = make_storage(objects=parse_options({"https://": {"ca_file": str(tls[1])}}))
    storage.stat(tls[0])
    refuse_client(monkeypatch)
    assert storage.read(tls[0], 0, 1) == b"0"


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_a_proxy_is_for_the_client(keys: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore as client

    asked = list[object]()
    get = client.get_async

    def ask(*given: Any, **more: Any) -> Any:
        asked.append(given)
        return get(*given, **more)

    with FaultySource({"b/x": DATA}) as source:
        storage = make_storage(objects=parse_options({"s3://b": {"endpoint": source.url}}))
        storage.stat("s3://b/x")  # its connection does not know the proxy
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setattr(client, "get_async", ask)
        assert storage.read("s3://b/x", START, STOP - START) == BODY
    assert asked

"""What a port says of requests that are none, and of its own faults."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings

import pytest
from aiohttp import web

from megablend.mirror.peers.listener import Listener
from tests.storage.objects.servers.start import find_free_port


def test_malformed_requests_are_not_quoted_and_faults_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(_: web.Request) -> web.Response:
        raise ZeroDivisionError("a fault")

    async def send(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        return answer

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/", fail)
        port = find_free_port()
        listener = Listener("`mirror.port`")
        await listener.start(app, "127.0.0.1", port, None)
        secret = b"Authorization: Bearer CANARY\r\n"
        for line in (
            b"GET / HTTP/9.9\r\n",
            b"\x00\x01 / HTTP/1.1\r\n",
            b"GET / HTTP/1.1\r\nA B: \r\n",
        ):
            assert b" 400 " in await send(port, line + secret + b"\x00\r\n\r\n")
        assert not caplog.records
        assert b" 500 " in await send(port, b"GET / HTTP/1.1\r\nHost: x\r\n" + secret + b"\r\n")
        assert "this is a bug in megablend" in caplog.text
        assert "ZeroDivisionError: a fault" in caplog.text
        assert "CANARY" not in caplog.text
        await listener.stop()

    asyncio.run(run())


@pytest.mark.parametrize("num_rounds", range(6))
def test_connections_that_come_while_it_stops_are_closed(num_rounds: int) -> None:
    """Also one that the loop has accepted, and has begun to hand to its protocol."""

    async def run() -> None:
        listener = Listener("`mirror.port`")
        port = find_free_port()
        await listener.start(web.Application(), "127.0.0.1", port, None)
        with socket.create_connection(("127.0.0.1", port)) as client:
            for _ in range(num_rounds):
                await asyncio.sleep(0)
            await listener.stop()
            client.settimeout(500)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert [str(each.message) for each in caught] == []

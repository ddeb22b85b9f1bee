"""What a port says of requests that are none, and of its own faults."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from megablend.mirror.peers.listener import Listener


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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
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

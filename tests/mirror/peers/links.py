"""A link to a node that can be slow, silent, broken or wrong: a TCP proxy in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time

from megablend.system.close_server import close_server

_NODE = re.compile(rb"\r\nMegablend-Node: ([^\r]*)\r\n")
_CHUNK = 1 << 16
_LEAST = 1 << 12


class Link:
    """Where others reach a node. Set its faults at any time.

    Args:
        port: where the node listens.
        seed: of the bits that are flipped.
    """

    def __init__(self, port: int, seed: int = 0) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._closing: asyncio.Task[None] | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._writers = set[asyncio.StreamWriter]()
        self._listens_at = 0
        self.delay = 0.0
        """Seconds by which all answers are late."""
        self.silent_for: set[str] | None = set()
        """Names of nodes from which, and to which, nothing is forwarded; None: all."""
        self.flips = 0
        """So many of the next answers have a bit flipped, of those with more than 4 KiB."""
        self.num_connections = 0

    async def start(self) -> str:
        """Listen, where it did before. Returns: the name of the node."""
        if self._closing is not None:
            await self._closing
            self._closing = None
        elif self._server is not None:
            return f"127.0.0.1:{self._listens_at}"
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._listens_at)
        self._listens_at = self._server.sockets[0].getsockname()[1]
        return f"127.0.0.1:{self._listens_at}"

    def cut(self) -> None:
        """As if the node were killed: no connection is left, none is accepted."""
        assert self._server is not None
        if self._closing is None:
            self._closing = asyncio.ensure_future(close_server(self._server))
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        self.cut()
        assert self._closing is not None
        await self._closing
        for each in self._tasks:
            each.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing is not None:
            writer.transport.abort()
            return
        self.num_connections += 1
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                found = _NODE.search(head)
                asker = found[1].decode() if found else ""
                await self._wait(asker)
                back, other = await asyncio.open_connection("127.0.0.1", self._port)
                self._writers.add(other)
                other.write(head)
                ways = [
                    asyncio.ensure_future(self._forward(asker, reader, other, is_answer=False)),
                    asyncio.ensure_future(self._forward(asker, back, writer, is_answer=True)),
                ]
                try:
                    done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    for each in done:
                        each.result()
                finally:
                    for each in ways:
                        each.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
            finally:
                for each_writer in (writer, other):
                    if each_writer is not None:
                        each_writer.transport.abort()
                        self._writers.discard(each_writer)

    async def _wait(self, asker: str) -> None:
        while self.silent_for is None or asker in self.silent_for:
            await asyncio.sleep(0.01)

    async def _forward(
        self,
        asker: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        is_answer: bool,
    ) -> None:
        """All of one direction, in its order."""
        coming: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def receive() -> None:
            data = b" "
            while data:
                try:
                    data = await reader.read(_CHUNK)
                except ConnectionError:
                    data = b""
                if is_answer:
                    data = self._flip(data)
                await coming.put((time.monotonic() + self.delay * is_answer, data))

        receiving = asyncio.ensure_future(receive())
        try:
            while True:
                at, data = await coming.get()
                await asyncio.sleep(at - time.monotonic())
                await self._wait(asker)
                if not data or writer.is_closing():
                    return
                writer.write(data)
                await writer.drain()
        finally:
            receiving.cancel()

    def _flip(self, data: bytes) -> bytes:
        if not self.flips or len(data) < _LEAST:
            return data
        self.flips -= 1
        changed = bytearray(data)
        # Behind the headers
        changed[self._random.randrange(_LEAST // 2, len(data))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

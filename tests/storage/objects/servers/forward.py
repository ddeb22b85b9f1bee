"""A server in front of another one: it forwards requests, and counts the rounds in which those of a file come."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from tests.storage.faulty import Faults, FaultySource


class RoundsInFront(FaultySource):
    """Forwards requests without a body to the server at `url`, those of one round of a file at the same time.

    Args:
        url: of the server, without a path.
        seconds: see Faults.round.
    """

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__({}, Faults(round=seconds))
        self._target = urlsplit(url)
        self._seconds = seconds

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]
    ) -> bool:
        await self._await_round(urlsplit(target).path, self._seconds)
        reader, forward = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            lines = [
                f"{method} {target} HTTP/1.1",
                *(f"{name}: {value}" for name, value in headers.items()),
            ]
            forward.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(
                (
                    int(line[15:])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            writer.write(head + (b"" if method == "HEAD" else await reader.readexactly(size)))
            await writer.drain()
        finally:
            forward.close()
        return True

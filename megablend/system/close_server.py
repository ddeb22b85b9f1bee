"""Closing servers of asyncio without losing connections."""

from __future__ import annotations

import asyncio

_NUM_ROUNDS = 2
"""The rounds of the loop after which a connection that was accepted is known to its protocol."""


async def close_server(server: asyncio.Server) -> None:
    """Close a server. Connections that it has accepted are its protocols' to close, also those that
    it accepts in this moment: after a mere `close`, asyncio would drop them without a protocol, and
    warn of an unclosed transport some time later."""
    loop = asyncio.get_running_loop()
    try:
        for each in server.sockets:
            loop.remove_reader(each)
        for _ in range(_NUM_ROUNDS):
            await asyncio.sleep(0)
    finally:
        server.close()

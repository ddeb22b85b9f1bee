"""Close asyncio servers without losing connections."""

from __future__ import annotations

import asyncio

_NUM_ROUNDS = 2
"""The number of iterations of the event loop after which every accepted connection has a
protocol."""


async def close_server(server: asyncio.Server) -> None:
    """Close a server, but leave its accepted connections open, since their protocols close them.

    This includes connections that are just being accepted: after `close` alone, asyncio would drop
    them without a protocol, and warn about an unclosed transport some time later.
    """
    loop = asyncio.get_running_loop()
    try:
        for listening in server.sockets:
            loop.remove_reader(listening)
        for _ in range(_NUM_ROUNDS):
            await asyncio.sleep(0)
    finally:
        server.close()

"""Listens at a port of this node, and warns about requests that are refused."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megablend.errors import ConfigError
from megablend.mirror.node.metrics import CONTENT_TYPE, format_metrics
from megablend.system.close_server import close_server
from megablend.system.limited_log import LimitedLog
from megablend.system.log import LOG

_END_SECONDS = 1.0
"""Seconds for which a node keeps responding while it stops. Later, clients turn to other nodes."""


class _Faults(logging.Logger):
    """A logger for aiohttp that drops records of malformed requests, which may contain the
    token."""

    def handle(self, record: logging.LogRecord) -> None:
        """Log a record unless it is about a malformed request."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            LOG.error(
                "mirror: this is a bug in megablend; please report it: %s",
                record.msg,
                exc_info=error,
            )


def add_metrics(app: web.Application, get_status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    """Add a handler to an application that answers `GET /metrics` with the node's metrics."""

    async def answer(_: web.Request) -> web.Response:
        text = format_metrics(await get_status())
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/metrics", answer)


@dataclass(eq=False)
class Listener:
    """A server of an aiohttp application at a port."""

    setting: str
    """The name of the setting that contains the port, for messages."""
    log: LimitedLog = field(default_factory=LimitedLog)
    """Logs warnings about refused requests."""
    _runner: web.AppRunner | None = None
    _server: asyncio.Server | None = None

    async def start(
        self, app: web.Application, host: str | None, port: int, tls: ssl.SSLContext | None
    ) -> None:
        """Start listening. Raises: ConfigError if the port is in use."""
        self._runner = web.AppRunner(
            app,
            logger=_Faults("megablend.listener"),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_END_SECONDS,
        )
        await self._runner.setup()
        accept = self._runner.server
        assert accept is not None
        try:
            self._server = await asyncio.get_running_loop().create_server(
                accept, host, port, ssl=tls, backlog=1024
            )
        except OSError as error:
            await self.stop()
            raise ConfigError(
                f"port {port}{f' of {host}' if host else ''}: cannot listen: {error.strerror}\n"
                f"set {self.setting} to a port that nothing else uses"
            ) from None

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            await close_server(self._server)
        if self._runner is not None:
            await self._runner.cleanup()

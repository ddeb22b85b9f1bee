"""A node's HTTP server, at `data_port`:

    GET  /v1/data/...      files of datasets: see `files`
    GET  /                 a page about the state of the node, the other nodes and datasets
    GET  /metrics          numbers, for Prometheus
    GET  /v1/ping          nothing, without a token

Requests are authenticated by the token (`Authorization: Bearer TOKEN`, or as the password of any
user), or by a signature in the URL.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Handler

from megablend.mirror.node.engine import Engine
from megablend.mirror.peers.listener import Listener, add_metrics
from megablend.mirror.peers.signing import make_reader_context, read_token
from megablend.mirror.web.files import ROOT, Files, Place
from megablend.mirror.web.page import format_page
from megablend.storage.mirror_options import MirrorOptions
from megablend.system.log import LOG

if TYPE_CHECKING:
    from megablend.mirror.catalog.datasets import Datasets

_PING = "/v1/ping"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}


class WebServer:
    """The HTTP server at `data_port`. Raises: ConfigError if the token or the certificate cannot be
    used.

    Args:
        options: the mirror's settings, with `data_port`.
        engine: fetches and reads pages.
        find_datasets: returns the datasets of the mirror; None if there are none.
        get_status: returns the status of the node.
        note_use: a function that is called for each accepted request.
    """

    def __init__(
        self,
        options: MirrorOptions,
        engine: Engine,
        find_datasets: Callable[[], Awaitable[Datasets | None]],
        get_status: Callable[[], Awaitable[dict[str, Any]]],
        note_use: Callable[[], None],
    ) -> None:
        assert options.data_port is not None
        assert options.token_file is not None
        self._port = options.data_port
        self._tls = make_reader_context(options)
        self._is_open = self._tls is not None or options.insecure
        self._token = read_token("token_file", options.token_file)
        self._listener = Listener("`mirror.data_port`")
        self._files = Files(engine, find_datasets, self._token, self._listener.log.warn)
        self._find_datasets = find_datasets
        self._get_status = get_status
        self._note_use = note_use

    async def start(self) -> None:
        """Start listening. Raises: ConfigError if the port is in use."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(_PING, _pong)
        app.router.add_get("/", self._answer_page)
        add_metrics(app, self._get_status)
        app.router.add_get(ROOT + "{_:.*}", self._files.answer)
        app.on_response_prepare.append(_add_headers)
        if self._is_open and self._tls is None:
            LOG.warning("insecure: the token for data_port is sent unencrypted; set `tls`")
        await self._listener.start(
            app, None if self._is_open else "127.0.0.1", self._port, self._tls
        )

    @property
    def num_bytes(self) -> int:
        """The number of bytes of files that were sent."""
        return self._files.num_bytes

    async def stop(self) -> None:
        """Stop listening."""
        await self._listener.stop()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass a request to its handler, or refuse it if it has neither the token nor a signature.
        Pings are always accepted."""
        if request.path != _PING:
            if not (self._has_token(request) or self._is_signed(request)):
                self._listener.log.warn(
                    request.remote, "a request from this address lacks the token in `token_file`"
                )
                realm = {"WWW-Authenticate": 'Basic realm="megablend: the token is the password"'}
                raise web.HTTPUnauthorized(headers=realm)
            self._note_use()
        return await handler(request)

    async def _answer_page(self, _: web.Request) -> web.Response:
        datasets = await self._find_datasets()
        about_datasets = None
        if datasets is not None:
            about_datasets = await datasets.list_all() | await datasets.get_status()
        text = format_page(await self._get_status(), about_datasets)
        data = text.encode("utf-8", "replace")
        return web.Response(body=data, content_type="text/html", charset="utf-8")

    def _has_token(self, request: web.Request) -> bool:
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        credentials = text.strip().encode("utf-8", "replace")
        if scheme.lower() == "basic":
            try:
                user_and_password = base64.b64decode(credentials)
            except ValueError:
                return False
            token = user_and_password.partition(b":")[2]
        elif scheme.lower() == "bearer":
            token = credentials
        else:
            return False
        return hmac.compare_digest(token, self._token)

    def _is_signed(self, request: web.Request) -> bool:
        if not request.path.startswith(ROOT):
            return False
        try:
            expected = Place.of_url(request.raw_path).sign(self._token)
        except ValueError:
            return False
        signature = request.query.get("signature", "").encode("utf-8", "replace")
        return hmac.compare_digest(signature, expected.encode())


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


async def _pong(_: web.Request) -> web.Response:
    return web.Response()

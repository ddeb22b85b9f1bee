"""Responds to requests from other nodes, over HTTP:

    POST /v1/pages?view=[&held=1[&settle=1]][&fresh=1]
        Body: needs. Response: pages. This node fetches pages that it does not hold, unless `held`
        is set. With `settle`, it first waits for its own reads of these pages from the source. With
        `fresh`, it fetches the pages again, since their bytes were wrong. Status 412: this node is
        in another view, and the request is not only for held pages.
    POST /v1/tell?view=[&greets=&session=][&list=&session=&formed=]
        Body: needs, the pages that a node announces. At first a node announces all its pages, in
        several requests, and later each new page. The very first request has no pages, but
        `greets`, the digest of the node's list of nodes, and the node's session. The last request
        with the first pages has the same digest as `list`, the session, and `formed`, which is 1 if
        the nodes have met. Status 412: this node does not know the view.
    POST /v1/due[?more=1]
        Body: needs, the pages that a node will request. They replace the pages that it
        announced before. With `more`, they are added to them instead.
    POST /v1/join
        Body: JSON of the rank and the name of a node of a torchrun job, and the size of the job.
        Response: the list of nodes.
    POST /v1/check      Response: a JSON list with a line for each node that this one cannot reach
    POST /v1/busy       Body: JSON of a busy source, and for how many seconds not to send requests
    GET  /v1/ping       Response: empty
    GET  /metrics       Response: metrics for Prometheus. The request needs no signature

The module `frames` describes the formats of the bodies. Every request except the last one is
signed, or is sent over TLS with a certificate.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megablend.errors import MegablendError
from megablend.mirror.node.engine import AwayError
from megablend.mirror.node.frames import MAX_PAYLOAD, PROTOCOL, pack_error
from megablend.mirror.peers.listener import Listener, add_metrics
from megablend.mirror.peers.peer import (
    AWAY_STATUS,
    ERROR_STATUS,
    SESSION_STATUS,
    VIEW_STATUS,
    OtherViewError,
)
from megablend.mirror.peers.signing import (
    ANSWER,
    NODE,
    PROTOCOL_HEADER,
    SESSION,
    SessionError,
    SignatureError,
    Verifier,
)
from megablend.system.log import LOG

Handle = Callable[[str, Mapping[str, str], bytes], Awaitable[bytes]]
"""A function that responds to a request. Arguments: the name of the node that sent it, the query,
and the body."""


@dataclass(eq=False)
class PeerServer:
    """A server that authenticates requests from other nodes, and passes them to handlers."""

    handlers: Mapping[tuple[str, str], Handle]
    """The handler of each kind of request, by method and path."""
    verifier: Verifier
    get_status: Callable[[], Awaitable[dict[str, Any]]]
    """Returns the node's status, for metrics."""
    _listener: Listener = field(default_factory=lambda: Listener("`mirror.port` (in `nodes` too)"))

    async def start(self, host: str | None, port: int, tls: ssl.SSLContext | None) -> None:
        """Start listening. Raises: ConfigError if the port is in use."""
        app = web.Application(client_max_size=MAX_PAYLOAD)
        for method, path in self.handlers:
            app.router.add_route(method, path, self._answer)
        add_metrics(app, self.get_status)
        await self._listener.start(app, host, port, tls)

    async def stop(self) -> None:
        """Stop listening."""
        await self._listener.stop()

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            self.verifier.check(request.method, request.raw_path, request.headers)
            body = await request.read()
            self.verifier.check_body(request.headers, body)
        except SessionError:
            return self._reply(request, SESSION_STATUS, b"")
        except SignatureError as error:
            self._listener.log.warn(
                request.remote, f"a request from this address was refused: {error}"
            )
            return self._reply(request, 403, str(error).encode())
        except web.HTTPRequestEntityTooLarge:
            return self._reply(request, 413, b"too large")
        except ConnectionError:
            return web.Response()  # the client is gone
        handle = self.handlers[request.method, request.path]
        try:
            data = await handle(request.headers.get(NODE, ""), request.query, body)
            status = 200
        except AwayError as error:
            status = VIEW_STATUS if isinstance(error, OtherViewError) else AWAY_STATUS
            data = str(error).encode()
        except MegablendError as error:
            status = ERROR_STATUS
            data = pack_error(error)
        except ValueError as error:
            self._listener.log.warn(
                request.remote, f"a request from this address cannot be parsed: {error}"
            )
            status = 400
            data = str(error).encode()
        except Exception as error:
            LOG.warning("mirror: this is a bug in megablend; please report it", exc_info=True)
            status = 500
            data = repr(error).encode()
        return self._reply(request, status, data)

    def _reply(self, request: web.Request, status: int, data: bytes) -> web.Response:
        headers = {PROTOCOL_HEADER: str(PROTOCOL), SESSION: self.verifier.session}
        headers[ANSWER] = self.verifier.sign_answer(request.headers, status, data)
        return web.Response(status=status, body=data, headers=headers)

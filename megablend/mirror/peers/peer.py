"""Sends requests to another node, and determines whether the node is reachable. An unreachable
("away") node does not even respond to pings, while a slow node does."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from megablend.errors import ConfigError, MegablendError
from megablend.mirror.disk.pages import NO_PAGES, Pages
from megablend.mirror.disk.room import Need
from megablend.mirror.members.launchers import Pace
from megablend.mirror.node.engine import AwayError, Mode, Want
from megablend.mirror.node.frames import (
    MAX_PAYLOAD,
    PROTOCOL,
    pack_json,
    pack_needs,
    unpack_error,
    unpack_pages,
)
from megablend.mirror.peers.signing import PROTOCOL_HEADER, SESSION, SignatureError, Signer
from megablend.system.failures import remedy_of
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG

AWAY_STATUS = 503
"""The HTTP status of a response that reports an AwayError."""
ERROR_STATUS = 409
"""The HTTP status of a response that contains an error packed by `pack_error`."""
VIEW_STATUS = 412
"""The HTTP status of a response that reports an OtherViewError."""
SESSION_STATUS = 401
"""The HTTP status of a response to a request that was signed for another session of the node."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The errno values that mean that this node lacks resources, not that the other node is
unreachable."""
_SHORTAGE_SECONDS = 0.5
_NUM_TRIES = 3
"""The maximum number of times that a request is sent. It is signed and sent again if the node has
another session."""


class Ask(enum.Enum):
    """The pages to request from another node. The values are parameters of the query."""

    ALL = ""
    """All pages. The other node is their home, and fetches pages that it does not hold."""
    HELD = "&held=1"
    """Only the pages that the other node holds."""
    SETTLED = "&held=1&settle=1"
    """Only the pages that the other node holds after its present reads of them have finished."""


class OtherViewError(AwayError):
    """Raised if the other node is temporarily in a different view."""


@dataclass(eq=False)
class Peer:
    """Another node, to which this node sends requests. As soon as it is found to be unreachable,
    all pending requests fail."""

    name: str
    """The name of the node, `host:port`."""
    http: aiohttp.ClientSession
    signer: Signer
    pace: Pace
    on_met: Callable[[Peer], None]
    """Called at the node's first response after it has started, or has become reachable again."""
    on_suspect: Callable[[], None]
    """Called if the node does not respond to a ping within `pace.ping` seconds."""
    uses_tls: bool
    session: str = ""
    """The last known session of the node, a random id that it chose when it started. Requests are
    signed for this session."""
    away_since: float | None = None
    """The monotonic time at which the node was found to be unreachable; None while it responds."""
    trouble: str = "no request has been sent to it yet"
    """Why the node did not respond when it was last found to be unreachable."""
    refusal: MegablendError | None = None
    """The error if the node refused a request, or its response was not trusted; None otherwise."""
    num_bad: int = 0
    """The number of responses whose bytes were changed during transmission."""
    responded_at: float = 0.0
    """The monotonic time of the node's last response."""
    _met_session: str = ""
    """The session in which `on_met` was last called."""
    _away_signal: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """A future that is done as soon as the node is unreachable. Later requests use a new future."""
    _num_pending: int = 0
    _watcher: asyncio.Task[None] | None = None
    _pinging: asyncio.Task[bool] | None = None
    _is_closed: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether the node has been unreachable for so long that no request waits for it."""
        return self.away_since is not None and time.monotonic() - self.away_since > self.pace.gone

    @property
    def obstacle(self) -> object:
        """Why the node is unreachable, is not trusted, or refuses this node; None otherwise."""
        return self.refusal if self.away_since is None else self.trouble

    def close(self) -> None:
        """Stop sending pings. Pending requests fail as if the node were unreachable."""
        self._is_closed = True
        for task in (self._watcher, self._pinging):
            if task is not None:
                task.cancel()
        if self.away_since is None:
            self.trouble = "it is no longer one of the nodes"
            self.away_since = time.monotonic()
            self._away_signal.set_result(None)

    async def fetch(
        self, want: Want, view: int, ask: Ask, *ended: asyncio.Future[None]
    ) -> tuple[Pages, memoryview]:
        """Request pages from the node.

        Args:
            want: the pages.
            view: the number of this node's view.
            ask: whether the node should fetch pages that it does not hold.
            ended: see `post`.

        Returns: the pages that the node sent, and their bytes one after another. There are no pages
            if the node does not have any, or if bytes were changed during transmission.

        Raises: AwayError if the node is unreachable; OtherViewError if it is in another view; the
            error that it responds with.
        """
        fresh = "&fresh=1" if want.mode is Mode.FRESH else ""
        needs = pack_needs([Need.of(want.key, want.pages, want.due)])
        response = await self.post(f"/v1/pages?view={view}{ask.value}{fresh}", needs, *ended)
        try:
            return unpack_pages(response, want.key, want.pages)
        except ValueError as error:
            self.num_bad += 1
            LOG.warning("mirror: ignored a response from node %s: %s", self.name, error)
            return NO_PAGES, memoryview(b"")

    async def post(self, path: str, body: bytes, *ended: asyncio.Future[None]) -> bytes:
        """Send a request, and return the body of the response. Raises: AwayError if the node is
        unreachable, or any of the futures `ended` is done; the error that it responds with."""
        if self.away_since is not None:
            raise AwayError(f"{self.name} is unreachable: {self.trouble}")
        self._num_pending += 1
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
        task = asyncio.ensure_future(self._send("POST", path, body))
        try:
            awaited = [task, self._away_signal, *ended]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise AwayError(f"{self.name} is unreachable: {self.trouble}")
            return task.result()
        except MegablendError:
            # Some of these are also OSErrors, but a missing file does not mean that the node is
            # away
            raise
        except (aiohttp.ClientError, OSError) as error:
            self._mark_away(error)
            raise AwayError(f"{self.name} is unreachable: {self.trouble}") from None
        finally:
            task.cancel()
            self._num_pending -= 1

    async def ping(self) -> bool:
        """Send a ping. Returns: whether the node responds. If not, it is treated as unreachable."""
        suspicion = None
        if self.away_since is None:
            suspicion = asyncio.get_running_loop().call_later(self.pace.ping, self.on_suspect)
        try:
            await asyncio.wait_for(self._send("GET", "/v1/ping", b""), self.pace.silent)
        except asyncio.TimeoutError:
            self._mark_away(f"it has not responded for {self.pace.silent:g} s")
        except (aiohttp.ClientError, OSError) as error:
            self._mark_away(error)
        except MegablendError as error:
            self.refusal = error  # a node that refuses is reachable
        else:
            return True
        finally:
            if suspicion is not None:
                suspicion.cancel()
        return self.away_since is None

    def ping_if_silent(self) -> None:
        """Send a ping, unless the node has just responded, is unreachable, or is being pinged."""
        is_pinged = self._pinging is not None and not self._pinging.done()
        has_responded = time.monotonic() - self.responded_at < self.pace.ping
        if not (is_pinged or has_responded or self.away_since is not None):
            self._pinging = asyncio.ensure_future(self.ping())

    async def _watch(self) -> None:
        """Send pings while requests wait for a response, or the node is unreachable."""
        # `wait_for` loses a cancellation that comes at the moment of its result
        while not self._is_closed and (self._num_pending or self.away_since is not None):
            await asyncio.sleep(self.pace.ping)
            is_silent = time.monotonic() - self.responded_at >= self.pace.ping
            if self.away_since is not None or (self._num_pending and is_silent):
                await self.ping()
        self._watcher = None

    def _mark_away(self, trouble: object) -> None:
        """Record that the node is unreachable, and why. Pending requests fail."""
        self.trouble = str(trouble) or type(trouble).__name__
        if self.away_since is not None:
            return
        self.away_since = time.monotonic()
        LOG.warning("mirror: node %s is unreachable: %s", self.name, self.trouble)
        self._away_signal.set_result(None)
        self._away_signal = asyncio.get_running_loop().create_future()
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())

    async def _send(self, method: str, path: str, body: bytes) -> bytes:
        """Send a request as `_request` does. While this node lacks memory or file descriptors, try
        again. Raises: the same errors as `_request`."""
        while True:
            try:
                return await self._request(method, path, body)
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                LOG.warning(
                    "mirror: cannot connect to other nodes: %s; %s", error, remedy_of(error.errno)
                )
            await asyncio.sleep(_SHORTAGE_SECONDS)

    async def _request(self, method: str, path: str, body: bytes) -> bytes:
        """Send a signed request, check the signature of the response, and return its body.

        Raises: aiohttp.ClientError, OSError; the error that the node responds with.
        """
        url = f"{'https' if self.uses_tls else 'http'}://{self.name}{path}"
        for _ in range(_NUM_TRIES):
            signed_session = self.session
            headers = self.signer.sign(method, path, body, to=self.name, session=signed_session)
            async with self.http.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                protocol = response.headers.get(PROTOCOL_HEADER)
                size = response.content_length
                if protocol != str(PROTOCOL) or size is None or size > MAX_PAYLOAD:
                    raise ConfigError(
                        f"{self.name} speaks protocol {protocol}, but this node speaks {PROTOCOL}\n"
                        "run the same version of megablend on all nodes, and make sure that no other program uses "
                        "their port"
                    )
                data = await response.read()
            status = response.status
            session = response.headers.get(SESSION, "")
            if status == SESSION_STATUS and session != signed_session:
                self.session = session  # the next attempt is signed for it
                continue
            try:
                self.signer.check_answer(headers, status, response.headers, data)
            except SignatureError as error:
                raise ConfigError(
                    f"{self.name} cannot be trusted: {error}\ngive all nodes the same `secret_file`"
                ) from None
            self._note_response(session)
            if status != 200:
                raise self._read_error(status, data)
            return data
        raise ConfigError(f"{self.name} keeps restarting\ncheck the log of its node process")

    def _read_error(self, status: int, data: bytes) -> MegablendError | AwayError:
        """Convert a response whose status is not 200 to an error."""
        if status in (VIEW_STATUS, AWAY_STATUS):
            error_class = OtherViewError if status == VIEW_STATUS else AwayError
            return error_class(data.decode(errors="replace"))
        if status == ERROR_STATUS:
            with contextlib.suppress(ValueError, TypeError, LookupError):
                error = unpack_error(data)
                if isinstance(error, MegablendError):
                    return error
        return ConfigError(
            f"{self.name} refused a request: status {status}, {data[:200].decode(errors='replace')}\n"
            "check the log of its node process"
        )

    def _note_response(self, session: str) -> None:
        """Record a valid response of the node, and its session."""
        self.responded_at = time.monotonic()
        self.refusal = None
        away_since = self.away_since
        if away_since is not None:
            self.away_since = None
            seconds = time.monotonic() - away_since
            LOG.warning("mirror: node %s responds again after %.0f s", self.name, seconds)
        if away_since is not None or session != self._met_session:
            self._met_session = session
            self.session = session
            self.on_met(self)

    async def call(self, path: str, value: Any) -> Any:
        """Send a value as JSON, and return the parsed JSON of the response. Raises: see `post`."""
        return parse_json(await self.post(path, pack_json(value)) or b"null")

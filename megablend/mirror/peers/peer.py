"""Requests to another node, and whether it is there: it answers, however slowly, or is away."""

from __future__ import annotations

import asyncio
import contextlib
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
"""Status of an answer that means AwayError."""
ERROR_STATUS = 409
"""Status of an answer that contains an error by `pack_error`."""
VIEW_STATUS = 412
"""Status of an answer that means OtherViewError."""
SESSION_STATUS = 401
"""Status of an answer to a request that was signed for another session of the node."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Numbers of errors of connections for which the other node is not to blame."""
_SHORTAGE_SECONDS = 0.5


class OtherViewError(AwayError):
    """The node that is asked is in another view than this one, for a moment."""


@dataclass(eq=False)
class Peer:
    """Sends requests to another node. As soon as it is away, all its pending requests fail."""

    name: str
    """`host:port`."""
    http: aiohttp.ClientSession
    signer: Signer
    pace: Pace
    met: Callable[[Peer], None]
    """Called at its first answer after each of its starts, and when it is back after being away."""
    suspect: Callable[[], None]
    """Called when it does not answer a ping within `pace.ping` seconds."""
    uses_tls: bool
    session: str = ""
    """The random id that the node chose when it started; requests are signed for it."""
    away_since: float | None = None
    """When it was found to be away, in monotonic seconds; None while it answers."""
    trouble: str = "it was not asked yet"
    """Why it did not answer the last time that no answer came."""
    refusal: MegablendError | None = None
    """Why its last answer was not trusted, or why it refused this node; None otherwise."""
    num_bad: int = 0
    """Number of answers whose bytes were changed on the way."""
    heard_at: float = 0.0
    """When it answered last, in monotonic seconds."""
    _met_session: str = ""
    _gone: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _num_waiting: int = 0
    _watcher: asyncio.Task[None] | None = None
    _pinging: asyncio.Task[bool] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether it has been away for so long that nobody waits for it any more."""
        return self.away_since is not None and (time.monotonic() - self.away_since > self.pace.gone)

    @property
    def obstacle(self) -> object:
        """Why it is away, or was not trusted, or refused this node; None otherwise."""
        return self.refusal if self.away_since is None else self.trouble

    def close(self) -> None:
        """Send no more pings. Pending requests fail, as if it were away."""
        for task in (self._watcher, self._pinging):
            if task is not None:
                task.cancel()
        if self.away_since is None:
            self.trouble = "it is not one of the nodes any more"
            self.away_since = time.monotonic()
            self._gone.set_result(None)

    async def fetch(
        self, want: Want, view: int, *, only_held: bool, settles: bool = False
    ) -> tuple[Pages, memoryview]:
        """Request pages.

        Args:
            view: the number of this node's view.
            only_held: whether only pages that the other node holds are wanted. Otherwise it gets
                the others, as their home.
            settles: whether it first waits for its own reads of them from the source.

        Returns: pages, and their bytes one after another. There are none if it has none, or if
            their bytes were changed on the way.

        Raises: AwayError; OtherViewError if it is in another view; the error that it answers with.
        """
        path = f"/v1/pages?view={view}"
        path += (
            "&held=1" * only_held + "&settle=1" * settles + "&fresh=1" * (want.mode is Mode.FRESH)
        )
        answer = await self.post(path, pack_needs([Need.of(want.key, want.pages, want.due)]))
        try:
            return unpack_pages(answer, want.key, want.pages)
        except ValueError as error:
            self.num_bad += 1
            LOG.warning("mirror: %s: its response is ignored: %s", self.name, error)
            return NO_PAGES, memoryview(b"")

    async def post(self, path: str, body: bytes) -> bytes:
        """Send a request, and return the answer. Raises: AwayError if the node cannot be reached;
        the error that it answers with."""
        if self.away_since is not None:
            raise AwayError(f"{self.name} is unreachable: {self.trouble}")
        self._num_waiting += 1
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
        gone = self._gone
        task = asyncio.ensure_future(self._send("POST", path, body))
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise AwayError(f"{self.name} is unreachable: {self.trouble}")
            return task.result()
        except MegablendError:
            raise  # before OSError, which some are, too: a missing file does not mean an absent node
        except (aiohttp.ClientError, OSError) as error:
            self._leave(error)
            raise AwayError(f"{self.name} is unreachable: {self.trouble}") from None
        finally:
            task.cancel()
            self._num_waiting -= 1

    async def ping(self) -> bool:
        """Whether the node is there: it answers a ping. If it does not, it is away from now on."""
        suspicion = None
        if self.away_since is None:
            suspicion = asyncio.get_running_loop().call_later(self.pace.ping, self.suspect)
        try:
            await asyncio.wait_for(self._send("GET", "/v1/ping", b""), self.pace.silent)
        except asyncio.TimeoutError:
            self._leave(f"it has not answered for {self.pace.silent:g} s")
        except (aiohttp.ClientError, OSError) as error:
            self._leave(error)
        except MegablendError as error:
            self.refusal = error  # a node that refuses is there
        else:
            return True
        finally:
            if suspicion is not None:
                suspicion.cancel()
        return self.away_since is None

    def check(self) -> None:
        """Send a ping, unless the node has just answered, is away, or is being pinged."""
        is_asked = self._pinging is not None and not self._pinging.done()
        is_heard = time.monotonic() - self.heard_at < self.pace.ping
        if not (is_asked or is_heard or self.away_since is not None):
            self._pinging = asyncio.ensure_future(self.ping())

    async def _watch(self) -> None:
        """Send pings as long as requests are pending without an answer, or the node is away."""
        while self._num_waiting or self.away_since is not None:
            await asyncio.sleep(self.pace.ping)
            is_silent = time.monotonic() - self.heard_at >= self.pace.ping
            if self.away_since is not None or (self._num_waiting and is_silent):
                await self.ping()
        self._watcher = None

    def _leave(self, trouble: object) -> None:
        """Record that the node is away, and why; its pending requests fail."""
        self.trouble = str(trouble) or type(trouble).__name__
        if self.away_since is not None:
            return
        self.away_since = time.monotonic()
        LOG.warning("mirror: node %s is away: %s", self.name, self.trouble)
        self._gone.set_result(None)
        self._gone = asyncio.get_running_loop().create_future()
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())

    async def _send(self, method: str, path: str, body: bytes) -> bytes:
        """As `_request`, but repeated while this node is short of memory or file descriptors.

        Raises: aiohttp.ClientError, OSError; the error that the node answers with.
        """
        while True:
            try:
                return await self._request(method, path, body)
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                LOG.warning("mirror: no connection: %s; %s", error, remedy_of(error.errno))
            await asyncio.sleep(_SHORTAGE_SECONDS)

    async def _request(self, method: str, path: str, body: bytes) -> bytes:
        """Send a signed request, check the signature of the answer, and return its body.

        Raises: aiohttp.ClientError, OSError; the error that the node answers with.
        """
        url = f"{'https' if self.uses_tls else 'http'}://{self.name}{path}"
        for _ in range(3):
            signed_session = self.session
            headers = self.signer.sign(method, path, body, to=self.name, session=signed_session)
            async with self.http.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                protocol = answer.headers.get(PROTOCOL_HEADER)
                size = answer.content_length
                if protocol != str(PROTOCOL) or size is None or size > MAX_PAYLOAD:
                    raise ConfigError(
                        f"{self.name} speaks protocol {protocol}, but this node speaks {PROTOCOL}\n"
                        "Run the same version of megablend on all nodes, and make sure that no other program uses "
                        "their port."
                    )
                data = await answer.read()
            session = answer.headers.get(SESSION, "")
            if answer.status == SESSION_STATUS and session != signed_session:
                self.session = session  # the answer to the next try has to be signed for it
                continue
            try:
                self.signer.check_answer(headers, answer.status, answer.headers, data)
            except SignatureError as error:
                raise ConfigError(
                    f"{self.name} cannot be trusted: {error}\ngive all nodes the same `secret_file`"
                ) from None
            self._heard(session)
            if answer.status == VIEW_STATUS:
                raise OtherViewError(data.decode(errors="replace"))
            if answer.status == AWAY_STATUS:
                raise AwayError(data.decode(errors="replace"))
            if answer.status != 200:
                raise self._read_error(answer.status, data)
            return data
        raise ConfigError(f"{self.name} keeps restarting\ncheck the log of its node process")

    def _read_error(self, status: int, data: bytes) -> MegablendError:
        """The error of an answer with another status than 200."""
        if status == ERROR_STATUS:
            with contextlib.suppress(ValueError, TypeError, LookupError):
                error = unpack_error(data)
                if isinstance(error, MegablendError):
                    return error
        return ConfigError(
            f"{self.name} refused a request: {status} {data[:200].decode(errors='replace')}\n"
            "check the log of its node process"
        )

    def _heard(self, session: str) -> None:
        """Record a valid answer of the node, which is in this session."""
        self.heard_at = time.monotonic()
        self.refusal = None
        was_away = self.away_since is not None
        if self.away_since is not None:
            away = time.monotonic() - self.away_since
            self.away_since = None
            LOG.warning("mirror: node %s is back after %.0f s", self.name, away)
        if was_away or session != self._met_session:
            self._met_session = session
            self.session = session
            self.met(self)

    async def call(self, path: str, value: Any) -> Any:
        """Send a value as JSON, and return the answer, parsed from JSON. Raises: as `post`."""
        return parse_json(await self.post(path, pack_json(value)) or b"null")

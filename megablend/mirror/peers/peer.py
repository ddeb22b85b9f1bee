"""Another node, as this one sees it: it answers, however slowly, or is away."""

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
"""Of an answer: a node is waited for, as AwayError says."""
ERROR_STATUS = 409
"""Of an answer: an error by `pack_error`."""
VIEW_STATUS = 412
"""Of an answer: the node is in another view."""
SESSION_STATUS = 401
"""Of an answer: the request was signed for another session of the node."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of connections that say nothing of the other node."""
_SHORTAGE_SECONDS = 0.5


class OtherViewError(AwayError):
    """A node is in another view than the one that asks it: soon both will be in the same."""


@dataclass(eq=False)
class Peer:
    """Requests to another node. Those that are under way fail as soon as it is away."""

    name: str
    """`host:port`."""
    http: aiohttp.ClientSession
    signer: Signer
    pace: Pace
    met: Callable[[Peer], None]
    """Called when it answers for the first time, after each start of it, and when it is back."""
    suspect: Callable[[], None]
    """Called when it does not answer at once whether it is there."""
    uses_tls: bool
    session: str = ""
    """Drawn by the node at each of its starts; what requests are signed for."""
    away_since: float | None = None
    """Monotonic seconds; None: it answers."""
    trouble: str = "it was not asked yet"
    """Why it did not answer the last time that it did not."""
    refusal: MegablendError | None = None
    """Why what answers in its place is not believed, or does not believe this node."""
    num_bad: int = 0
    """Answers whose bytes were changed on the way."""
    heard_at: float = 0.0
    """Monotonic seconds: when it answered last."""
    _met_session: str = ""
    _gone: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _num_waiting: int = 0
    _watcher: asyncio.Task[None] | None = None
    _pinging: asyncio.Task[bool] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.away_since is not None and (time.monotonic() - self.away_since > self.pace.gone)

    def close(self) -> None:
        """Ask no more whether it is there: it is away for those who wait for it."""
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
        """Pages that it holds, or gets as their home in that view; and their bytes one after another.
        It `settles` them, if it is to read first what it is reading of them from the source.

        Returns: no pages if it has none, or their bytes were changed on the way.

        Raises: AwayError; OtherViewError if it is in another view; what it failed with.
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
            LOG.warning("mirror: %s: its answer is not used: %s", self.name, error)
            return NO_PAGES, memoryview(b"")

    async def post(self, path: str, body: bytes) -> bytes:
        """Send a request, and return the answer. Raises: AwayError if the node cannot be reached; the
        error that it answers with."""
        if self.away_since is not None:
            raise AwayError(f"{self.name} is away: {self.trouble}")
        self._num_waiting += 1
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
        gone = self._gone
        task = asyncio.ensure_future(self._send("POST", path, body))
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise AwayError(f"{self.name} is away: {self.trouble}")
            return task.result()
        except MegablendError:
            raise  # some are OSErrors, too: a missing file is no node that is away
        except (aiohttp.ClientError, OSError) as error:
            self._leave(error)
            raise AwayError(f"{self.name} is away: {self.trouble}") from None
        finally:
            task.cancel()
            self._num_waiting -= 1

    async def ping(self) -> bool:
        """Whether it answers; if not, it is away."""
        late = None
        if self.away_since is None:
            late = asyncio.get_running_loop().call_later(self.pace.ping, self.suspect)
        try:
            await asyncio.wait_for(self._send("GET", "/v1/ping", b""), self.pace.silent)
        except asyncio.TimeoutError:
            self._leave(f"it has not answered for {self.pace.silent:g} s")
        except (aiohttp.ClientError, OSError) as error:
            self._leave(error)
        except MegablendError as error:
            self.refusal = error  # who refuses is there
        else:
            return True
        finally:
            if late is not None:
                late.cancel()
        return self.away_since is None

    def check(self) -> None:
        """Find out whether it is there, unless that is known, or being asked."""
        is_asked = self._pinging is not None and not self._pinging.done()
        is_heard = time.monotonic() - self.heard_at < self.pace.ping
        if not (is_asked or is_heard or self.away_since is not None):
            self._pinging = asyncio.ensure_future(self.ping())

    async def _watch(self) -> None:
        """Ping while requests wait for an answer, or it is away."""
        while self._num_waiting or self.away_since is not None:
            await asyncio.sleep(self.pace.ping)
            is_silent = time.monotonic() - self.heard_at >= self.pace.ping
            if self.away_since is not None or (self._num_waiting and is_silent):
                await self.ping()
        self._watcher = None

    def _leave(self, trouble: object) -> None:
        """It is away."""
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
        """As `_request`; where this node runs short of something, it waits for it.

        Raises: aiohttp.ClientError, OSError; what it failed with.
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
        """Raises: aiohttp.ClientError, OSError; what it failed with."""
        url = f"{'https' if self.uses_tls else 'http'}://{self.name}{path}"
        for _ in range(3):
            asked = self.session
            headers = self.signer.sign(method, path, body, to=self.name, session=asked)
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
            if answer.status == SESSION_STATUS and session != asked:
                self.session = session  # believed when an answer is signed for it
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
        raise ConfigError(f"{self.name} keeps restarting\nLook at its log.")

    def _read_error(self, status: int, data: bytes) -> MegablendError:
        """Why it refuses a request."""
        if status == ERROR_STATUS:
            with contextlib.suppress(ValueError, TypeError, LookupError):
                error = unpack_error(data)
                if isinstance(error, MegablendError):
                    return error
        return ConfigError(
            f"{self.name} refused a request: {status} {data[:200].decode(errors='replace')}\n"
            "Look at the log of its node process."
        )

    def _heard(self, session: str) -> None:
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
        """The JSON that answers JSON. Raises: as `post`."""
        return parse_json(await self.post(path, pack_json(value)) or b"null")

"""Requests to one bucket or server: a ranged GET of one version, tried again and hedged; and how it went, in numbers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    CorruptFileError,
    DataError,
    MissingFileError,
    UnsupportedFileError,
)
from megablend.storage.object_options import StoreOptions
from megablend.storage.objects.failures import Failure, Kind, read_failure
from megablend.storage.objects.flow import Flow
from megablend.storage.objects.pins import Pin, make_pin
from megablend.storage.objects.timing import LARGE_BYTES, Timing
from megablend.storage.objects.watch import Request, Watch
from megablend.storage.retries import count_retry

T = TypeVar("T")
_LOG = logging.getLogger("megablend")
_LOG_SECONDS = 60.0
_QUIET_ATTEMPTS = 3
"""Before anything is said of a request: single failures are ordinary."""
_FIRST_CONTACT_SECONDS = 10.0
"""A source that has never answered is given up sooner: its name, port or certificate is probably wrong."""
_EXPIRED_ATTEMPTS = 3
_MOST_SECONDS = 10.0
_MOST_PATIENCE = 16.0
_HEDGES = 0.005
_STREAM_BYTES = 1 << 20


class Answer(NamedTuple):
    """Bytes of an object, and which version of it they are of."""

    parts: list[Any]
    """Buffers, one after the other."""
    start: int
    stop: int
    pin: Pin


@dataclass(slots=True)
class Counts:
    """What a source was asked for."""

    requests: int = 0
    bytes: int = 0
    """Asked for, with those that were asked for again."""
    failures: int = 0
    hedges: int = 0


class Source:
    """A bucket, container or server, reached with one set of options. Used in the event loop only.

    Args:
        root: for messages, such as s3://bucket.
        store: obstore's, which does not try again by itself.
        options: how it is read.
        processes: that share the job's limits.
    """

    def __init__(self, root: str, store: Any, options: StoreOptions, processes: int) -> None:
        self.root, self.store, self.options = root, store, options
        self.flow = Flow(options.max_requests, options.max_source_rate, processes)
        self.timing = Timing(options.read_timeout)
        self.counts = Counts()
        self._answered = False
        self._logged_at = -_LOG_SECONDS
        self._failing = 0
        self._said_weak = False
        self._watch = Watch(self.timing, self.flow, options.read_timeout, self._hedge)

    async def get(self, location: str, key: str, start: int, stop: int, pin: Pin | None) -> Answer:
        """Bytes `start` to `stop` of one version of an object; of whichever there is where `pin` is None.

        Raises: MissingFileError; ChangedFileError; CorruptFileError where it ends before; DataError.
        """

        patience = 1.0

        async def attempt() -> Answer | Failure:
            nonlocal patience
            await self.flow.enter(stop - start)
            answers = self.timing.num_answers
            try:
                return await self._send(key, start, stop, pin, patience)
            finally:
                self.flow.leave(stop - start)
                if answers == self.timing.num_answers:  # slow for all: nothing is learned from what is not waited for
                    patience = min(_MOST_PATIENCE, 2 * patience)

        found = await self.persist(location, attempt)
        if isinstance(found, Failure):
            raise _error_of(location, found, pin, start, stop)
        return found

    async def persist(self, location: str, attempt: Callable[[], Awaitable[T | Failure]]) -> T | Failure:
        """Call `attempt` until it succeeds, or fails in a way that trying again does not change.

        Raises: DataError where it was tried for `give_up_after`.
        """
        loop = asyncio.get_running_loop()
        attempts, failed_at = 0, 0.0
        try:
            while True:
                found = await attempt()
                attempts += 1
                if not isinstance(found, Failure):
                    self._answered = True
                    self.flow.speed_up()
                    return found
                now = loop.time()
                if attempts == 1:
                    failed_at = now
                    self._failing += 1
                self._check_patience(location, found, attempts, now - failed_at)
                if self._is_final(found, attempts):
                    return found
                if found.kind is Kind.BUSY:
                    self.flow.slow_down(now)
                if attempts > _QUIET_ATTEMPTS:
                    self._log(found, now)
                count_retry()
                longest = min(_MOST_SECONDS, 0.1 * 2 ** min(attempts, 20))
                await asyncio.sleep(longest * random.uniform(0.5, 1) + (found.kind is Kind.EXPIRED) * 0.5)
        finally:
            if failed_at:
                self._failing -= 1

    def _is_final(self, failure: Failure, attempts: int) -> bool:
        """Whether trying again changes nothing."""
        self.counts.failures += 1
        self._answered = self._answered or failure.kind not in (Kind.CONNECT, Kind.AGAIN)
        if failure.kind is Kind.EXPIRED:
            return attempts >= _EXPIRED_ATTEMPTS
        return failure.kind not in (Kind.AGAIN, Kind.BUSY, Kind.CONNECT)

    def _check_patience(self, location: str, failure: Failure, attempts: int, seconds: float) -> None:
        if failure.kind not in (Kind.AGAIN, Kind.BUSY, Kind.CONNECT):
            return
        patience = self.options.give_up_after
        if failure.kind is Kind.CONNECT and not self._answered:
            patience = min(patience, _FIRST_CONTACT_SECONDS)
        if seconds >= patience:
            remedy = failure.remedy or "check the source and the network, or increase `give_up_after`"
            raise DataError(
                location, f"cannot be read: {failure.cause}; tried {attempts} times in {seconds:.0f} s: {remedy}"
            )

    def _log(self, failure: Failure, now: float) -> None:
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            _LOG.warning(
                "%s: %s; %d requests are being tried again, each for %.0f s at most (%d of %d failed so far)",
                self.root,
                failure.cause,
                self._failing,
                self.options.give_up_after,
                self.counts.failures,
                self.counts.requests,
            )

    async def _send(self, key: str, start: int, stop: int, pin: Pin | None, patience: float) -> Answer | Failure:
        """One attempt: a request, and a second one where it is late; `patience`: times the usual time that it may take."""
        request = self._start(stop - start, patience, self._hedge_after(stop - start))

        def send_again() -> None:
            second = self._start(stop - start, patience)
            request.hedge = asyncio.get_running_loop().create_task(self._receive(second, key, start, stop, pin))
            request.hedge.add_done_callback(lambda done: _take_hedge(request, done))

        request.send_again = send_again
        try:
            found = await self._receive(request, key, start, stop, pin)
            if isinstance(found, Failure) and request.hedge is not None:
                return cast("Answer | Failure", await request.hedge)
            return found
        finally:
            if request.hedge is not None:
                request.hedge.cancel()

    def _start(self, size: int, patience: float, hedge_after: float = math.inf) -> Request:
        now = asyncio.get_running_loop().time()
        request = Request(
            now,
            size=size,
            num_answers=self.timing.num_answers,
            patience=patience,
            late_at=now + hedge_after,
        )
        self.counts.requests += 1
        self.counts.bytes += size
        return request

    def _hedge_after(self, size: int) -> float:
        """Seconds after which a request is sent a second time; never where few bytes or requests may be sent."""
        if size > LARGE_BYTES or self.options.max_source_rate is not None or self.flow.is_slowed:
            return math.inf
        return self.timing.hedge_after() or math.inf

    def _hedge(self, request: Request) -> None:
        """Send a late request a second time, unless too many were."""
        if request.send_again is not None and self.counts.hedges < _HEDGES * self.counts.requests:
            self.counts.hedges += 1
            request.send_again()

    async def _receive(self, request: Request, key: str, start: int, stop: int, pin: Pin | None) -> Answer | Failure:
        """The answer of a request, or that of its second one if that comes first."""
        self._watch.add(request)
        try:
            return await self._exchange(request, key, start, stop, pin)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            if request.hedge_answer is not None:
                return cast(Answer, request.hedge_answer)
            if request.is_stalled:
                is_alive = self.timing.num_answers > request.num_answers
                silence = asyncio.get_running_loop().time() - request.last
                return Failure(Kind.AGAIN if is_alive else Kind.BUSY, f"no answer for {silence:.0f} s", "")
            raise
        except Exception as error:  # of the client: whatever it is
            return read_failure(error)
        finally:
            self._watch.remove(request)

    async def _exchange(self, request: Request, key: str, start: int, stop: int, pin: Pin | None) -> Answer | Failure:
        import obstore

        loop = asyncio.get_running_loop()
        options: Any = {"range": (start, stop), **(pin.conditions if pin is not None else {})}
        request.waits_for = cast("asyncio.Future[Any]", obstore.get_async(self.store, key, options=options))
        result = await request.waits_for
        request.first = request.last = loop.time()
        there = make_pin(result.meta, versions=self.options.versions)
        if pin is not None and (difference := pin.find_difference(there)) is not None:
            return Failure(Kind.CHANGED, difference, "")
        begin, end = result.range
        parts: list[Any] = []
        if request.is_large:
            stream = result.stream(min_chunk_size=_STREAM_BYTES).__aiter__()
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    request.waits_for = stream.__anext__()
                    parts.append(await request.waits_for)
                    request.last = loop.time()
        else:
            request.waits_for = result.bytes_async()
            parts.append(await request.waits_for)
        if not there.etag and not self._said_weak:
            self._said_weak = True
            _LOG.warning(
                "%s: sends no strong etags: only its size or time of modification (in seconds) shows that an object was replaced",
                self.root,
            )
        if begin != start or sum(map(len, parts)) != end - begin:
            return Failure(Kind.AGAIN, "the answer was not as long as it should be", "")
        if end != stop and end != there.size:
            return Failure(Kind.AGAIN, "the answer ended early", "")
        self.timing.note(request.began, loop.time() - request.began, stop - start)
        self.flow.note_latency(request.first - request.began, request.first)
        return Answer(parts, begin, end, there)


def _is_cancelled() -> bool:
    """Whether this task itself was cancelled, not just what it waited for; not known before Python 3.11."""
    return bool(getattr(asyncio.current_task(), "cancelling", int)())


def _take_hedge(request: Request, second: asyncio.Task[Answer | Failure]) -> None:
    """The second request of a late one is done."""
    if not second.cancelled() and isinstance(found := second.result(), Answer):
        request.hedge_answer = found
        request.interrupt()


def _error_of(location: str, failure: Failure, pin: Pin | None, start: int, stop: int) -> DataError:
    """What to say of a request that failed for good."""
    if failure.kind is Kind.MISSING:
        if pin is None:
            return MissingFileError(location, "no such object")
        return MissingFileError(location, f"was deleted while it was in use; {CHANGED_REMEDY}")
    if failure.kind is Kind.CHANGED:
        found = "" if failure.cause == "was replaced" else f" ({failure.cause})"
        return ChangedFileError(location, f"was replaced while it was in use{found}; {CHANGED_REMEDY}")
    if failure.kind is Kind.EMPTY:
        return CorruptFileError(
            location,
            f"truncated: {stop - start} bytes expected here, but the object ends before; restore it",
            offset=start,
        )
    kind = UnsupportedFileError if failure.kind is Kind.NO_RANGES else DataError
    return kind(location, f"cannot be read: {failure.cause}: {failure.remedy}")

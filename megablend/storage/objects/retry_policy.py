"""Retry requests to a source until they succeed, are refused, or have failed for too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from megablend.errors import DataError
from megablend.storage.objects.failures import Failure, Kind, read_failure
from megablend.storage.objects.rate_limiter import Failing, RateLimiter
from megablend.storage.process_counts import count
from megablend.system.log import LOG

T = TypeVar("T")
_LOG_SECONDS = 60.0
"""The minimum time between two warnings about a source."""
_QUIET_ATTEMPTS = 3
"""The number of attempts at a request before its failures are logged, since a few failures are
ordinary."""
_FIRST_CONTACT_SECONDS = 10.0
"""The time after which requests to a source that has never responded are given up: its name, port
or certificate is probably wrong."""
_MAX_DOUBTFUL_ATTEMPTS = 3
"""The maximum number of attempts at a request that fails in a way for which retries rarely help."""
_RANDOM = random.SystemRandom()
"""A random generator other than the global one, which a program may have seeded: reads must not
change the numbers that the program draws. Forked workers draw different numbers."""
_MAX_SECONDS = 10.0
"""The maximum pause between two attempts."""
_PAGE_KEYS = 1000
"""The number of keys on a page of a listing."""
_LISTED_BYTES = 250
"""The approximate number of bytes that an object takes in a listing, in addition to its key."""
_OF_OBJECTS = (Kind.MISSING, Kind.CHANGED, Kind.EMPTY, Kind.BAD_KEY)
"""The kinds of failures for which the source is not at fault."""
_DOUBTFUL = (Kind.EXPIRED, Kind.UNUSABLE, Kind.CHANGED, Kind.CONFLICT)
"""The kinds of failures after which a request is tried _MAX_DOUBTFUL_ATTEMPTS times in all."""
_TRIED_AGAIN = (Kind.AGAIN, Kind.BUSY, Kind.CONNECT)
"""The kinds of failures after which a request is retried until it has failed for too long."""


@dataclass(slots=True)
class Counts:
    """Counts of the requests to a source."""

    requests: int = 0
    bytes: int = 0
    """The number of requested bytes, counted again for each further attempt."""
    failures: int = 0
    hedges: int = 0
    """The number of requests that were sent a second time because they were late."""

    def add_listing(self, num_keys: int, num_letters: int) -> None:
        """Count the requests of a listing, which comes in pages.

        Args:
            num_keys: the number of listed keys.
            num_letters: the total number of characters of all keys.
        """
        self.requests += max(1, -(-num_keys // _PAGE_KEYS))
        self.bytes += _LISTED_BYTES * num_keys + num_letters


class RetryPolicy:
    """A policy that retries the requests to one source; used in the event loop only.

    Args:
        root: the location of the source for messages, such as s3://bucket.
        give_up_after: the number of seconds after which a request that keeps failing is given up.
        limiter: is notified when the source is busy, to admit fewer requests.
    """

    def __init__(self, root: str, give_up_after: float, limiter: RateLimiter) -> None:
        self._root = root
        self._give_up_after = give_up_after
        self._limiter = limiter
        self.counts = Counts()
        self._has_answered = False
        self._logged_at = -_LOG_SECONDS
        self._failing = 0
        """The number of requests that are being retried."""

    def note_success(self) -> None:
        """Record that a request got a response."""
        self._has_answered = True
        self._limiter.failing = None
        self._limiter.speed_up()

    async def retry(
        self,
        location: str,
        attempt: Callable[[], Awaitable[T | Failure]],
        first: Failure | None = None,
    ) -> T | Failure:
        """Call `attempt` until it succeeds, or fails in a way that another attempt would not
        change.

        Args:
            first: the failure of an earlier attempt, if there was one. If it is given, `attempt`
                has to wait for the limiter's rates and pauses itself; otherwise this method waits
                for them.

        Returns: the result, or the last failure.
        Raises: DataError if the request has been failing for `give_up_after` seconds.
        """
        now = asyncio.get_running_loop().time
        outcome: T | Failure
        if first is None:
            await self._limiter.pay()
            outcome = await attempt()
        else:
            outcome = first
        if not isinstance(outcome, Failure):
            self.note_success()
            return outcome
        self._failing += 1
        try:
            attempts = 1
            failed_at = now()
            while isinstance(outcome, Failure):
                self._check_time(location, outcome, attempts, now() - failed_at)
                self._note_failure(outcome, now())
                if _is_final(outcome, attempts):
                    return outcome
                await self._pause(outcome, attempts, now())
                if first is None:
                    await self._limiter.pay()
                outcome = await attempt()
                attempts += 1
        finally:
            self._failing -= 1
        self.note_success()
        return outcome

    async def _pause(self, failure: Failure, attempts: int, now: float) -> None:
        """Wait before the next attempt. The wait gets longer after each attempt, and is random, so
        that requests that failed together are not retried together."""
        if failure.kind is Kind.BUSY:
            self._limiter.slow_down(now, failure.pause)
        if attempts > _QUIET_ATTEMPTS:
            self._log(failure, now)
        count("retries")
        longest = min(_MAX_SECONDS, 0.1 * 2 ** min(attempts, 20))
        pause = longest * _RANDOM.uniform(0.5, 1)
        if failure.kind is Kind.EXPIRED:
            pause += 0.5
        await asyncio.sleep(pause)

    def _note_failure(self, failure: Failure, now: float) -> None:
        """Count a failure. A failure shows that the source responds, unless the connection
        failed."""
        before = self._limiter.failing
        is_fault = failure.kind not in _OF_OBJECTS
        since = now if before is None else before.since
        self._limiter.failing = Failing(since, failure.cause) if is_fault else None
        self.counts.failures += 1
        self._has_answered = self._has_answered or failure.kind not in (Kind.CONNECT, Kind.AGAIN)

    def _check_time(self, location: str, failure: Failure, attempts: int, seconds: float) -> None:
        """Check that a request has not failed for too long, given the seconds since its first
        failure. Raises: DataError."""
        if failure.kind not in _TRIED_AGAIN:
            return
        max_seconds = self._give_up_after
        remedy = failure.remedy or "check the source and the network, or increase `give_up_after`"
        if failure.kind is Kind.CONNECT and not self._has_answered:
            max_seconds = min(max_seconds, _FIRST_CONTACT_SECONDS)
            remedy = (
                failure.remedy
                or "the server has never responded: check the location, `endpoint`, `proxy` and the network"
            )
        if seconds >= max_seconds:
            raise DataError(
                location,
                f"cannot be read: {failure.cause}; tried {attempts} times in {seconds:.0f} s; {remedy}",
            )

    def _log(self, failure: Failure, now: float) -> None:
        """Warn that requests are being retried, at most once a minute."""
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            LOG.warning(
                "%s: %s; %d requests are being retried, each for at most %.0f s (%d of %d failed so far)",
                self._root,
                failure.cause,
                self._failing,
                self._give_up_after,
                self.counts.failures,
                self.counts.requests,
            )


async def attempt_within(
    seconds: float, send: Callable[[], Awaitable[T]], *, is_write: bool = False
) -> T | Failure:
    """Send a request that may take at most `seconds`. Returns: the response, or the failure."""
    try:
        return await asyncio.wait_for(send(), seconds)
    except asyncio.TimeoutError:  # not TimeoutError before Python 3.11
        return Failure(Kind.AGAIN, f"no response for {seconds:.0f} s", "")
    except Exception as error:  # the client may raise anything
        return read_failure(error, is_write=is_write)


def _is_final(failure: Failure, attempts: int) -> bool:
    """Return whether a request that has failed must not be retried."""
    if failure.kind in _DOUBTFUL:
        return attempts >= _MAX_DOUBTFUL_ATTEMPTS
    return failure.kind not in _TRIED_AGAIN

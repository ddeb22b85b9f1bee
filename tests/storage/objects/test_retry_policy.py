"""What is tried again, how often and after which pauses, on a clock that moves while attempts are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator

import pytest

from megablend.errors import DataError
from megablend.storage.objects.failures import Failure, Kind
from megablend.storage.objects.rate_limiter import RateLimiter
from megablend.storage.objects.retry_policy import RetryPolicy, attempt_within


class Trial:
    """RetryPolicy at one request, with a limiter of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, give_up_after: float = 600.0) -> None:
        self.limiter = RateLimiter(64, None, 1)
        self.attempts = RetryPolicy("s3://bucket", give_up_after, self.limiter)
        self.pauses = list[float]()
        self.tried = 0
        self.times = list[float]()
        """When it was tried."""
        monkeypatch.setattr("megablend.storage.objects.retry_policy.asyncio.sleep", self._pause)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def run(self, kinds: Iterable[Kind | None]) -> Kind | None:
        """RetryPolicy that fail like this, one after the other; None succeeds. Returns: how the last one ended."""
        ends = iter(kinds)

        async def attempt() -> str | Failure:
            self.tried += 1
            self.times.append(asyncio.get_running_loop().time())
            kind = next(ends)
            return "answer" if kind is None else Failure(kind, "it failed", "")

        async def retry() -> str | Failure:
            loop = asyncio.get_running_loop()
            loop.time = lambda: 100 + sum(self.pauses)  # type: ignore[method-assign]
            return await self.attempts.retry("s3://bucket/key", attempt)

        found = asyncio.run(retry())
        return found.kind if isinstance(found, Failure) else None


def test_a_client_that_refuses_at_once_has_failed_too() -> None:
    def refuse() -> Awaitable[str]:
        raise UnicodeEncodeError("utf-8", "\udc80", 0, 1, "surrogates not allowed")

    assert isinstance(asyncio.run(attempt_within(1.0, refuse)), Failure)


def test_each_attempt_waits_for_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch)
    seconds = 100.0  # far longer than pauses between attempts
    trial.limiter = RateLimiter(64, None, 1, 1 / seconds)
    trial.attempts = RetryPolicy("s3://bucket", 600.0, trial.limiter)
    assert trial.run([Kind.AGAIN, Kind.AGAIN, None]) is None
    first, second, third = trial.times
    assert second - first >= seconds - 1e-6
    assert third - second >= seconds - 1e-6


def repeat(kind: Kind) -> Iterator[Kind]:
    while True:
        yield kind


@pytest.mark.parametrize(
    ("kind", "tried"),
    [(kind, 3) for kind in (Kind.EXPIRED, Kind.UNUSABLE, Kind.CHANGED, Kind.CONFLICT)]
    + [(kind, 1) for kind in (Kind.MISSING, Kind.EMPTY, Kind.NO_RANGES, Kind.REFUSED)],
)
def test_how_often_what_is_refused_is_tried(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, tried: int
) -> None:
    trial = Trial(monkeypatch)
    assert trial.run(repeat(kind)) is kind
    assert trial.tried == trial.attempts.counts.failures == tried


@pytest.mark.parametrize(
    ("before", "kind", "most_seconds"),
    [
        (None, Kind.CONNECT, 600),
        (Kind.MISSING, Kind.CONNECT, 600),
        (Kind.REFUSED, Kind.BUSY, 600),
        (Kind.AGAIN, Kind.AGAIN, 600),
        (Kind.CONNECT, Kind.CONNECT, 10),
    ],
)
def test_when_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, before: Kind | None, kind: Kind, most_seconds: float
) -> None:
    """Sooner where the source has never answered."""
    trial = Trial(monkeypatch)
    if before is not kind:
        trial.run([before])
    with pytest.raises(
        DataError,
        match=r"cannot be read: it failed; tried \d+ times in \d+ s; (check|the server has never)",
    ):
        trial.run(repeat(kind))
    assert most_seconds <= sum(trial.pauses) < most_seconds + 10


def test_pauses_become_longer_and_a_success_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch)
    assert trial.run([*[Kind.AGAIN] * 12, None]) is None
    assert trial.tried == 13
    for number, pause in enumerate(trial.pauses):
        longest = min(10.0, 0.1 * 2 ** (number + 1))
        assert longest / 2 <= pause <= longest
    assert not trial.limiter.is_slowed


def test_fewer_requests_are_sent_to_a_busy_source(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch)
    assert trial.run([Kind.BUSY, Kind.MISSING]) is Kind.MISSING
    assert trial.limiter.is_slowed


def test_a_source_is_at_fault_from_its_first_failure_whatever_the_next_ones_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = Trial(monkeypatch)
    trial.run([Kind.REFUSED])
    first = trial.limiter.failing
    assert first is not None
    trial.pauses.append(20.0)
    trial.run([Kind.AGAIN, Kind.BUSY, Kind.AGAIN, Kind.CONNECT, Kind.REFUSED])
    assert trial.limiter.failing == first
    # A response about an object is one, too
    trial.run([Kind.MISSING])
    assert trial.limiter.failing is None
    trial.run([Kind.BUSY, None])
    assert trial.limiter.failing is None

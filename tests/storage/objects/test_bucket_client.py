"""Requests that end while they are waited for, and answers that are not what was requested."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime, timezone
from typing import Any

import pytest

from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.bucket_client import BucketClient, RangeResponse
from megablend.storage.objects.failures import Failure, Kind
from megablend.storage.objects.in_flight import InFlightMonitor, RangeRequest, Request
from megablend.storage.objects.object_version import ObjectVersion, make_version
from megablend.storage.objects.rate_limiter import RateLimiter
from megablend.storage.store_options import find_options


class SilentSource(BucketClient):
    """Never answers."""

    async def _exchange(self, request: Request) -> RangeResponse | Failure:
        request.waits_for = asyncio.get_running_loop().create_future()
        answer: RangeResponse = await request.waits_for
        return answer


async def end_request(*, cancel: bool, before: int = 0, others: int = 0) -> RangeResponse | Failure:
    """Interrupt a stalled request, at the same moment as its caller cancels it or not, after answers of others."""
    source = SilentSource(
        "s3://bucket",
        None,
        find_options(ObjectOptions(), "s3://bucket/key"),
        RateLimiter(64, None, 1),
    )
    for _ in range(before):
        source.timing.note(0.0, 0.01, 4)
    request = source._start(RangeRequest("key", 0, 4, None))
    task = asyncio.create_task(source._receive(request))
    await asyncio.sleep(0)
    for _ in range(others):
        source.timing.note(request.sent_at, 0.01, 4)
    request.is_stalled = True
    request.interrupt()
    if cancel:
        task.cancel()
    return await task


@pytest.mark.parametrize(
    ("before", "others", "kind"), [(0, 0, Kind.CONNECT), (1, 0, Kind.BUSY), (1, 1, Kind.AGAIN)]
)
def test_a_stalled_request_is_a_failure(before: int, others: int, kind: Kind) -> None:
    """Of a source that is busy, unless it has answered others in the meantime; or that has never answered."""
    found = asyncio.run(end_request(cancel=False, before=before, others=others))
    assert isinstance(found, Failure)
    assert found.kind is kind


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not know before who cancels")
def test_a_cancelled_caller_is_not_sent_into_another_attempt() -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(end_request(cancel=True))


META: dict[str, Any] = {
    "size": 100,
    "e_tag": '"a"',
    "last_modified": datetime.fromtimestamp(0, timezone.utc),
    "version": None,
}
VERSION = make_version(META)


class Result:
    """An answer as the client gives it, where servers and proxies are wrong about what they send."""

    def __init__(self, begin: int, end: int, body: int | None = None, **meta: Any) -> None:
        self.range = (begin, end)
        self.meta = META | meta
        self.attributes = dict[str, str]()
        self._body = bytes(end - begin if body is None else body)

    async def bytes_async(self) -> bytes:
        return self._body


ANSWERS: dict[str, tuple[Result, int, ObjectVersion | None, Kind | None]] = {
    # the answer to a request for bytes 10 to some end of a version, and the kind of failure that it is
    "what was requested": (Result(10, 20), 20, VERSION, None),
    "up to the object's end": (Result(10, 100), 120, VERSION, None),
    "of any version": (Result(10, 20, e_tag='"b"'), 20, None, None),
    "another beginning": (Result(0, 10), 20, VERSION, Kind.AGAIN),
    "bytes missing": (Result(10, 20, 9), 20, VERSION, Kind.AGAIN),
    "too many bytes": (Result(10, 20, 11), 20, VERSION, Kind.AGAIN),
    "an early end": (Result(10, 15), 20, VERSION, Kind.AGAIN),
    "another etag": (Result(10, 20, e_tag='"b"'), 20, VERSION, Kind.CHANGED),
    "another size": (Result(10, 20, size=101), 20, VERSION, Kind.CHANGED),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_do_not_fit_are_failures(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    obstore = pytest.importorskip("obstore")
    result, stop, version, kind = ANSWERS[name]

    async def get() -> RangeResponse | Failure:
        async def give(*_: Any, **__: Any) -> Result:
            return result

        monkeypatch.setattr(obstore, "get_async", lambda *_, **__: asyncio.ensure_future(give()))
        source = BucketClient(
            "s3://bucket",
            None,
            find_options(ObjectOptions(), "s3://bucket/key"),
            RateLimiter(64, None, 1),
        )
        return await source._receive(source._start(RangeRequest("key", 10, stop, version)))

    found = asyncio.run(get())
    assert (found.kind if isinstance(found, Failure) else None) == kind
    if isinstance(found, RangeResponse):
        assert found.join() == result._body


def test_a_late_request_is_sent_a_second_time_once() -> None:
    async def watch() -> int:
        hedged = list[Request]()
        source = SilentSource(
            "s3://bucket",
            None,
            find_options(ObjectOptions(), "s3://bucket/key"),
            RateLimiter(64, None, 1),
        )
        watch = InFlightMonitor(source.timing, source.limiter, 0.1, hedged.append)
        request = source._start(RangeRequest("key", 0, 4, None), hedge_after=0.0)
        watch.add(request)
        await asyncio.sleep(0.05)  # several looks, one each hundredth of a second
        watch.remove(request)
        return len(hedged)

    assert asyncio.run(watch()) == 1


class SecondAnswers(BucketClient):
    """Its first request fails after a second one was sent, which is answered; without `second` there is none."""

    second = True

    async def _exchange(self, request: Request) -> RangeResponse | Failure:
        await asyncio.sleep(0)
        if self.counts.requests == 1:
            if self.second:
                self._hedge(request)
            return Failure(Kind.AGAIN, "it broke", "")
        return RangeResponse([b"data"], VERSION)


def test_a_second_request_is_waited_for_where_the_first_one_failed() -> None:
    source = SecondAnswers(
        "s3://bucket",
        None,
        find_options(ObjectOptions(), "s3://bucket/key"),
        RateLimiter(64, None, 1),
    )
    assert isinstance(asyncio.run(source._attempt(RangeRequest("key", 0, 4, None))), RangeResponse)
    assert (source.counts.requests, source.counts.hedges) == (2, 1)


def test_after_an_attempt_there_is_room_for_others_and_more_patience() -> None:
    source = SecondAnswers(
        "s3://bucket",
        None,
        find_options(ObjectOptions(), "s3://bucket/key"),
        RateLimiter(64, None, 1),
    )
    source.second = False
    wanted = RangeRequest("key", 0, 4, None)
    timeout_factors = []
    for _ in range(6):
        source.counts.requests = 0
        assert isinstance(asyncio.run(source._attempt(wanted)), Failure)
        timeout_factors.append(wanted.timeout_factor)
    assert timeout_factors == [2, 4, 8, 16, 16, 16]
    assert (source.limiter.requests, source.limiter.bytes) == (0, 0)


def test_few_requests_are_sent_a_second_time() -> None:
    async def hedge() -> int:
        source = SilentSource(
            "s3://bucket",
            None,
            find_options(ObjectOptions(), "s3://bucket/key"),
            RateLimiter(64, None, 1),
        )
        source.counts.requests = 1000
        requests = [source._start(RangeRequest("key", 0, 4, None)) for _ in range(50)]
        for request in requests:
            source._hedge(request)
        tasks = [request.hedge for request in requests if request.hedge is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    assert asyncio.run(hedge()) == 6  # of 1,050, and those 6

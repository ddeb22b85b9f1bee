"""Requests that were tried again are counted, and reach the reader that asks; a forked process begins at none."""

from __future__ import annotations

import asyncio
import multiprocessing

from megablend.prefetch.read_counts import ReadMeter
from megablend.storage.objects.bucket_client import BucketClient
from megablend.storage.objects.failures import Failure, Kind
from megablend.storage.objects.rate_limiter import RateLimiter
from megablend.storage.process_counts import count
from megablend.storage.store_options import StoreOptions


async def request(failures: int) -> str | Failure:
    """What a request returns that fails some times first."""
    left = failures

    async def attempt() -> str | Failure:
        nonlocal left
        if left == 0:
            return "bytes"
        left -= 1
        return Failure(Kind.AGAIN, "the server said 500", "")

    client = BucketClient("s3://bucket", None, StoreOptions(), RateLimiter(64, None, 1))
    return await client.policy.retry("s3://bucket/a", attempt)


def test_retries_are_counted() -> None:
    meter = ReadMeter()
    other = ReadMeter()
    assert asyncio.run(request(2)) == "bytes"
    assert asyncio.run(request(0)) == "bytes"
    assert (meter.take().retries, meter.take().retries) == (2, 0)
    assert other.take().retries == 2
    assert ReadMeter().take().retries == 0


def _in_child(meter: ReadMeter, queue: multiprocessing.SimpleQueue[int]) -> None:
    count("retries")
    queue.put(meter.take().retries)


def test_a_forked_process_counts_its_own() -> None:
    meter = ReadMeter()
    count("retries")
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(meter, queue))
    child.start()
    child.join(240)
    assert queue.get() == 1
    assert meter.take().retries == 1

"""Requests that end while they are waited for."""

from __future__ import annotations

import asyncio
import sys

import pytest

from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.failures import Failure
from megablend.storage.objects.requests import Answer, Source
from megablend.storage.objects.watch import Request, Wanted


class SilentSource(Source):
    """Never answers."""

    async def _exchange(self, request: Request) -> Answer | Failure:
        request.waits_for = asyncio.get_running_loop().create_future()
        answer: Answer = await request.waits_for
        return answer


async def end_request(*, cancel: bool) -> Answer | Failure:
    """Interrupt a stalled request, at the same moment as its caller cancels it or not."""
    source = SilentSource("s3://bucket", None, ObjectOptions().find("s3://bucket/key"), 1)
    request = source._start(Wanted("key", 0, 4, None))
    task = asyncio.create_task(source._receive(request))
    await asyncio.sleep(0)
    request.is_stalled = True
    request.interrupt()
    if cancel:
        task.cancel()
    return await task


def test_a_stalled_request_is_a_failure() -> None:
    assert isinstance(asyncio.run(end_request(cancel=False)), Failure)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not know before who cancels")
def test_a_cancelled_caller_is_not_sent_into_another_attempt() -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(end_request(cancel=True))

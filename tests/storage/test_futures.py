"""Futures that are combined: results, exceptions, and what cancelling them does."""

import gc
import weakref
from concurrent.futures import CancelledError, Future

import pytest

from megablend.storage.futures import forward_result, gather_futures


def test_the_results_together() -> None:
    parts = [Future[int]() for _ in range(3)]
    whole = gather_futures(parts, sum)
    for number, part in enumerate(parts):
        assert not whole.done()
        part.set_result(number)
    assert whole.result() == 3


def test_cancelling_cancels_the_parts_that_are_not_done() -> None:
    parts = [Future[int]() for _ in range(3)]
    whole = gather_futures(parts, sum)
    parts[0].set_result(1)
    assert whole.cancel()
    assert [part.cancelled() for part in parts] == [False, True, True]


def test_a_result_for_a_cancelled_future_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """A callback that fails is only logged."""
    parts = [Future[int]() for _ in range(2)]
    source = Future[int]()
    target = Future[int]()
    whole = gather_futures(parts, sum)
    forward_result(source, target)
    parts[0].set_running_or_notify_cancel()  # too late to cancel it
    assert whole.cancel()
    assert target.cancel()
    parts[0].set_result(1)
    source.set_result(1)
    assert caplog.text == ""


def test_a_cancelled_part_is_the_exception_of_the_whole() -> None:
    part = Future[int]()
    source = Future[int]()
    target = Future[int]()
    whole = gather_futures([part], sum)
    forward_result(source, target)
    part.cancel()
    source.cancel()
    for each in (whole, target):
        with pytest.raises(CancelledError):
            each.result()


@pytest.mark.parametrize("how", ["complete", "cancelled"])
def test_parts_do_not_wait_for_the_garbage_collector(how: str) -> None:
    parts = [Future[int]() for _ in range(2)]
    whole = gather_futures(parts, sum)
    if how == "complete":
        parts[0].set_result(1)
        parts[1].set_result(1)
    else:
        whole.cancel()
    kept = [weakref.ref(each) for each in (whole, *parts)]
    gc.disable()
    try:
        del whole, parts
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()

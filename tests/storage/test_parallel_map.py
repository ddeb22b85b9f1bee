"""Work on many items: results in order, threads where files have to be waited for."""

from __future__ import annotations

import threading
import time

import pytest

from megablend.storage.parallel_map import map_waiting


def work(item: int) -> tuple[int, int]:
    return item, threading.get_ident()


def wait(item: int) -> tuple[int, int]:
    time.sleep(0.005)
    return work(item)


@pytest.mark.parametrize("size", [0, 1, 2, 33, 34, 100])
def test_results_are_in_order(size: int) -> None:
    for each in (work, wait):
        assert [item for item, _ in map_waiting(each, range(size), 4)] == list(range(size))


def test_items_that_are_waited_for_are_worked_on_by_several_threads() -> None:
    threads = {thread for _, thread in map_waiting(wait, range(200), 4)}
    assert len(threads) > 2


def test_items_that_are_not_waited_for_are_worked_on_by_the_caller() -> None:
    """The clock is the processor's alone: on a busy machine, this thread may also have to wait for a core."""

    def clocks() -> tuple[float, float]:
        return (time.thread_time(),) * 2

    threads = {thread for _, thread in map_waiting(work, range(66), 4, clocks)}
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("item", [0, 40])
def test_errors_are_raised(item: int) -> None:
    def fail(each: int) -> None:
        time.sleep(0.001)
        if each == item:
            raise ValueError(f"item {each}")

    with pytest.raises(ValueError, match=f"item {item}"):
        map_waiting(fail, range(100), 4)

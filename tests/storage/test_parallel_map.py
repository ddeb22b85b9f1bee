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


def compute(item: int) -> tuple[int, int]:
    start = time.thread_time()
    while time.thread_time() < start + 0.0001:
        pass
    return work(item)


@pytest.mark.parametrize("size", [0, 1, 2, 33, 34, 100])
def test_results_are_in_order(size: int) -> None:
    for each in (work, wait):
        assert [item for item, _ in map_waiting(each, range(size), 4)] == list(range(size))


def test_items_that_are_waited_for_are_worked_on_by_several_threads() -> None:
    threads = {thread for _, thread in map_waiting(wait, range(200), 4)}
    assert len(threads) > 2


def test_items_that_are_not_waited_for_are_worked_on_by_the_caller() -> None:
    """On a machine that does other work, too, this process may have to wait for a core: then it is tried again."""
    for _ in range(20):
        threads = {thread for _, thread in map_waiting(compute, range(66), 4)}
        if threads == {threading.get_ident()}:
            return
    pytest.fail(f"worked on by {len(threads)} threads")


@pytest.mark.parametrize("item", [0, 40])
def test_errors_are_raised(item: int) -> None:
    def fail(each: int) -> None:
        time.sleep(0.001)
        if each == item:
            raise ValueError(f"item {each}")

    with pytest.raises(ValueError, match=f"item {item}"):
        map_waiting(fail, range(100), 4)

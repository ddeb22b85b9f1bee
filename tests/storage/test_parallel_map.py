"""Work on many items by several threads: results in order, and errors."""

from __future__ import annotations

import threading
import time

import pytest

from megablend.storage.parallel_map import parallel_map


def wait(item: int) -> tuple[int, int]:
    time.sleep(0.005)
    return item, threading.get_ident()


@pytest.mark.parametrize("size", [0, 1, 2, 33, 34, 100])
def test_results_are_in_order(size: int) -> None:
    assert [item for item, _ in parallel_map(wait, range(size), 4)] == list(range(size))


def test_items_are_worked_on_by_several_threads() -> None:
    assert len({thread for _, thread in parallel_map(wait, range(200), 4)}) > 2


@pytest.mark.parametrize("items", [range(1), range(20)])
def test_one_thread_is_the_caller(items: range) -> None:
    in_flight = 4 if len(items) == 1 else 1
    threads = {thread for _, thread in parallel_map(wait, items, in_flight)}
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("item", [0, 40])
def test_errors_are_raised(item: int) -> None:
    def fail(each: int) -> None:
        time.sleep(0.001)
        if each == item:
            raise ValueError(f"item {each}")

    with pytest.raises(ValueError, match=f"item {item}"):
        parallel_map(fail, range(100), 4)

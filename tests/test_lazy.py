"""Properties that are computed once, across a fork."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from megablend.lazy import LazyItems, cached_property


class Slow:
    def __init__(self, entered: threading.Event, go_on: threading.Event) -> None:
        self.entered = entered
        self.go_on = go_on
        self.times = 0

    @cached_property
    def value(self) -> int:
        """What takes a while."""
        self.times += 1
        self.entered.set()
        assert self.go_on.wait(240)
        return 7


def test_it_is_computed_once() -> None:
    go_on = threading.Event()
    go_on.set()
    slow = Slow(threading.Event(), go_on)
    assert (slow.value, slow.value, slow.times) == (7, 7, 1)
    assert Slow.value.__doc__ == "What takes a while."


def test_a_process_that_is_forked_while_a_thread_computes_does_not_hang() -> None:
    slow = Slow(threading.Event(), threading.Event())
    ready = threading.Event()
    ready.set()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    try:
        assert slow.entered.wait(240)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that hangs
            os._exit(Slow(threading.Event(), ready).value)
        _, status = os.waitpid(child, 0)
    finally:
        slow.go_on.set()
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 7


def test_items_are_made_when_they_are_needed() -> None:
    made = list[int]()

    def make(number: int) -> str:
        made.append(number)
        return str(number)

    items = LazyItems(5, make)
    assert (items[3], items[-1], items[3], len(items)) == ("3", "4", "3", 5)
    assert made == [3, 4]
    assert (items[1:3], list(items)) == (("1", "2"), ["0", "1", "2", "3", "4"])
    assert made == [3, 4, 1, 2, 0]
    assert items == tuple("01234") == LazyItems(5, str)
    assert items != LazyItems(4, str)
    for number in (5, -6):
        with pytest.raises(IndexError):
            items[number]

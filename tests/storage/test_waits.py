"""Waits of a group of threads are ended together; other threads are not affected."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from megablend.storage.waits import Waits, wait_for


@pytest.mark.parametrize("cancel", [Waits.cancel, Waits.cancel_soon])
def test_waits_of_a_group_end_and_others_go_on(cancel: Any) -> None:
    waits = Waits()
    awaited = Future[int]()
    others = Future[int]()
    with ThreadPoolExecutor(1, initializer=waits.enter) as inside, ThreadPoolExecutor(1) as outside:
        first = inside.submit(wait_for, awaited)
        second = outside.submit(wait_for, others)
        inside.submit(int)
        while not waits._pending:
            pass
        cancel(waits)
        with pytest.raises(CancelledError):
            first.result(240)
        later = Future[int]()
        with pytest.raises(CancelledError):
            inside.submit(wait_for, later).result(240)
        assert awaited.cancelled()
        assert later.cancelled()
        others.set_result(7)
        assert second.result(240) == 7
    assert not waits._pending


def test_a_future_is_cancelled_if_its_wait_is_interrupted() -> None:
    class Interrupted(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            raise KeyboardInterrupt

    awaited = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        wait_for(awaited)
    assert awaited.cancelled()


def test_nothing_is_started_where_nothing_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("_thread.start_new_thread", None)
    waits = Waits()
    waits.cancel_soon()
    done = Future[int]()
    done.set_result(1)
    waits.add(done)
    assert done.result() == 1

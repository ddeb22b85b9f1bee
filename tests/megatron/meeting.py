"""Ranks of a launch as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megablend.distributed.fail_together import FailTogether


class Meeting:
    """What threads exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=500)

    def launch(self, rank: int) -> FailTogether:
        def exchange(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return FailTogether(rank, self.size, exchange)


def on_ranks(size: int, work: Callable[[FailTogether], Any]) -> list[Any]:
    """What each rank returns, or its error."""
    meeting = Meeting(size)

    def one(rank: int) -> Any:
        launch = meeting.launch(rank)
        try:
            return work(launch)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))

"""What threads hold together stays within the bound, and none waits for ever."""

from __future__ import annotations

import random
import threading

import pytest

from megablend.reader.byte_semaphore import ByteSemaphore


def test_threads_hold_no_more_than_the_bound() -> None:
    gate, held, peaks, lock = ByteSemaphore(100), list[int](), list[int](), threading.Lock()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            size = rng.randint(1, 60)
            with gate.holding(size):
                with lock:
                    held.append(size)
                    peaks.append(sum(held))
                with lock:
                    held.remove(size)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(peaks) == 1200
    assert max(peaks) <= 100


def test_what_is_larger_than_the_bound_goes_alone() -> None:
    gate, inside = ByteSemaphore(10), threading.Event()
    seen = list[bool]()

    def small() -> None:
        with gate.holding(1):
            seen.append(inside.is_set())

    with gate.holding(1000):
        inside.set()
        thread = threading.Thread(target=small)
        thread.start()
        thread.join(0.2)
        assert not seen
        inside.clear()
    thread.join(60)
    assert seen == [False]


def test_an_error_gives_back_what_was_held() -> None:
    gate = ByteSemaphore(10)
    with pytest.raises(ValueError, match="inside"), gate.holding(10):
        raise ValueError("inside")
    with gate.holding(10):
        pass

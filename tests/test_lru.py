"""What was made last is kept, and made once for all threads."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

from megablend.lru import LRUCache


def test_the_least_recently_used_goes_first() -> None:
    recent = LRUCache[int](2)
    made = list[int]()

    def get(key: int) -> int:
        def make() -> int:
            made.append(key)
            return -key

        return recent.get(key, make)

    assert [get(key) for key in (1, 2, 1, 3, 1, 2)] == [-1, -2, -1, -3, -1, -2]
    assert made == [1, 2, 3, 2]
    recent.resize(1)
    assert [get(key) for key in (2, 2, 1)] == [-2, -2, -1]
    assert made == [1, 2, 3, 2, 1]


def test_values_of_a_size_are_made_together_and_kept_up_to_their_sum() -> None:
    recent = LRUCache[str](5, len)
    made = list[list[int]]()

    def make(missing: list[int]) -> list[str]:
        made.append(missing)
        return ["x" * key for key in missing]

    assert recent.get_all([1, 2], make) == ["x", "xx"]
    assert recent.get_all([2, 3], make) == ["xx", "xxx"]  # 1 goes
    assert recent.get_all([2, 1], make) == ["xx", "x"]  # 3 goes
    assert recent.get_all([9], make) == ["x" * 9]  # larger than all that may be kept
    assert recent.get_all([2], make) == ["xx"]
    assert made == [[1, 2], [3], [1], [9], [2]]


def test_threads_that_make_a_value_at_the_same_time_get_the_same() -> None:
    recent = LRUCache[object](2)
    both = threading.Barrier(2)

    def make() -> object:
        both.wait()
        return object()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: recent.get("x", make), range(2))
    assert first is second is recent.get("x", object)


def test_a_value_that_is_kept_is_there_for_all_threads_at_all_times() -> None:
    recent = LRUCache[int](2)
    recent.get("x", lambda: 1)

    def use(_: int) -> int:
        return sum(recent.get("x", lambda: 1000) for _ in range(20_000))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(use, range(4))) == 80_000


def test_it_is_pickled_without_its_values() -> None:
    recent = LRUCache[int](2)
    recent.get("x", lambda: 1)
    assert pickle.loads(pickle.dumps(recent)).get("x", lambda: 2) == 2

"""The ends of files that are kept within a limit of memory, and ranges that are requested around them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest

from megablend.storage.base import Allocate, Bytes, Int64s
from megablend.storage.by_scheme import make_storage
from megablend.storage.head_and_tail import HeadAndTail, KeptHeadsAndTails
from megablend.storage.objects.known_objects import Known, KnownObjects
from megablend.storage.objects.object_version import ObjectVersion
from megablend.storage.prefetched import PrefetchedStorage
from megablend.storage.wrapper import WrapperStorage

CONTENT = np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes()


def test_with_more_files_less_of_each_is_kept() -> None:
    kept = KeptHeadsAndTails()
    kept.max_bytes = 1 << 20
    for i in range(100):
        kept.put(f"f{i}", HeadAndTail(1 << 20, b"h" * 4096, b"t" * kept.tail_bytes))
        held = [ends for j in range(i + 1) if (ends := kept.get(f"f{j}")) is not None]
        assert sum(each.num_bytes for each in held) <= 1 << 20
        assert len(held) == i + 1
        assert all(each.tail == b"t" * min(len(each.tail), kept.tail_bytes) for each in held)
    assert kept.tail_bytes == 4096
    for i in range(100, 300):
        kept.put(f"f{i}", HeadAndTail(1 << 20, b"h" * 4096, b"t" * 4096))
    assert kept.tail_bytes == 0  # no room for more
    held = [ends for i in range(300) if (ends := kept.get(f"f{i}")) is not None]
    assert [each.num_bytes for each in held] == [4096] * 256
    kept.remove("f0")
    kept.put("f299", held[0])
    assert kept.get("f299") == held[0]
    assert kept.get("f298") is None


def test_ends_belong_to_a_version() -> None:
    old = ObjectVersion(5000, "a", 0)
    new = ObjectVersion(5000, "b", 0)
    ends = HeadAndTail(5000, b"h", b"t")
    known = KnownObjects()
    other = KnownObjects()
    assert known.keep("x", old, ends) == old
    assert known.get_ends("x") == ends
    # Another version is not what is read
    assert known.keep("x", new, HeadAndTail(5000, b"H", b"T")) == old
    assert known.get_ends("x") == ends
    other.add(pickle.loads(pickle.dumps(known.take_new())))
    assert (other.get("x"), other.get_ends("x")) == (old, ends)
    assert known.take_new() == other.take_new() == {}
    known.replace({"x": old})
    assert known.get_ends("x") == ends
    known.replace({"x": new})
    assert known.get_ends("x") is None
    other.add({"x": Known(new, ends._replace(head=b"H"))})
    assert (other.get("x"), other.get_ends("x")) == (old, ends)
    other.forget("x")
    assert (other.get("x"), other.get_ends("x")) == (None, None)


class EndsInMemory(WrapperStorage):
    """Knows the ends of a file of `CONTENT`, and lists the ranges that are requested of it."""

    def __init__(self, head: int, tail: int) -> None:
        super().__init__(make_storage())
        self._ends = HeadAndTail(len(CONTENT), CONTENT[:head], CONTENT[len(CONTENT) - tail :])
        self.requested: list[tuple[int, int]] = []

    def get_ends(self, path: str) -> HeadAndTail | None:
        return self._ends

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        self.requested += zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True)
        out = allocate(int(sizes.sum()))
        begin = 0
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            out[begin : begin + size] = np.frombuffer(CONTENT[offset : offset + size], np.uint8)
            begin += size
        return out, np.cumsum(sizes) - sizes


@pytest.mark.parametrize(
    ("ends", "wanted", "requested"),
    [
        ((10, 100), (0, 10), []),
        ((10, 100), (900, 1000), []),
        ((10, 100), (950, 999), []),
        ((10, 100), (500, 1000), [(500, 900)]),
        ((10, 100), (0, 1000), [(0, 900)]),
        ((10, 100), (800, 950), [(800, 900)]),
        ((10, 0), (800, 1000), [(800, 1000)]),
        ((10, 1000), (0, 1000), []),
        ((10, 1000), (3, 990), []),
        ((0, 0), (0, 1000), [(0, 1000)]),
    ],
)
def test_what_is_known_of_the_ends_is_not_requested(
    ends: tuple[int, int], wanted: tuple[int, int], requested: list[tuple[int, int]]
) -> None:
    storage = EndsInMemory(*ends)
    fetched = PrefetchedStorage(storage)
    (start, stop) = wanted
    fetched.request("x", np.array([start]), np.array([stop - start]))
    assert storage.requested == requested
    assert fetched.read("x", start, stop - start) == CONTENT[start:stop]
    middle = (start + stop) // 2
    assert fetched.read("x", middle, stop - middle) == CONTENT[middle:stop]
    assert storage.requested == requested


def test_what_is_found_out_while_it_is_taken_is_taken_next() -> None:
    known = KnownObjects()

    class Met(set[str]):
        """Another thread meets an object as soon as these were listed."""

        def __iter__(self) -> Iterator[str]:
            yield from tuple(super().__iter__())
            known.keep("y", ObjectVersion(1, "y", 0))

    known.keep("x", ObjectVersion(1, "x", 0))
    known._new = Met(known._new)
    assert list(known.take_new()) == ["x"]
    assert list(known.take_new()) == ["y"]

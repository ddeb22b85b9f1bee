"""The owner's side and the readers' side together."""

import math
import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megablend.mirror.disk.database import SourceState
from megablend.mirror.disk.mirrored_file import MirroredFile
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import NO_PAGES, Pages, pages_of_file, subtract
from megablend.mirror.disk.room import Need
from tests.mirror.disk.mirrors import (
    bytes_of,
    key_of,
    open_store,
    pages_at,
    put,
    read,
    to_sets,
    truth,
)

BLOCK = 256 << 10
FUTURE = time.monotonic() + 1e6


def test_pages_are_read_as_they_were_written(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(3 * BLOCK + 5000)
    assert MirroredFile.open(store.folder, key) is None
    some = pages_at((10_000, 90_000), (BLOCK - 1, 2), (3 * BLOCK + 4990, 10))
    assert put(store, key, some)
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    data = truth(key)
    ranges = ((10_000, 90_000), (BLOCK - 1, 2), (3 * BLOCK + 4990, 10), (8192, 0))
    assert read(file, *ranges) == [data[offset : offset + size] for offset, size in ranges]
    assert read(file, (BLOCK + 4095, 1)) == [data[BLOCK + 4095 : BLOCK + 4096]]
    for absent in ((BLOCK + 4095, 2), (0, 8193), (3 * BLOCK, 10), (4 * BLOCK, 1), (1 << 40, 1)):
        assert read(file, absent) is None
        assert read(file, (10_000, 10), absent) is None
    assert to_sets(store.held(key)) == to_sets(some)
    every = pages_of_file(key.size)
    assert to_sets(file.find_missing(every)) == to_sets(every) - to_sets(some)
    assert to_sets(store.missing(key, every)) == to_sets(every) - to_sets(some)
    assert store.read(key, some) == bytes_of(key, some)
    assert store.read(key, pages_at((16_000, 1), (BLOCK, 1))) == bytes_of(
        key, pages_at((16_000, 1), (BLOCK, 1))
    )
    assert store.read(key, every) is None
    assert not file.is_complete
    assert put(store, key, every)
    assert file.is_complete
    assert store.read(key, every) == data
    assert store.usage() == (4096 * len(to_sets(every)), 1)
    assert read(file, (0, key.size)) == [data]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_small_file_that_was_being_written_is_discarded(is_held: bool, tmp_path: Path) -> None:
    """Its owner was killed before the rename; what was complete before stays."""
    key = key_of(5000)
    store = open_store(tmp_path / "m")
    copy = store.folder.data_path(key.digest)
    if is_held:
        assert put(store, key, pages_of_file(key.size))
    store.close()
    copy.parent.mkdir(parents=True, exist_ok=True)
    unfinished = copy.with_name(f"{copy.name}.new")
    unfinished.write_bytes(truth(key)[:100])
    again = open_store(tmp_path / "m")
    assert not unfinished.exists()
    every = pages_of_file(key.size)
    assert again.read(key, every) == (truth(key) if is_held else None)


def test_reads_that_stop_early_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(BLOCK)
    put(store, key, pages_of_file(BLOCK))
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:100]], offset))
    assert read(file, (5000, 70_000)) == [truth(key)[5000:75_000]]


@pytest.mark.parametrize("size", [1, 4096, 5000, (64 << 10) - 1])
def test_small_files_are_held_whole(tmp_path: Path, size: int) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(size)
    every = pages_of_file(size)
    assert MirroredFile.open(store.folder, key) is None
    assert to_sets(store.missing(key, pages_at((0, 1)))) == to_sets(every)
    assert put(store, key, every)
    assert not store.folder.map_path(key.digest).exists()
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    assert file.is_complete
    assert not len(file.find_missing(every).blocks)
    assert read(file, (size // 2, size - size // 2)) == [truth(key)[size // 2 :]]
    assert read(file, (size, 1)) is None
    assert store.read(key, pages_at((size - 1, 1))) == bytes_of(key, pages_at((size - 1, 1)))
    store.drop(key, pages_at((0, 1)))
    assert MirroredFile.open(store.folder, key) is None
    assert store.usage() == (0, 0)
    assert read(file, (0, size)) == [truth(key)]  # whoever has it open has right bytes


def test_small_files_are_not_written_in_part(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    with pytest.raises(ValueError, match="5000 bytes must be written whole"):
        put(store, key_of(5000), pages_at((0, 1)))


def test_an_empty_file_is_always_held(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(0)
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    assert file.is_complete
    assert put(store, key, NO_PAGES)
    assert store.read(key, NO_PAGES) == b""


def test_a_new_owner_finds_what_is_held(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    keys = [key_of(3 * BLOCK), key_of(3 * BLOCK, etag="2"), key_of(700, "b"), key_of(1 << 20, "c")]
    for key in keys:
        put(store, key, pages_of_file(key.size))
    put(store, keys[3], pages_at((5, 1)))
    expected = {key: to_sets(store.held(key)) for key in keys}
    again = open_store(tmp_path / "m")  # without a word of the first one, as after a SIGKILL
    assert set(again.keys()) == set(keys)
    for key in keys:
        assert to_sets(again.held(key)) == expected[key]
        assert again.read(key, again.held(key)) == bytes_of(key, again.held(key))
    assert again.usage() == store.usage()


def test_dropped_pages_are_gone_and_come_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(2 * BLOCK)
    every = pages_of_file(key.size)
    wrong = bytearray(truth(key))
    wrong[70_000] ^= 1
    store.write(key, every, memoryview(wrong), math.inf)  # as it came
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    bad = pages_at((70_000, 1))
    store.drop(key, bad)
    assert to_sets(store.held(key)) == to_sets(every) - to_sets(bad)
    assert read(file, (69_000, 2000)) is None
    assert read(file, (0, 65_536)) == [truth(key)[:65_536]]
    assert put(store, key, bad)
    assert store.read(key, every) == truth(key)
    assert read(file, (69_000, 2000)) == [truth(key)[69_000:71_000]]


def test_what_is_evicted_gives_its_room_back(tmp_path: Path) -> None:
    size = 4 << 20
    store = open_store(tmp_path / "m", size=size)
    keys = [key_of(1 << 20, str(i)) for i in range(12)]
    for key in keys:
        assert put(store, key, pages_of_file(key.size))
        assert store.usage().num_bytes <= size
    blocks = sum(p.stat().st_blocks for p in (tmp_path / "m" / "files").rglob("*.data"))
    assert blocks * 512 <= size
    held = [len(to_sets(store.held(key))) for key in keys]
    assert held == [0] * 8 + [256] * 4
    assert not store.folder.data_path(keys[0].digest).exists()
    assert not put(store, key_of(2 * size, "big"), pages_of_file(2 * size))
    assert [len(to_sets(store.held(key))) for key in keys] == held


def test_readers_of_a_file_that_was_given_up_open_it_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m", size=1 << 20)
    key = key_of(1 << 20)
    every = pages_of_file(key.size)
    put(store, key, every)
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    assert file.is_current
    put(store, key_of(1 << 20, "other"), every)
    assert not file.is_current
    assert read(file, (0, 100)) is None
    assert to_sets(file.find_missing(every)) == to_sets(every)
    assert MirroredFile.open(store.folder, key) is None
    put(store, key, every)
    assert read(file, (0, 100)) is None
    again = MirroredFile.open(store.folder, key)
    assert again is not None
    assert read(again, (0, 100)) == [truth(key)[:100]]


def test_whether_all_is_held_is_known_without_keeping_what_is_missing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(16 << 30)
    store.write(key, pages_at((0, 4096)), memoryview(bytes(4096)), math.inf)
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    tracemalloc.start()
    try:
        assert not file.is_complete
        assert tracemalloc.get_traced_memory()[0] < 50_000  # of 65,536 blocks
    finally:
        tracemalloc.stop()


def test_a_file_is_complete_exactly_while_all_its_pages_are_held(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(5 * BLOCK + 4097)
    rng = random.Random(0)
    put(store, key, pages_at((0, 1)))
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    num_complete = 0
    for _ in range(400):
        missing = store.missing(key, pages_of_file(key.size))
        if rng.random() < 0.7:
            put(store, key, missing if rng.random() < 0.3 else missing.at(slice(0, 1)))
        else:
            store.drop(key, pages_at((BLOCK * rng.randrange(1, 6), 1)))
        is_complete = not store.missing(key, pages_of_file(key.size))
        assert file.is_complete == is_complete
        num_complete += is_complete
    assert 50 < num_complete < 350


def order(due: float | None, use: int) -> tuple[float, ...]:
    return (0, use) if due is None else (1, -due)


@pytest.mark.parametrize("seed", range(6))
def test_eviction_is_that_of_a_naive_twin(tmp_path: Path, seed: int) -> None:
    """Blocks of one page or two, so that the twin is a sorted list."""
    rng = random.Random(seed)
    most = 40
    store = open_store(tmp_path / "m", size=most * 4096)
    keys = [key_of(BLOCK * 9, str(i)) for i in range(3)]
    used: dict[tuple[int, int], int] = {}  # of blocks
    held: dict[tuple[int, int, int], float | None] = {}  # key, block, page -> due
    num_evicted = 0
    due_now: dict[tuple[int, int, int], float] = {}
    for step in range(1, 400):
        k = rng.randrange(3)
        block = rng.randrange(9)
        page = rng.randrange(2)
        at = pages_at((block * BLOCK + page * 4096, 1))
        action = rng.random()
        if action < 0.1:
            store.touch(keys[k], at)
            used[k, block] = step
        elif action < 0.15:
            due_now = {
                (rng.randrange(3), rng.randrange(9), rng.randrange(2)): FUTURE + rng.randrange(1000)
                for _ in range(rng.randrange(60))
            }
            held = {each: due_now.get(each) for each in held}
            store.set_due(
                Need(
                    keys[f],
                    Pages(np.array([b], np.uint32), np.array([1 << p], np.uint64)),
                    np.array([due]),
                )
                for (f, b, p), due in due_now.items()
            )
        else:
            due = None if rng.random() < 0.5 else FUTURE + rng.randrange(1000)
            is_new = (k, block, page) not in held
            fits = len(held) < most
            if is_new and not fits:
                victim = min((order(when, used[each[:2]]), each) for each, when in held.items())[1]
                when = held[victim]
                fits = when is None or (due is not None and when > due)
                if fits:
                    # All pages of a block that are alike go together
                    alike = [e for e in held if e[:2] == victim[:2] and held[e] == when]
                    for each in alike:
                        del held[each]
                    num_evicted += len(alike)
            assert put(store, keys[k], at, due) == (fits or not is_new), step
            if is_new and fits:
                known = due_now.get((k, block, page))
                both = [d for d in (due, known) if d is not None]
                held[k, block, page] = min(both) if both else None
                used[k, block] = step
        found = {
            (k, number // 64, number % 64)
            for k in range(3)
            for number in to_sets(store.held(keys[k]))
        }
        assert found == set(held), step
        assert store.num_evicted == num_evicted
    assert num_evicted


def test_states_outlive_the_owner(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    assert store.states.get("s3://b/x") is None
    store.states.put("s3://b/\udcffx", SourceState(5, "e", 1.5))
    store.states.put("s3://b/x", SourceState(6, "f", 2.5))
    store.states.put("s3://b/x", SourceState(7, "g", 3.5))
    again = open_store(tmp_path / "m")
    assert again.states.get("s3://b/x") == (7, "g", 3.5)
    assert again.states.get("s3://b/\udcffx") == (5, "e", 1.5)


def test_pages_in_parts_of_what_is_given_are_taken(tmp_path: Path) -> None:
    """What is held already is left out of the data, wherever it is."""
    store = open_store(tmp_path / "m")
    key = key_of(5 * BLOCK + 100)
    put(store, key, pages_at((9000, 1), (70_000, 20_000), (BLOCK + 5, 1), (5 * BLOCK, 1)))
    every = pages_of_file(key.size)
    assert put(store, key, every)
    assert store.read(key, every) == truth(key)
    part = subtract(every, pages_at((100_000, 2 * BLOCK)))
    assert store.read(key, part) == bytes_of(key, part)


def test_the_owner_imports_nothing_large() -> None:
    code = (
        "import sys, megablend.mirror.disk.page_store, megablend.mirror.disk.mirrored_file\n"
        "print(sorted({'numba', 'torch', 'pyarrow', 'aiohttp', 'obstore'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_all_is_deleted_on_request(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    for key in (key_of(1 << 20), key_of(5)):
        put(store, key, pages_of_file(key.size))
    other = tmp_path / "m" / "files" / "notes.txt"
    other.write_text("mine")
    store.remove_all()
    assert [p for p in (tmp_path / "m").rglob("*") if p.is_file()] == [other]
    other.unlink()
    assert isinstance(open_store(tmp_path / "n"), PageStore)
    open_store(tmp_path / "n").remove_all()
    assert not (tmp_path / "n").exists()

"""Readers take no lock: what they read while pages are evicted is right, or refused."""

import json
import random
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megablend.arrays import Int64s
from megablend.mirror.disk.block_map import DURABLE, PRIME, WORD_FACTORS, seal, sum_of_pages
from megablend.mirror.disk.mirrored_file import MirroredFile
from megablend.mirror.disk.pages import pages_of_file
from megablend.storage.base import Bytes
from tests.mirror.disk.campaign import KEYS
from tests.mirror.disk.mirrors import bytes_of, key_of, open_store, pages_at, put, read, truth

BLOCK = 256 << 10


class HookedFile(MirroredFile):
    """Does something between the look at the map and the read."""

    hook: Callable[[], object]

    def fill(self, offsets: Int64s, sizes: Int64s, begins: Int64s, out: Bytes) -> bool:
        self.hook()
        return super().fill(offsets, sizes, begins, out)


class UncheckedFile(HookedFile):
    def load_punches(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [HookedFile, UncheckedFile])
@pytest.mark.parametrize("ranges", [((5000, 60_000),), ((5000, 100), (BLOCK, 100))])
def test_what_is_evicted_during_a_read_is_not_believed(
    tmp_path: Path, kind: type[HookedFile], ranges: tuple[tuple[int, int], ...]
) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(1 << 20)
    right = [truth(key)[offset : offset + size] for offset, size in ranges]
    every = pages_of_file(key.size)
    put(store, key, every)
    file = kind.open(store.folder, key)
    assert isinstance(file, HookedFile)
    file.hook = lambda: None
    assert read(file, *ranges) == right
    file.hook = lambda: store.drop(key, pages_at((5000, 4096)))
    found = read(file, *ranges)
    if kind is UncheckedFile:
        assert found is not None
        assert found != right  # so the check is what keeps wrong bytes away
        return
    assert found is None
    put(store, key, every)
    evictions = iter([pages_at((5000, 4096))])

    def evict_once_and_store() -> None:
        for pages in evictions:
            store.drop(key, pages)
        put(store, key, every)

    file.hook = evict_once_and_store
    assert read(file, *ranges) == right  # evicted and stored again meanwhile: read again


def test_a_read_ends_though_pages_are_evicted_all_the_time(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(1 << 20)
    put(store, key, pages_of_file(key.size))
    file = HookedFile.open(store.folder, key)
    assert isinstance(file, HookedFile)
    offsets = iter(range(BLOCK, 1 << 20, 4096))
    file.hook = lambda: store.drop(key, pages_at((next(offsets), 1)))
    assert read(file, (0, 10)) is None


def test_threads_share_a_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(1 << 20)
    put(store, key, pages_of_file(key.size))
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    wrong = []

    def read_some(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            offset = rng.randrange(key.size - 9000)
            if read(file, (offset, 9000)) not in (None, [truth(key)[offset : offset + 9000]]):
                wrong.append(offset)

    threads = [threading.Thread(target=read_some, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.drop(key, pages_at((random.randrange(key.size), 1)))
        put(store, key, store.missing(key, pages_of_file(key.size)))
    assert not wrong


def test_no_flipped_bit_of_a_record_keeps_its_seal() -> None:
    rng = random.Random(1)
    for _ in range(200):
        pages = rng.getrandbits(64)
        flags = rng.choice((0, DURABLE, 3))
        word = seal(pages, flags, rng.getrandbits(32))
        assert (pages ^ word) % PRIME == 0
        assert word >> 32 & 0xFF == flags
        for bit in range(64):
            assert (pages ^ 1 << bit ^ word) % PRIME
    assert len({(1 << i) % PRIME for i in range(64)}) == 64  # nor two bits


def test_every_flipped_bit_of_a_page_changes_its_sum() -> None:
    """Since the upper half of a sum changes by at least 1 then, whatever is carried."""
    for factor in WORD_FACTORS.tolist():
        for bit in range(64):
            assert 1 << 32 <= (factor << bit) % (1 << 64) <= (1 << 64) - (1 << 32)


def test_sums_of_pages_add_up() -> None:
    rng = random.Random(2)
    for size in (BLOCK, 5 * 4096, 4 * 4096 + 77):
        mask = (1 << 64) - 1 if size == BLOCK else 0b1010011
        data = memoryview(rng.randbytes(size))
        total = sum_of_pages(mask, data)
        pages = [page for page in range(64) if mask >> page & 1]
        parts = [data[i * 4096 : (i + 1) * 4096] for i in range(len(pages))]
        alone = [sum_of_pages(1 << page, part) for page, part in zip(pages, parts, strict=True)]
        assert sum(alone) & 0xFFFFFFFF == total
        parts[0], parts[1] = parts[1], parts[0]
        assert sum_of_pages(mask, memoryview(b"".join(parts))) != total
        naive = 0
        for page, part in zip([pages[1], pages[0], *pages[2:]], parts, strict=True):
            padded = bytes(part).ljust(4096, b"\0")
            words = struct.unpack("<512Q", padded)
            inner = sum(word * (2 * i + 1) * 0x9E3779B97F4A7C15 for i, word in enumerate(words))
            naive += (inner >> 32) % (1 << 32) * (2 * page + 1)
        assert naive % (1 << 32) == total


def run(tmp_path: Path, kind: str, seconds: float, seed: int) -> Counter[str]:
    """Counts of right, absent and wrong reads of four processes, while owners are killed."""
    folder = str(tmp_path / "m")
    rng = random.Random(seed)
    command = [sys.executable, "-m", "tests.mirror.disk.campaign"]
    counts = Counter[str]()
    readers: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with subprocess.Popen(
            [*command, "own", folder, str(rng.getrandbits(32))], stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "ready\n"
            if not readers:
                readers = [
                    subprocess.Popen(
                        [*command, "read", folder, str(rng.getrandbits(32)), kind],
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                    for _ in range(4)
                ]
            time.sleep(rng.uniform(0.02, 0.9))
            assert owner.poll() is None
            owner.kill()
            counts["kills"] += 1
    Path(f"{folder}.stop").touch()
    for reader in readers:
        counts += Counter(json.loads(reader.communicate()[0]))
        assert reader.returncode == 0
    return counts


def check_marked(tmp_path: Path) -> None:
    """Every page that is marked is right."""
    store = open_store(tmp_path / "m")
    assert store.usage().num_bytes <= 14 << 20
    for key in store.keys():  # noqa: SIM118
        held = store.held(key)
        assert store.read(key, held) == bytes_of(key, held)


@pytest.mark.long
def test_killed_owners_leave_right_pages(tmp_path: Path) -> None:
    counts = run(tmp_path, "SlowFile", 6, seed=5)
    assert counts["right"] > 100
    assert counts["kills"] > 2
    assert not counts["wrong"]
    check_marked(tmp_path)
    assert set(KEYS) & set(open_store(tmp_path / "m").keys())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_the_check_wrong_pages_are_read(tmp_path: Path) -> None:
    counts = run(tmp_path, "UncheckedFile", 6, seed=5)
    for seed in range(6, 40):  # on a busy machine evictions may miss all reads of a while
        if not counts["wrong"]:
            (tmp_path / "m.stop").unlink()
            counts += run(tmp_path, "UncheckedFile", 6, seed)
    assert counts["wrong"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hundreds_of_killed_owners_leave_right_pages(tmp_path: Path) -> None:
    counts = Counter[str]()
    while counts["kills"] < 500:
        counts += run(tmp_path, "SlowFile", 30, seed=counts["kills"])
        check_marked(tmp_path)
        (tmp_path / "m.stop").unlink()
        assert counts["wrong"] == 0

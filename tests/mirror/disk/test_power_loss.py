"""What is believed after the machine lost its power: copies of the folder as a disk may have it then.

Of the copy's bytes, the disk has what was there at the last fdatasync, and any of the pages and holes that were
written since. Of the map, each page is that of any moment since the last msync. A new start of the machine is another boot id.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megablend.mirror.disk.disk_calls import DiskCalls, punch_hole, write_all
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.mirrored_file import MirroredFile
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import pages_of_file
from tests.mirror.disk.mirrors import key_of, open_store, pages_at, put, to_sets, truth

PAGE = 4096
KEYS = [key_of(66 << 20), key_of((1 << 20) + 777, "b")]
"""The map of the first has two pages of records."""


class Disk:
    """What of the files of a folder may be on the disk."""

    def __init__(self, flushes: bool) -> None:
        self.synced: dict[str, dict[int, bytes]] = {}  # pages by offset
        self.since: dict[str, list[tuple[int, bytes | None]]] = {}  # offset, a page, or a hole
        self.maps: dict[str, list[bytes]] = {}
        self.flushes = flushes

    def calls(self) -> DiskCalls:
        return DiskCalls(write=self.write, punch=self.punch, sync=self.sync, flush=self.flush)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        write_all(fd, data, offset)
        changes = self.since.setdefault(name_of(fd), [])
        changes += [(offset + i, bytes(data[i : i + PAGE])) for i in range(0, len(data), PAGE)]

    def punch(self, fd: int, offset: int, size: int) -> None:
        punch_hole(fd, offset, size)
        self.since.setdefault(name_of(fd), []).extend(
            (offset + i, None) for i in range(0, size, PAGE)
        )

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)
        name = name_of(fd)
        apply(self.since.pop(name, []), self.synced.setdefault(name, {}))

    def flush(self, mapping: mmap.mmap) -> None:
        if self.flushes:
            mapping.flush()
            self.maps = {
                name: old for name, old in self.maps.items() if mapping[64:300] != old[-1][64:300]
            }

    def look(self, folder: Path) -> None:
        """Remember the maps of this moment."""
        for path in folder.rglob("*.map"):
            self.maps.setdefault(str(path), []).append(path.read_bytes())

    def copy(self, folder: Path, target: Path, rng: random.Random, later: float) -> None:
        """The folder as it is after a power loss now, with this share of later changes."""
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.map", "*.data", "*.db*"))
        self.look(folder)
        for path in folder.rglob("*.map"):
            moments = self.maps[str(path)]
            size = len(moments[0])
            pages = [rng.choice(moments)[i : i + PAGE] for i in range(0, size, PAGE)]
            (target / path.relative_to(folder)).write_bytes(b"".join(pages))
            data_path = path.with_suffix(".data")
            data = dict(self.synced.get(str(data_path), {}))
            changes = self.since.get(str(data_path), [])
            apply([change for change in changes if rng.random() < later], data)
            with open(target / data_path.relative_to(folder), "wb") as file:
                for offset, page in data.items():
                    os.pwrite(file.fileno(), page, offset)
                file.truncate(data_path.stat().st_size)


def apply(changes: list[tuple[int, bytes | None]], pages: dict[int, bytes]) -> None:
    """Writes and holes, in their order."""
    for offset, page in changes:
        pages[offset] = page if page is not None else bytes(PAGE)


def name_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115


def act(store: PageStore, rng: random.Random, look: Callable[[], None]) -> dict[FileKey, set[int]]:
    """Write, evict and sync. Returns: the pages that were synced, and are still held."""
    synced: dict[FileKey, set[int]] = {key: set() for key in KEYS}
    for _ in range(rng.randrange(1, 30)):
        key = rng.choice(KEYS)
        block = rng.randrange(0, key.size, 256 << 10) if rng.random() < 0.3 else 9 << 20
        offset = min(block + rng.randrange(256 << 10), key.size - 1)
        pages = pages_at((offset, min(rng.choice((1, 50_000)), key.size - offset)))
        action = rng.random()
        if action < 0.3:
            store.drop(key, pages)
        elif action < 0.8:
            put(store, key, pages)
        else:
            store.sync()
            synced = {key: to_sets(store.held(key)) for key in KEYS}
        synced = {key: some & to_sets(store.held(key)) for key, some in synced.items()}
        look()
    return synced


def count_wrong(store: PageStore, key: FileKey) -> int:
    """Pages that are believed, and wrong."""
    if not (believed := to_sets(store.held(key))):
        return 0
    with open(store.folder.data_path(key.digest), "rb") as file:
        return sum(
            os.pread(file.fileno(), PAGE, page * PAGE)
            != truth(key)[page * PAGE : (page + 1) * PAGE]
            for page in believed
        )


@pytest.mark.parametrize("fault", ["none", "maps are not flushed", "all is believed"])
def test_only_what_is_on_the_disk_is_believed(tmp_path: Path, fault: str) -> None:
    """With a fault put in, the same test finds wrong pages."""
    rng = random.Random(3)
    wrong = 0
    num_believed = 0
    num_synced = 0
    for moment in range(50):
        folder = tmp_path / str(moment)
        disk = Disk(flushes=fault != "maps are not flushed")
        store = open_store(folder, calls=disk.calls())
        synced = act(store, rng, lambda: disk.look(folder))  # noqa: B023
        target = tmp_path / "copy"
        later = rng.choice((0.0, 0.5, 1.0))
        disk.copy(folder, target, rng, later)
        boot = None if fault == "all is believed" else bytes(16)
        again = PageStore(MirrorFolder.create(target), size=None, reserve=0, boot=boot)
        for key in KEYS:
            believed = to_sets(again.held(key))
            wrong += count_wrong(again, key)
            num_believed += len(believed)
            num_synced += len(synced[key])
            if fault == "none":
                on_disk = disk.synced.get(str(store.folder.data_path(key.digest)), {})
                assert later or believed <= {offset // PAGE for offset in on_disk}
                assert put(again, key, again.missing(key, pages_of_file(1 << 20)))
                assert count_wrong(again, key) == 0
        shutil.rmtree(folder)
        shutil.rmtree(target)
    assert (wrong > 0) == (fault != "none"), wrong
    assert num_believed > 200
    assert num_synced > 200


def test_after_a_process_was_killed_nothing_is_read_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = KEYS[1]
    put(store, key, pages_of_file(key.size))
    again = open_store(tmp_path / "m")
    assert to_sets(again.held(key)) == to_sets(pages_of_file(key.size))


def test_ranks_wait_for_the_owner_after_a_new_start(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m", boot=bytes(16))
    key = KEYS[1]
    put(store, key, pages_of_file(key.size))
    assert MirroredFile.open(store.folder, key) is None
    open_store(tmp_path / "m")  # as of now
    assert MirroredFile.open(store.folder, key) is not None

"""Flipped bits, failing disks, full disks, and folders that cannot be used."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ConfigError, DataError, MissingFileError
from megablend.mirror.disk.database import SourceState
from megablend.mirror.disk.disk_calls import DiskCalls
from megablend.mirror.disk.folder import FolderInUseError, MirrorFolder
from megablend.mirror.disk.mirrored_file import MirroredFile
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import pages_of_file
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
KEYS = [key_of(3 * BLOCK + 5000), key_of(9000, "small"), key_of(2 * BLOCK, "b")]
SOME = pages_at((5000, 300_000), (3 * BLOCK, 1))


def fill(store: PageStore) -> None:
    put(store, KEYS[0], SOME)
    put(store, KEYS[1], pages_of_file(9000))
    put(store, KEYS[2], pages_of_file(2 * BLOCK))
    for key in KEYS:
        store.states.put(key.location, SourceState(key.size, key.etag, 1.0))
    store.sync()


def flip(path: Path, bit: int) -> None:
    mode = path.stat().st_mode
    path.chmod(0o600)
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, bit // 8)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
    path.chmod(mode)


def check_store(store: PageStore) -> int:
    """Nothing that the owner reads is wrong. Returns: how many pages it gave."""
    given = 0
    for key in KEYS:
        for pages in (store.held(key), pages_at((0, 1)), pages_at((BLOCK, 5000))):
            if len(store.missing(key, pages).blocks):
                continue
            found = store.read(key, pages)
            assert found is None or found == bytes_of(key, pages)
            given += found is not None
    return given


def check_readers(folder: MirrorFolder, files: dict[str, MirroredFile | None]) -> int:
    """Nothing that ranks read is wrong, of what is in the map's charge."""
    given = 0
    for key in KEYS:
        for file in (files[key.digest], MirroredFile.open(folder, key)):
            for offset in range(0, key.size, 4096):  # so that a single page is believed or not
                size = min(4000, key.size - offset)
                if file is not None and (found := read(file, (offset, size))) is not None:
                    assert found == [truth(key)[offset : offset + size]]
                    given += 1
    return given


FLIPS = pytest.mark.parametrize("flips", [60, pytest.param(500, marks=pytest.mark.slow)])


@FLIPS
@pytest.mark.parametrize("restart", [False, True])
def test_flipped_bits_of_copies_are_found(tmp_path: Path, restart: bool, flips: int) -> None:
    """By reads for other nodes, and by a scrub."""
    rng = random.Random(restart)
    num_wrong = 0
    store = open_store(tmp_path / "m")
    fill(store)
    for _ in range(flips):
        key = rng.choice(KEYS)
        path = store.folder.data_path(key.digest)
        flip(path, rng.randrange(8 * path.stat().st_size))
        if restart:
            store = open_store(tmp_path / "m")
        if rng.random() < 0.5:
            report = store.scrub(1 << 30)
            assert report.is_round_done
            num_wrong += len(report.wrong)
        check_store(store)
        for each in KEYS:
            wanted = SOME if each is KEYS[0] else pages_of_file(each.size)
            missing = store.missing(each, wanted)
            num_wrong += len(missing.blocks)
            put(store, each, missing)
        assert check_store(store) >= 3
    assert num_wrong > flips / 4


def test_a_scrub_on_request_begins_anew(tmp_path: Path) -> None:
    """Not where the one in the background was."""
    store = open_store(tmp_path / "m")
    fill(store)
    assert not store.scrub(1).is_round_done
    flip(store.folder.data_path(KEYS[0].digest), 8 * 5000)
    found = store.scrub(1 << 30, True)
    assert [key for key, _ in found.wrong] == [KEYS[0]]
    assert found.is_round_done


@FLIPS
@pytest.mark.parametrize("restart", [False, True])
def test_flipped_bits_of_maps_are_not_believed(tmp_path: Path, restart: bool, flips: int) -> None:
    """By ranks that have a file open, by those that open it, by the owner, and by the next one."""
    rng = random.Random(restart)
    store = open_store(tmp_path / "m")
    fill(store)
    given = 0
    for _ in range(flips):
        files = {key.digest: MirroredFile.open(store.folder, key) for key in KEYS}
        key = rng.choice((KEYS[0], KEYS[2]))
        path = store.folder.map_path(key.digest)
        size = path.stat().st_size
        flip(
            path, 8 * rng.choice((rng.randrange(200), rng.randrange(4096, size))) + rng.randrange(8)
        )
        given += check_readers(store.folder, files)
        if restart:
            store = open_store(tmp_path / "m")
        else:
            store.scrub(1 << 30)
        check_store(store)
        given += check_readers(store.folder, files)
        for each in KEYS:
            wanted = SOME if each is KEYS[0] else pages_of_file(each.size)
            put(store, each, store.missing(each, wanted))
            file = MirroredFile.open(store.folder, each)
            assert file is not None
            assert not len(file.find_missing(wanted).blocks)
        assert check_store(store) >= 3
    assert given > 2 * flips


def test_a_damaged_record_is_not_written_on(tmp_path: Path) -> None:
    """Else its seal would be right again."""
    store = open_store(tmp_path / "m")
    key = KEYS[2]
    put(store, key, pages_at((0, 16_384)))
    flip(store.folder.map_path(key.digest), 8 * 4096 + 10)
    put(store, key, pages_at((20 * 4096, 1)))
    file = MirroredFile.open(store.folder, key)
    assert file is not None
    assert read(file, (10 * 4096, 4096)) is None
    assert read(file, (20 * 4096, 4096)) == [truth(key)[20 * 4096 : 21 * 4096]]
    assert to_sets(store.held(key)) == {20}


@FLIPS
def test_flipped_bits_of_the_database_are_not_believed(tmp_path: Path, flips: int) -> None:
    rng = random.Random(1)
    store = open_store(tmp_path / "m")
    fill(store)
    store.close()
    right = tmp_path / "right.db"
    shutil.copy(store.folder.database_path, right)
    num_bits = 8 * right.stat().st_size
    kept = 0
    for _ in range(2 * flips):
        shutil.copy(right, store.folder.database_path)
        for _ in range(rng.choice((1, 1, 20))):
            flip(store.folder.database_path, rng.randrange(num_bits))
        again = open_store(tmp_path / "m")
        for key in KEYS:
            state = again.states.get(key.location)
            assert state in (None, (key.size, key.etag, 1.0))
            kept += state is not None
        again.states.put("s3://b/new", SourceState(5, "e", 2.0))
        assert again.states.get("s3://b/new") == (5, "e", 2.0)
        assert to_sets(again.held(KEYS[0])) == to_sets(SOME)
        again.close()
    assert 3 * flips < kept < 6 * flips


class Failing:
    """Lets one call of the disk fail, once or always."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.error = OSError(number, os.strerror(number))
        self.left = 0
        changed: Any = {name: self.call}
        self.calls = DiskCalls()._replace(**changed)
        self.real: Callable[..., object] = getattr(DiskCalls(), name)

    def call(self, *arguments: Any) -> object:
        self.left -= 1
        if self.left < 0:
            return self.real(*arguments)
        if self.name == "write":  # a part of it is done
            self.real(arguments[0], arguments[1][:5000], arguments[2])
        raise self.error


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["write", "allocate"])
def test_what_is_not_written_is_not_held(tmp_path: Path, name: str, number: int) -> None:
    failing = Failing(name, number)
    store = open_store(tmp_path / "m", calls=failing.calls)
    new = key_of(2 * BLOCK, "new")
    if name == "write":
        fill(store)
    for key in [*KEYS, new] if name == "write" else [new]:
        before = to_sets(store.held(key))
        every = store.missing(key, pages_of_file(key.size))
        failing.left = 1
        if not len(every.blocks):
            continue
        path = store.folder.data_path(key.digest)
        allocated = path.stat().st_blocks if path.exists() else 0
        if number == errno.ENOSPC:
            assert not put(store, key, every)
        else:
            with pytest.raises(DataError, match=r"the mirror's disk failed: Input/output error"):
                put(store, key, every)
        assert failing.left == 0
        assert (path.stat().st_blocks if path.exists() else 0) == allocated
        assert to_sets(store.held(key)) == before
        check_store(store)
        assert to_sets(open_store(tmp_path / "m").held(key)) == before
        assert put(store, key, every)
        assert store.read(key, pages_of_file(key.size)) == truth(key)
    assert store.usage().num_bytes == sum(4096 * len(to_sets(store.held(k))) for k in [*KEYS, new])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_cannot_be_synced_is_not_held(tmp_path: Path, number: int) -> None:
    """The system may have dropped what it could not write."""
    failing = Failing("sync", number)
    store = open_store(tmp_path / "m", calls=failing.calls)
    fill(store)
    held = to_sets(store.held(KEYS[0]))
    put(store, KEYS[0], pages_at((2 * BLOCK, 10_000)))
    failing.left = 1
    with pytest.raises(DataError, match="the mirror's disk failed"):
        store.sync()
    assert to_sets(store.held(KEYS[0])) == held
    assert check_store(store) >= 3
    store.sync()
    assert store.usage() == open_store(tmp_path / "m").usage()


@pytest.mark.parametrize("name", ["punch", "flush"])
def test_pages_are_gone_though_their_room_does_not_come_back(tmp_path: Path, name: str) -> None:
    failing = Failing(name, errno.EIO)
    store = open_store(tmp_path / "m", calls=failing.calls)
    fill(store)
    failing.left = 1
    with pytest.raises(DataError, match="the mirror's disk failed"):
        store.drop(KEYS[2], pages_at((0, BLOCK)))
    assert to_sets(store.held(KEYS[2])) == to_sets(pages_at((BLOCK, BLOCK)))
    assert store.usage() == open_store(tmp_path / "m").usage()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill_disk(fd: int) -> bool:
    """False if nothing more can be written."""
    try:
        return os.write(fd, bytes(4096)) > 0
    except OSError:
        return False


def put_states(store: PageStore, count: int) -> None:
    for i in range(count):
        store.states.put(f"s3://b/{i}", SourceState(5, "e" * 900, 1.0))


def test_a_full_disk_is_survived(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(small_disk / "m")
    keys = [key_of(1 << 20, str(i)) for i in range(12)]
    done = [put(store, key, pages_of_file(key.size), due=1e12) for key in keys]
    assert done[0]
    assert not done[-1]
    for key in keys:
        assert store.read(key, store.held(key)) == bytes_of(key, store.held(key))
    with open(small_disk / "other", "wb") as file:
        while fill_disk(file.fileno()):
            pass
    for i in range(20):  # new files, small ones, states
        put(store, key_of(100_000, f"x{i}"), pages_at((0, 1)), due=1e12)
        put(store, key_of(3000, f"y{i}"), pages_at((0, 1)), due=1e12)
    # Jobs that open files do not need what is remembered of these
    put_states(store, 10_000)
    assert re.search(r"mirror\.db: cannot be used .*free disk space", caplog.text)
    (small_disk / "other").unlink()
    store.states.put("s3://b/x", SourceState(5, "e", 1.0))
    assert store.states.get("s3://b/x") == (5, "e", 1.0)
    again = open_store(small_disk / "m")
    for key in again.keys():  # noqa: SIM118
        assert again.read(key, again.held(key)) == bytes_of(key, again.held(key))


def test_reserve_is_left_to_others(tmp_path: Path) -> None:
    free = [100 << 20]
    calls = DiskCalls()._replace(free=lambda _: free[0])
    store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=50 << 20, calls=calls)
    keys = [key_of(1 << 20, str(i)) for i in range(4)]
    for key in keys[:3]:
        assert put(store, key, pages_of_file(key.size), due=1e12)
    free[0] = 50 << 20
    assert not put(store, keys[3], pages_of_file(key.size), due=2e12)  # due later than the others
    assert put(store, keys[3], pages_of_file(key.size), due=1e11)
    assert store.usage().num_files == 3
    free[0] = 49 << 20
    store.evict_to_reserve()
    assert store.usage().num_files == 2
    free[0] = 0
    store.evict_to_reserve()
    assert store.usage() == (0, 0)


def test_a_lower_size_holds_at_the_next_start(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    for i in range(8):
        put(store, key_of(1 << 20, str(i)), pages_of_file(1 << 20))
        store.touch(key_of(1 << 20, "0"), pages_of_file(1 << 20))
    store.close()
    again = open_store(tmp_path / "m", size=3 << 20)
    assert again.usage() == (3 << 20, 3)
    assert len(again.held(key_of(1 << 20, "0")).blocks)  # used last
    assert {key.location[-1] for key in again.keys() if len(again.held(key).blocks)} == set("067")  # noqa: SIM118


def test_a_folder_that_is_removed_is_noticed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    fill(store)
    file = MirroredFile.open(store.folder, KEYS[0])
    shutil.rmtree(tmp_path / "m")
    assert file is not None
    assert read(file, (5000, 10)) == [truth(KEYS[0])[5000:5010]]
    with pytest.raises(MissingFileError, match=r"m: was removed or replaced"):
        store.evict_to_reserve()
    for key in KEYS:
        with pytest.raises(
            MissingFileError, match="was removed or replaced while the mirror used it"
        ):
            MirroredFile.open(store.folder, key)
    with pytest.raises(DataError):
        put(store, key_of(1 << 20, "new"), pages_of_file(1 << 20))
    open_store(tmp_path / "m")
    with pytest.raises(MissingFileError, match="was removed or replaced"):
        store.evict_to_reserve()


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(
        ConfigError,
        match=(
            r"full: is neither empty nor a mirror \(it contains 'thesis\.tex'\)\n"
            r"set `mirror.folder` to an empty"
        ),
    ):
        MirrorFolder.create(tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: cannot be used for a mirror: File exists"):
        MirrorFolder.create(tmp_path / "file")
    for missing in ("none", "full"):
        with pytest.raises(ConfigError, match=r"No such file|it has no mirror\.json"):
            MirrorFolder.attach(tmp_path / missing)
    with pytest.raises(ConfigError, match=r"there is no group 'nobodies'.*\nset `mirror.group`"):
        MirrorFolder.create(tmp_path / "m", group="nobodies")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mirror.json").write_text('{"format": 2, "id": "ab"}')
    with pytest.raises(
        ConfigError,
        match=r"is not a mirror that this version can use \(.*'format': 2.*expected format 1\)\n",
    ):
        MirrorFolder.create(tmp_path / "other")
    (tmp_path / "other" / "mirror.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        MirrorFolder.attach(tmp_path / "other")
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    assert MirrorFolder.create(tmp_path / "disk").id != MirrorFolder.create(tmp_path / "m2").id
    assert MirrorFolder.create(tmp_path / "disk") == MirrorFolder.create(tmp_path / "disk")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused_without_a_group(tmp_path: Path) -> None:
    folder = MirrorFolder.create(tmp_path / "m")
    os.chown(folder.path, 12345, 12345)
    for use in (MirrorFolder.create, MirrorFolder.attach):
        with pytest.raises(
            ConfigError, match=r"belongs to user 12345, but this .* as user 0\nset `mirror.group`"
        ):
            use(folder.path)
    os.chown(folder.path, 12345, os.getegid())
    folder.path.chmod(0o2750)
    assert MirrorFolder.attach(folder.path).id == folder.id


def test_permissions_are_those_of_the_settings(tmp_path: Path) -> None:
    for group, folder_mode, file_mode in ((None, 0o700, 0o400), ("root", 0o2750, 0o440)):
        if group and os.geteuid():
            continue
        folder = MirrorFolder.create(tmp_path / str(group), group=group)
        store = PageStore(folder, size=None, reserve=0)
        fill(store)
        for path in (folder.path, folder.path / "files", folder.data_path(KEYS[0].digest).parent):
            assert path.stat().st_mode & 0o7777 == folder_mode
        files = [*(folder.path / "files").rglob("*.*")]
        assert len(files) == 5
        assert {path.stat().st_mode & 0o7777 for path in files} == {file_mode}
        PageStore(folder, size=None, reserve=0).drop(KEYS[0], SOME)  # opens them again


@pytest.mark.parametrize("end", ["data", "map"])
@pytest.mark.parametrize("make", [os.symlink, os.mkfifo])
def test_links_and_pipes_in_place_of_files_are_refused(tmp_path: Path, end: str, make: Any) -> None:
    folder = MirrorFolder.create(tmp_path / "m")
    store = PageStore(folder, size=None, reserve=0)
    fill(store)
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    path = folder.data_path(KEYS[0].digest).with_suffix(f".{end}")
    path.unlink()
    if make is os.symlink:
        os.symlink(outside, path)  # noqa: PTH211
    else:
        os.mkfifo(path)
    with pytest.raises(
        DataError, match=r"not a regular file|links are not followed|Too many levels"
    ):
        open_store(tmp_path / "m")
    with pytest.raises(DataError):
        MirroredFile.open(folder, KEYS[0])
    assert outside.read_bytes() == b"precious"


def test_a_file_system_must_have_holes_mappings_and_locks(tmp_path: Path) -> None:
    failing = Failing("punch", errno.EOPNOTSUPP)
    failing.left = 1
    with pytest.raises(
        ConfigError,
        match=r"file system does not support holes in files \(.*\)\nset `mirror.folder`",
    ):
        MirrorFolder.create(tmp_path / "m", calls=failing.calls)
    with pytest.raises(ConfigError, match="is not visible"):
        MirrorFolder.create(tmp_path / "m", calls=DiskCalls()._replace(punch=lambda *_: None))
    assert not any((tmp_path / "m").iterdir())
    MirrorFolder.create(tmp_path / "m")


def test_one_process_owns_a_folder(tmp_path: Path) -> None:
    folder = MirrorFolder.create(tmp_path / "m")
    assert folder.read_owner() == {}
    with folder.lock():
        assert MirrorFolder.attach(tmp_path / "m").read_owner()["pid"] == os.getpid()
        with (
            pytest.raises(
                FolderInUseError, match=rf"another node process owns .*'pid': {os.getpid()}"
            ),
            folder.lock(),
        ):
            pass
        assert folder.read_owner()["pid"] == os.getpid()
    with folder.lock():
        pass  # it was given back


def test_names_that_are_too_long_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "m")
    key = key_of(1 << 20, "x" * 5000)
    with pytest.raises(
        DataError, match=r"location and etag of 50.. bytes, but a mirror supports at most 4032"
    ):
        put(store, key, pages_of_file(1 << 20))
    assert store.usage() == (0, 0)
    assert not [path for path in (tmp_path / "m" / "files").rglob("*.*") if path.is_file()]

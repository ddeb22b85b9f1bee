import errno
import os
import threading
from pathlib import Path

import pytest

from megablend.storage.descriptors import DescriptorPool, OpenedFiles


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{i}.bin" for i in range(5)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i] * 100))
    return [str(path) for path in paths]


def test_the_least_recently_used_descriptor_is_closed(files: list[str]) -> None:
    pool = DescriptorPool(capacity=2)
    opened = OpenedFiles()
    fds = []
    for path in files[:3]:
        with pool.borrow(path, opened) as fd:
            fds.append(fd)
    assert len(pool) == 2
    assert [is_open(fd) for fd in fds] == [False, True, True]
    with pool.borrow(files[2], opened) as again:
        assert again == fds[2]


def test_a_held_descriptor_outlives_its_place_in_the_pool(files: list[str]) -> None:
    pool = DescriptorPool(capacity=1)
    opened = OpenedFiles()
    with pool.borrow(files[0], opened) as held:
        for path in files[1:]:
            with pool.borrow(path, opened):
                pass
        assert os.pread(held, 1, 0) == b"\0"
    assert not is_open(held)


def test_a_caller_gets_only_the_file_that_it_opened(files: list[str]) -> None:
    pool = DescriptorPool(capacity=4)
    before = OpenedFiles()
    after = OpenedFiles()
    with pool.borrow(files[0], before) as old:
        pass
    Path(files[1]).replace(files[0])
    with pool.borrow(files[0], after) as new, pool.borrow(files[0], before) as again:
        assert again == old
        assert (os.pread(old, 1, 0), os.pread(new, 1, 0)) == (b"\0", b"\1")
    assert before != after
    pool.resize(0)
    assert not is_open(old)
    with pytest.raises(OSError, match="Stale"), pool.borrow(files[0], before):
        pass
    with pool.borrow(files[0], after) as new:
        assert os.pread(new, 1, 0) == b"\1"


def test_callers_share_the_descriptor_of_a_file(files: list[str]) -> None:
    pool = DescriptorPool(capacity=4)
    with pool.borrow(files[0], OpenedFiles()) as one, pool.borrow(files[0], OpenedFiles()) as other:
        assert one == other
    assert len(pool) == 1


def test_threads_share_a_small_pool(files: list[str]) -> None:
    pool = DescriptorPool(capacity=2)
    opened = OpenedFiles()
    wrong: list[object] = []

    def work(start: int) -> None:
        try:
            for i in range(300):
                number = (start + i * (start + 1)) % len(files)
                with pool.borrow(files[number], opened) as fd:
                    if os.pread(fd, 1, 50) != bytes([number]):
                        wrong.append(number)
        except OSError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(pool) <= 2


def test_a_smaller_pool_closes_what_was_used_least_recently(files: list[str]) -> None:
    pool = DescriptorPool(capacity=5)
    opened = OpenedFiles()
    fds = []
    for path in files:
        with pool.borrow(path, opened) as fd:
            fds.append(fd)
    pool.resize(2)
    assert [is_open(fd) for fd in fds] == [False, False, False, True, True]
    pool.resize(3)
    for path in files:
        with pool.borrow(path, opened):
            pass
    assert len(pool) == 3


def change_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every open file has another inode, as on sshfs or s3fs; times and size are its own."""
    fstat = os.fstat
    inodes = iter(range(1 << 40, 1 << 41))

    def fstat_changed(fd: int) -> os.stat_result:
        found = fstat(fd)
        more = ("st_atime", "st_mtime", "st_ctime", "st_atime_ns", "st_mtime_ns", "st_ctime_ns")
        fields = {name: getattr(found, name) for name in (*more, "st_blksize", "st_blocks")}
        return os.stat_result((found.st_mode, next(inodes), *found[2:]), fields)

    monkeypatch.setattr(os, "fstat", fstat_changed)


def test_a_file_that_gets_another_inode_is_still_the_same(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = DescriptorPool(capacity=1)
    opened = OpenedFiles()
    change_inodes(monkeypatch)
    for path in [*files, *files]:
        with pool.borrow(path, opened) as fd:
            assert os.pread(fd, 1, 0) == bytes([files.index(path)])
    other = Path(files[1] + ".new")
    other.write_bytes(bytes(100))
    os.utime(other, ns=(0, Path(files[1]).stat().st_mtime_ns))
    other.replace(files[1])  # its size and the time of its content are the same
    with pytest.raises(OSError, match="Stale"), pool.borrow(files[1], opened):
        pass


def test_after_a_failed_read_files_are_opened_again(files: list[str]) -> None:
    pool = DescriptorPool(capacity=4)
    opened = OpenedFiles()
    with pool.borrow(files[1], opened) as other:
        pass
    with pool.borrow(files[0], opened) as held:
        with pytest.raises(OSError, match="not connected"), pool.borrow(files[0], opened):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        assert len(pool) == 0
        assert not is_open(other)
        assert os.pread(held, 1, 0) == b"\0"  # another thread goes on with it
    assert not is_open(held)
    for path in files[:2]:
        with pool.borrow(path, opened) as fd:
            assert os.pread(fd, 1, 0) == bytes([files.index(path)])


def test_a_descriptor_that_cannot_be_closed_fails_no_read(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the mount of an earlier file is gone."""
    pool = DescriptorPool(capacity=1)
    opened = OpenedFiles()
    with pool.borrow(files[0], opened):
        pass
    close = os.close

    def close_dead(fd: int) -> None:
        close(fd)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(os, "close", close_dead)
    with pool.borrow(files[1], opened) as fd:
        assert os.pread(fd, 1, 0) == b"\1"

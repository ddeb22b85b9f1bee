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

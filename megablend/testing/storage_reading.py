"""The second half of the contract of storages: reads return exactly the requested bytes, or raise
an error that names the file and the offset."""

from __future__ import annotations

import os
import pickle
import random
import re
from pathlib import Path

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import CorruptFileError, DataError, MissingFileError
from megablend.storage.base import Bytes, Storage
from megablend.testing.concurrency import run_threads, succeeds_in_a_fork
from megablend.testing.expect import expect_error
from megablend.testing.storage_files import A_FILE, StorageFiles, make_content

WHOLE = make_content(A_FILE)


class StorageReading(StorageFiles):
    """Tests of `read`, `read_ranges`, `fetch`, `descriptor` and `limits`."""

    examples = 10
    """The number of random requests per test."""
    fetches = 20
    """The number of fetches in flight in each of four threads."""

    def test_limits_are_plausible(self, tmp_path: Path) -> None:
        """The limits are valid: the maximum gap is 0 or more, and at least one read may be in
        flight."""
        limits = self.make_storage().limits(self.locate(self.write_all(tmp_path), A_FILE))
        assert limits.max_gap_bytes >= 0
        assert limits.max_merged_bytes > 0
        assert limits.max_reads > 0

    def test_every_file_is_read(self, tmp_path: Path) -> None:
        """A whole file is read, whatever characters its name contains."""
        root = self.write_all(tmp_path)
        storage = self.make_storage()
        for name in self.names:
            expected = make_content(name)
            assert storage.read(self.locate(root, name), 0, len(expected)) == expected, name

    def test_a_read_gives_exactly_the_requested_bytes(self, tmp_path: Path) -> None:
        """A read of any range returns exactly the requested bytes; an empty read returns no
        bytes."""
        path = self.locate(self.write_all(tmp_path), A_FILE)
        storage = self.make_storage()
        for offset, size in draw_ranges(0, self.examples):
            data = storage.read(path, offset, size)
            assert isinstance(data, bytes)
            assert data == WHOLE[offset : offset + size], (offset, size)

    def test_ranges_are_read_together(self, tmp_path: Path) -> None:
        """Ranges can be read in any order, may overlap or be empty, and can be read into unaligned
        memory."""
        path = self.locate(self.write_all(tmp_path), A_FILE)
        storage = self.make_storage()
        for seed in range(self.examples):
            requested = draw_ranges(seed, 1 + seed * 3)
            check_ranges(storage, path, requested)
        check_ranges(storage, path, [])

    def test_fetches_are_in_flight_at_the_same_time(self, tmp_path: Path) -> None:
        """More fetches than `max_reads` can be started at the same time, from several threads."""
        path = self.locate(self.write_all(tmp_path), A_FILE)
        storage = self.make_storage()
        agrees: list[bool] = []

        def fetch(seed: int) -> None:
            requests = [draw_ranges(seed * 100 + i, 4) for i in range(self.fetches)]
            futures = [storage.fetch(path, *as_arrays(request), allocate) for request in requests]
            for request, future in zip(requests, futures, strict=True):
                data, begins = future.result(60)
                agrees.append(list_ranges(data, begins, request) == slices(request))

        run_threads(fetch)
        assert agrees == [True] * 4 * self.fetches

    def test_a_range_beyond_the_end_is_refused(self, tmp_path: Path) -> None:
        """A read beyond the end fails with the offset and the file's size."""
        path = self.locate(self.write_all(tmp_path), A_FILE)
        storage = self.make_storage()
        storage.stat(path)
        offset = len(WHOLE) - 3
        pattern = f"{re.escape(path)} at byte {offset}: .*truncated.*{len(WHOLE)}"
        offsets = np.array([5, offset])
        sizes = np.array([9, 4])
        expect_error(CorruptFileError, pattern, storage.read, path, offset, 4)
        expect_error(CorruptFileError, pattern, storage.read_ranges, path, offsets, sizes, allocate)
        expect_error(
            CorruptFileError, pattern, storage.fetch(path, offsets, sizes, allocate).result
        )
        expect_error(CorruptFileError, re.escape(path), storage.read, path, 0, 1 << 50)
        for start, size in ((-1, 1), (0, -1), (1 << 62, 1 << 62)):
            expect_error(CorruptFileError, re.escape(path), storage.read, path, start, size)

    def test_ranges_of_a_missing_file(self, tmp_path: Path) -> None:
        """Reads and fetches of a missing file raise an error; `descriptor` raises the same error,
        or returns -1."""
        path = self.locate(self.write_all(tmp_path), "t/none.bin")
        storage = self.make_storage()
        offsets = np.array([0])
        sizes = np.array([1])
        pattern = f"{re.escape(path)}.*{self.missing}"
        expect_error(MissingFileError, pattern, storage.read_ranges, path, offsets, sizes, allocate)
        expect_error(
            MissingFileError, pattern, storage.fetch(path, offsets, sizes, allocate).result
        )
        try:
            with storage.descriptor(path) as fd:
                assert fd == -1
        except DataError as error:
            assert re.search(pattern, str(error))  # noqa: PT017  (either outcome is allowed)

    def test_a_descriptor_reads_the_same(self, tmp_path: Path) -> None:
        """A descriptor, if the storage has one, reads the same bytes."""
        path = self.locate(self.write_all(tmp_path), A_FILE)
        storage = self.make_storage()
        with storage.descriptor(path) as fd:
            assert fd == -1 or os.pread(fd, 100, 7) == WHOLE[7:107]

    def test_threads_and_other_processes_share_it(self, tmp_path: Path) -> None:
        """Threads, a pickled copy, and a forked process if the storage supports it, read the right
        bytes."""
        path = self.locate(self.write_all(tmp_path), A_FILE)
        storage = self.make_storage()
        agrees: list[bool] = []

        def read(seed: int) -> None:
            for offset, size in draw_ranges(seed, 20):
                agrees.append(storage.read(path, offset, size) == WHOLE[offset : offset + size])

        run_threads(read)
        assert agrees == [True] * 80
        copy: Storage = pickle.loads(pickle.dumps(storage))
        assert copy.read(path, 5, 100) == WHOLE[5:105]
        if self.works_after_fork:
            assert succeeds_in_a_fork(lambda: storage.read(path, 9, 1000) == WHOLE[9:1009])


def draw_ranges(seed: int, count: int) -> list[tuple[int, int]]:
    """Return random ranges (offset, size) of the test file. An empty range at the end and the whole
    file are among the first ranges."""
    rng = random.Random(seed)
    size = len(WHOLE)
    fixed = [(size, 0), (0, size), (0, 0), (1, 4096), (4095, 2), (size - 1, 1)]
    drawn = fixed[: max(1, count // 2)]
    while len(drawn) < count:
        offset = rng.randrange(size)
        drawn.append((offset, rng.randrange(min(3000, size - offset + 1))))
    rng.shuffle(drawn)
    return drawn


def as_arrays(ranges: list[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    """Return the offsets and the sizes of ranges as arrays of int64 [n]."""
    offsets, sizes = np.array(ranges, np.int64).reshape(-1, 2).T.copy()
    return offsets, sizes


def allocate(size: int) -> Bytes:
    """Allocate memory whose address is not aligned."""
    return np.empty(size + 1, np.uint8)[1:]


def list_ranges(data: Bytes, begins: Int64s, ranges: list[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of each range, given the result of `read_ranges`: the data, and where each
    range begins in it."""
    assert (data.dtype, begins.dtype) == (np.dtype(np.uint8), np.dtype(np.int64))
    assert len(begins) == len(ranges)
    return [
        data[begin : begin + size].tobytes()
        for begin, (_, size) in zip(begins.tolist(), ranges, strict=True)
    ]


def slices(ranges: list[tuple[int, int]]) -> list[bytes]:
    """Return the expected bytes of each range."""
    return [WHOLE[offset : offset + size] for offset, size in ranges]


def check_ranges(storage: Storage, path: str, ranges: list[tuple[int, int]]) -> None:
    """Check that `read_ranges` and `fetch` return the expected bytes."""
    offsets, sizes = as_arrays(ranges)
    assert list_ranges(*storage.read_ranges(path, offsets, sizes, allocate), ranges) == slices(
        ranges
    )
    assert list_ranges(*storage.fetch(path, offsets, sizes, allocate).result(60), ranges) == slices(
        ranges
    )

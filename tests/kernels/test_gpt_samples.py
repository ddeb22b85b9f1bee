"""Samples of Megatron's index arrays, whole and damaged, against slices of the documents put one after the other."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megablend.kernels.gpt_samples import read_samples

START = 128
POINTERS = 50
"""Where entries begin in an array's file, and pointers in the `.idx`."""
Arrays = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Files:
    """What the files of a dataset hold."""

    document_index: Arrays
    sample_index: Arrays
    shuffle_index: Arrays
    pointers: Arrays
    data: Arrays
    lengths: Arrays

    def read(
        self, folder: Path, batches: list[list[int]], length: int, cut: str = ""
    ) -> list[Arrays | None]:
        """Batches of samples of `length` tokens as the kernel reads them; None for one that it refuses.

        Args:
            cut: name of what is half as long in its file.
        """
        widths = (self.sample_index.itemsize, self.shuffle_index.itemsize, self.data.itemsize)
        layout = np.array([len(self.shuffle_index), *widths, START, POINTERS, 1], np.int64)
        starts = {
            "document_index": START,
            "sample_index": START,
            "shuffle_index": START,
            "pointers": POINTERS,
            "data": 0,
        }
        with ExitStack() as stack:
            fds = []
            for name, start in starts.items():
                entries = getattr(self, name).tobytes()
                # What is before entries could be some
                header = (bytes(start) + entries)[-start:] if start else b""
                (folder / name).write_bytes(header + entries[: len(entries) // (1 + (name == cut))])
                fds.append(os.open(folder / name, os.O_RDONLY))
                stack.callback(os.close, fds[-1])
            found: list[Arrays | None] = []
            for numbers in batches:
                out = np.full((len(numbers), length), 77, self.data.dtype)
                known = np.array(fds), layout, self.lengths
                done = read_samples(np.array(numbers, np.int64), *known, out.view(np.uint8))
                found.append(out if done else None)
        return found

    def slices(self, numbers: list[int], length: int) -> Arrays | None:
        """The same by NumPy's own indexing, where an entry is out of bounds None."""
        found = []
        try:
            for number in numbers:
                row = int(self.shuffle_index[number])
                (first, offset), (last, end) = self.sample_index[[row, row + 1]].tolist()
                if min(row, first, offset, end + 1) < 0 or not first <= last < len(
                    self.document_index
                ):
                    return None
                documents = [
                    self.document(int(each)) for each in self.document_index[first : last + 1]
                ]
                left_out = len(documents[-1]) - end - 1
                if left_out < 0 or offset > len(documents[0]):
                    return None
                stream = np.concatenate(documents)
                found.append(stream[offset : len(stream) - left_out])
        except IndexError:
            return None
        return (
            np.array(found).reshape(-1, length)
            if {len(each) for each in found} <= {length}
            else None
        )

    def document(self, number: int) -> Arrays:
        """Its tokens. Raises: IndexError."""
        if number < 0:
            raise IndexError
        begin = int(self.pointers[number]) // self.data.itemsize
        return self.data[begin : begin + int(self.lengths[number])]


def draw(
    rng: np.random.Generator, length: int, row_dtype: str, shuffle_dtype: str, token_dtype: str
) -> Files:
    """Documents of no token, of few and of many samples, in any order in the `.bin`, and Megatron's arrays over two epochs."""
    lengths = rng.choice([0, 1, 2, length - 1, length, 3 * length], 60).astype(np.int32)
    order = rng.permutation(len(lengths))
    pointers = np.empty(len(lengths), np.int64)
    pointers[order] = np.cumsum(lengths[order], dtype=np.int64) - lengths[order]
    document_index = np.concatenate([rng.permutation(len(lengths)) for _ in range(2)]).astype(
        np.int32
    )
    ends = np.cumsum(lengths[document_index])
    # A sample begins with the last token of the one before
    cuts = np.arange(0, ends[-1] - 1, length - 1)
    rows = np.searchsorted(ends, cuts, side="right")
    sample_index = np.stack([rows, cuts - (ends - lengths[document_index])[rows]], 1).astype(
        row_dtype
    )
    data = rng.integers(0, 250, lengths.sum()).astype(token_dtype)
    shuffle_index = rng.permutation(len(cuts) - 1).astype(shuffle_dtype)
    return Files(
        document_index, sample_index, shuffle_index, pointers * data.itemsize, data, lengths
    )


@pytest.mark.parametrize("token_dtype", ["u1", "u2", "i4", "i8"])
@pytest.mark.parametrize(("row_dtype", "shuffle_dtype"), [("i4", "u4"), ("i8", "i8")])
def test_samples_are_slices_of_the_documents(
    tmp_path: Path, row_dtype: str, shuffle_dtype: str, token_dtype: str
) -> None:
    files = draw(np.random.default_rng(3), 9, row_dtype, shuffle_dtype, token_dtype)
    count = len(files.shuffle_index)
    numbers = [*range(-count, count)]
    found, *outside = files.read(tmp_path, [numbers, [count], [-count - 1]], 9)
    expected = files.slices(numbers, 9)
    assert found is not None
    assert expected is not None
    np.testing.assert_array_equal(found, expected)
    assert outside == [None, None]


def test_a_sample_of_many_documents(tmp_path: Path) -> None:
    """More than are looked up at once."""
    count = 100
    files = Files(
        document_index=np.arange(count, dtype=np.int32)[::-1].copy(),
        sample_index=np.array([[3, 0], [count - 1, 0]], np.int32),
        shuffle_index=np.zeros(1, np.uint32),
        pointers=np.arange(count, dtype=np.int64) * 2,
        data=np.arange(count, dtype=np.uint16),
        lengths=np.ones(count, np.int32),
    )
    (found,) = files.read(tmp_path, [[0]], count - 3)
    assert found is not None
    assert found[0].tolist() == [*range(count - 4, -1, -1)]


@pytest.mark.parametrize("seed", range(100))
def test_entries_out_of_bounds_are_refused(tmp_path: Path, seed: int) -> None:
    """Where a damaged entry is met, and is not as good as another by chance."""
    rng = np.random.default_rng(seed)
    files = draw(rng, 5, str(rng.choice(["i4", "i8"])), "i8", "u2")
    name = ["document_index", "sample_index", "shuffle_index"][seed % 3]
    damaged = getattr(files, name).copy()
    counts = [len(files.lengths), len(files.sample_index), len(files.document_index)]
    far = [-(2**31), -2, -1, 0, 1, *counts, *(count - 1 for count in counts), 2**31 - 1]
    damaged.reshape(-1)[rng.integers(damaged.size, size=9)] = rng.choice(far, 9)
    files = replace(files, **{name: damaged})
    batches = [[number] for number in range(len(files.shuffle_index))]
    for batch, found in zip(batches, files.read(tmp_path, batches, 5), strict=True):
        expected = files.slices(batch, 5)
        assert (found is None) == (expected is None), batch
        if expected is not None:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "name", ["document_index", "sample_index", "shuffle_index", "pointers", "data"]
)
def test_files_that_end_early_are_refused(tmp_path: Path, name: str) -> None:
    files = draw(np.random.default_rng(1), 5, "i8", "i8", "u2")
    expected = files.slices([*range(len(files.shuffle_index))], 5)
    assert expected is not None
    answers = files.read(tmp_path, [[0, number] for number in range(len(expected))], 5, name)
    # What was read for sample 0 is not taken for that of the other
    for number, found in enumerate(answers):
        assert found is None or np.array_equal(found, expected[[0, number]])
    assert any(found is None for found in answers)


@pytest.mark.parametrize(
    ("rows", "shuffle", "is_read"),
    [
        ([[2, 0], [2, 4]], [0, 0], True),
        ([[2, -1], [2, 3]], [0, 0], False),  # begins before its document
        ([[-1, 0], [-1, 4]], [0, 0], False),  # before the documents
        ([[2, 0], [2, 4]], [0, -1], False),  # before the rows
        # after the rows, where a sample before was as it should be
        ([[2, 0], [2, 4]], [0, 2], False),
    ],
)
def test_what_is_outside_is_refused_where_it_has_as_many_tokens_as_it_should(
    tmp_path: Path, rows: list[list[int]], shuffle: list[int], is_read: bool
) -> None:
    files = Files(
        document_index=np.arange(3, dtype=np.int32),
        sample_index=np.array(rows),
        shuffle_index=np.array(shuffle),
        pointers=np.arange(3, dtype=np.int64) * 10,
        data=np.arange(15, dtype=np.uint16),
        lengths=np.full(3, 5, np.int32),
    )
    (found,) = files.read(tmp_path, [[0, 1]], 5)
    assert (found is not None) == is_read

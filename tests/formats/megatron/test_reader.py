import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablend.config.read_spec import ReadSpec
from megablend.distributed.base import SingleProcess
from megablend.errors import CorruptFileError, MissingFileError, UnsupportedFileError
from megablend.formats import format_of
from megablend.formats.fetch import read_blocks
from megablend.formats.megatron import MEGATRON
from megablend.formats.megatron.idx import HEADER_BYTES, Sequences, block_starts
from megablend.index.build.build import build_index
from megablend.index.build.source_spec import SourceSpec
from tests.examples import examples
from tests.formats.writers import index, opened, pieces, write_megatron
from tests.megatron_core import megatron
from tests.storages import STORAGE

DOCUMENTS = [[1, 2, 3], [], [4], list(range(100)), [], [], [7, 8]]


def field(path: Path, offset: int, value: bytes) -> None:
    """Overwrite bytes of an `.idx`."""
    with open(path.with_suffix(".idx"), "r+b") as file:
        file.seek(offset)
        file.write(value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.bin"
    write_megatron(path, DOCUMENTS)
    return path


@pytest.fixture(scope="module")
def indexed_dataset() -> Any:
    """Megatron's own module."""
    return megatron("indexed_dataset")


def read(path: Path) -> list[list[int]]:
    """All sequences."""
    found = index(path, None)
    assert found.scanned_bytes == 0
    return list(
        itertools.chain.from_iterable(pieces(opened(path, None, found), found.blocks, found.chunks))
    )


def test_megatron_reads_the_same(path: Path, indexed_dataset: Any) -> None:
    theirs = indexed_dataset.IndexedDataset(str(path)[:-4])
    assert read(path) == [sequence.tolist() for sequence in theirs] == DOCUMENTS


@pytest.mark.parametrize("multimodal", [False, True])
def test_what_megatron_writes_is_read(
    tmp_path: Path, indexed_dataset: Any, multimodal: bool
) -> None:
    path = tmp_path / "x.bin"
    builder = indexed_dataset.IndexedDatasetBuilder(
        str(path), dtype=np.uint16, multimodal=multimodal
    )
    for i, sequence in enumerate(DOCUMENTS):
        builder.add_item(torch.tensor(sequence, dtype=torch.int64), mode=i % 2)
        if i % 3 == 1 or i == len(DOCUMENTS) - 1:  # a document there may be of several sequences
            builder.end_document()
    builder.finalize(str(path.with_suffix(".idx")))
    assert read(path) == DOCUMENTS
    assert index(path, None).token_dtype == "uint16"


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_integer_dtypes(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "x.bin"
    documents = [[0, np.iinfo(dtype).max], [np.iinfo(dtype).min]]
    write_megatron(path, documents, dtype=dtype)
    found = index(path, None)
    assert found.token_dtype == dtype
    assert pieces(opened(path, None, found), found.blocks, found.chunks) == [documents]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_float_tokens_are_refused(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "x.bin"
    write_megatron(path, DOCUMENTS, dtype=dtype)
    with pytest.raises(
        UnsupportedFileError,
        match=rf"x\.idx at byte 17: contains {dtype} values, expected integers",
    ):
        index(path, None)


def test_prefix_bin_and_idx_name_the_same_pair(path: Path) -> None:
    prefix = str(path)[:-4]
    tables = []
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        each = format_of(name, storage=STORAGE)
        assert each.files(name) == [f"{prefix}.bin", f"{prefix}.idx"]
        found = each.index(name, ReadSpec(block_bytes=64), storage=STORAGE)
        tables.append(found.blocks.tobytes())
    assert tables[0] == tables[1] == tables[2]


def test_pointers_out_of_order_begin_new_blocks(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write_megatron(path, [[1, 2], [3], [4, 5]])
    field(path, HEADER_BYTES + 4 * 3, struct.pack("<3q", 12, 8, 0))
    found = index(path, None)
    assert pieces(opened(path, None, found), found.blocks, found.chunks) == [
        [[4, 5]],
        [[3]],
        [[1, 2]],
    ]
    assert found.blocks["offset"].tolist() == [12, 8, 0]


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"MMIDIDY", r"at byte 0: begins with .*not an \.idx file"),
        (0, b"TNTIDX\0\0", r"legacy format; recreate it"),
        (9, struct.pack("<Q", 2), "at byte 9: has version 2"),
        (17, b"\x0b", "at byte 17: has the unknown dtype code 11"),
        (
            18,
            struct.pack("<Q", 8),
            "at byte 18: has .* bytes, but 8 sequences and 8 document boundaries take",
        ),
        (18, b"\xff" * 8, "at byte 18: has .* bytes, but 18446744073709551615 sequences"),
        (
            26,
            struct.pack("<Q", 7),
            "at byte 18: has .* bytes, but 7 sequences and 7 document boundaries",
        ),
        (
            HEADER_BYTES + 4 * 3,
            struct.pack("<i", -1),
            r"sequence 3 \(-1 tokens .* is outside the \.bin",
        ),
        (HEADER_BYTES + 4 * 3, struct.pack("<i", 1 << 30), r"sequence 3 .* is outside the \.bin"),
        (HEADER_BYTES + 4 * 7, struct.pack("<q", -4), r"sequence 0 .* is outside the \.bin"),
        (
            HEADER_BYTES + 4 * 7 + 8 * 6,
            struct.pack("<q", 1 << 62),
            r"sequence 6 .* belongs to another pair",
        ),
        (
            HEADER_BYTES + 12 * 7,
            struct.pack("<q", 1),
            "document boundaries do not ascend from 0 to 7",
        ),
        (HEADER_BYTES + 12 * 7 + 8 * 7, struct.pack("<q", 6), "document boundaries do not ascend"),
        (HEADER_BYTES + 12 * 7 + 8 * 3, struct.pack("<q", 0), "document boundaries do not ascend"),
    ],
)
def test_damaged_headers(path: Path, offset: int, value: bytes, message: str) -> None:
    field(path, offset, value)
    with pytest.raises((CorruptFileError, UnsupportedFileError), match=message) as raised:
        index(path, None)
    assert raised.value.path == str(path.with_suffix(".idx"))


def test_an_idx_that_changes_under_its_reader(path: Path) -> None:
    found = index(path, None)
    reader = opened(path, None, found)
    field(path, HEADER_BYTES, struct.pack("<i", 2))
    with pytest.raises(
        CorruptFileError,
        match=r"10[0-9] tokens, but according to .* these sequences have 10[0-9]; restore the original file, or give the run",
    ):
        read_blocks(reader, found.blocks, found.chunks, STORAGE)


@examples(60)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=40),
    block_bytes=st.integers(1, 300),
    jumps=st.sets(st.integers(0, 39)),
)
def test_blocks_are_neighbouring_whole_sequences(
    lengths: list[int], block_bytes: int, jumps: set[int]
) -> None:
    pointers = []
    place = 0
    for i, length in enumerate(lengths):
        place += 1000 if i in jumps else 0
        pointers.append(place)
        place += 2 * length
    sequences = Sequences(
        token_dtype="uint16",
        lengths=np.array(lengths, np.int32),
        pointers=np.array(pointers, np.int64),
    )
    starts = block_starts(sequences, block_bytes).tolist()
    assert starts[0] == 0
    assert starts[-1] == len(lengths)
    for first, last in itertools.pairwise(starts):
        assert first < last
        for i in range(first + 1, last):
            assert pointers[i] == pointers[i - 1] + 2 * lengths[i - 1]
            assert pointers[i] - pointers[first] < block_bytes


def test_a_bin_that_is_longer_than_its_idx_says_is_noted(path: Path, indexed_dataset: Any) -> None:
    size = path.stat().st_size
    assert MEGATRON.describe_unused_bytes(str(path), index(path, None).blocks, size) is None
    with open(path, "ab") as file:
        file.write(bytes(6))
    assert [
        sequence.tolist() for sequence in indexed_dataset.IndexedDataset(str(path)[:-4])
    ] == DOCUMENTS
    note = MEGATRON.describe_unused_bytes(str(path), index(path, None).blocks, size + 6)
    assert note is not None
    assert (
        f": has {size + 6:,} bytes, of which {path.with_suffix('.idx')} describes the first {size:,};"
        in note
    )
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("pattern", ["x.bin", "*.bin"])
def test_a_bin_without_an_idx_suggests_the_raw_format(path: Path, pattern: str) -> None:
    path.with_suffix(".idx").unlink()
    spec = SourceSpec(name="s", patterns=(str(path.with_name(pattern)),), read=ReadSpec())
    message = rf"{path.with_suffix('.idx')}: no such file; restore the \.idx, or, .* set `format: raw` for its source"
    with pytest.raises(MissingFileError, match=message):
        build_index(str(path.parent / "cache"), [spec], launch=SingleProcess(), storage=STORAGE)

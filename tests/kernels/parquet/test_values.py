"""Values of many pages by one call: none reads beyond its page, whatever it claims."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from megablend.kernels.parquet.values import (
    BYTE_STREAM_SPLIT,
    PLAIN,
    RLE_BOOLEANS,
    RLE_DICTIONARY,
    SHORT,
    SOUND,
    UNLISTED,
    VALUES_DTYPE,
    decode_values,
)
from tests.kernels.parquet_streams import run


def decoded(decoder: int, data: bytes, count: int, like: npt.NDArray[Any]) -> tuple[int, list[int]]:
    """The problem, and the values, of one page; its dictionary has two entries."""
    held = pa.py_buffer(data)
    entries = np.array([70, 80], like.dtype)
    out = np.full(count, 5, like.dtype)
    addresses = (array.__array_interface__["data"][0] for array in (out, entries))
    pages = np.array(
        [(decoder, held.address, held.size, count, *addresses, len(entries), -1)], VALUES_DTYPE
    )
    decode_values(pages, like)
    return int(pages["problem"][0]), out.tolist()


@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_bytes_must_be_enough_and_streams_exactly_so_many(dtype: str) -> None:
    like = np.empty(0, dtype)
    data = np.array([1, 2, 3], dtype).tobytes()
    assert decoded(PLAIN, data, 3, like) == (SOUND, [1, 2, 3])
    assert decoded(PLAIN, data + b"?", 3, like) == (SOUND, [1, 2, 3])
    assert decoded(PLAIN, data[:-1], 3, like)[0] == SHORT
    split = np.frombuffer(data, np.uint8).reshape(3, -1).T.tobytes()
    assert decoded(BYTE_STREAM_SPLIT, split, 3, like) == (SOUND, [1, 2, 3])
    assert (
        decoded(BYTE_STREAM_SPLIT, split + b"?", 3, like)[0]
        == decoded(BYTE_STREAM_SPLIT, split[:-1], 3, like)[0]
        == SHORT
    )


def test_indices_must_be_listed() -> None:
    like = np.empty(0, np.int32)
    assert decoded(RLE_DICTIONARY, b"\x01" + run(1, 3, 1), 3, like) == (SOUND, [80, 80, 80])
    assert decoded(RLE_DICTIONARY, b"\x02" + run(2, 3, 2), 3, like)[0] == UNLISTED
    assert decoded(RLE_DICTIONARY, b"\x01", 3, like)[0] == SHORT


def test_runs_of_booleans_are_as_long_as_they_are_told_and_within_the_page() -> None:
    like = np.empty(0, np.uint8)
    runs = run(1, 3, 1)
    assert decoded(RLE_BOOLEANS, len(runs).to_bytes(4, "little") + runs, 3, like) == (
        SOUND,
        [1, 1, 1],
    )
    for length in (len(runs) - 1, len(runs) + 1, len(runs) + 4, 0xFFFF_FFFF):
        assert decoded(RLE_BOOLEANS, length.to_bytes(4, "little") + runs, 3, like)[0] == SHORT
    for size in range(4):
        assert decoded(RLE_BOOLEANS, b"\0\0\0"[:size], 3, like)[0] == SHORT


def test_a_page_of_no_values_is_sound() -> None:
    for decoder in (PLAIN, RLE_DICTIONARY, BYTE_STREAM_SPLIT, RLE_BOOLEANS):
        assert decoded(decoder, b"", 0, np.empty(0, np.int32)) == (SOUND, [])

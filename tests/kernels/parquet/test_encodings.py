import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.parquet import delta
from megablend.kernels.parquet.dictionary import BROKEN, OUT_OF_RANGE, decode_dictionary
from megablend.kernels.parquet.values import join_streams
from tests.examples import examples
from tests.kernels.parquet_streams import groups, hybrids, packed, run, varint, zigzag

SETTINGS = examples(60)
DTYPES = ["int32", "int64"]
BITS = {"int32": 32, "int64": 64}


def look_up(stream: bytes, entries: npt.NDArray[Any], count: int) -> tuple[int, list[int]]:
    buffer = pa.py_buffer(stream)
    out = np.full(count, -5, entries.dtype)
    return decode_dictionary(buffer.address, buffer.size, entries, out), out.tolist()


@st.composite
def indices(draw: st.DrawFn) -> tuple[int, bytes, list[int]]:
    width = draw(st.integers(1, 20))
    top = draw(st.sampled_from([0, 1, (1 << width) - 1]))
    return width, *draw(hybrids(width, min(top, (1 << width) - 1)))


@SETTINGS
@given(indices(), st.sampled_from(DTYPES), st.integers(0, 50))
def test_indices_become_entries(case: tuple[int, bytes, list[int]], dtype: str, spare: int) -> None:
    width, data, values = case
    entries = (
        np.random.default_rng(width).integers(-99, 99, max(values, default=0) + 1).astype(dtype)
    )
    count = max(0, len(values) - spare)
    assert look_up(bytes([width]) + data, entries, count) == (
        0,
        [int(entries[i]) for i in values[:count]],
    )


@SETTINGS
@given(indices(), st.integers(1, 30))
def test_indices_that_break_off(case: tuple[int, bytes, list[int]], cut: int) -> None:
    width, data, values = case
    entries = np.arange(1 << 20, dtype=np.int32)
    found, out = look_up((bytes([width]) + data)[:-cut], entries, len(values))
    assert found == BROKEN or (found, out) == (0, values)


def test_indices_of_no_bits() -> None:
    assert look_up(b"\0", np.array([9], np.int64), 3) == (0, [9, 9, 9])
    assert look_up(b"\0\x06", np.array([9], np.int64), 3) == (0, [9, 9, 9])
    assert look_up(b"\0", np.array([], np.int64), 3)[0] == OUT_OF_RANGE


@pytest.mark.parametrize(
    "stream", [b"", b"\x21" + run(0, 9, 33), b"\x04", b"\x04\x80", b"\x04" + run(1, 2, 4)]
)
def test_broken_indices(stream: bytes) -> None:
    assert look_up(stream, np.arange(16, dtype=np.int32), 3)[0] == BROKEN


@pytest.mark.parametrize("width", [2, 8, 17, 31, 32])
@pytest.mark.parametrize("place", [0, 7, 40])
def test_indices_outside_of_the_dictionary(width: int, place: int) -> None:
    values = [1] * 48
    assert look_up(bytes([width]) + groups(values, width), np.arange(2, dtype=np.int32), 48)[0] == 0
    for wrong in (2, (1 << width) - 1):
        values[place] = wrong
        assert (
            look_up(bytes([width]) + groups(values, width), np.arange(2, dtype=np.int32), 48)[0]
            == OUT_OF_RANGE
        )
        assert (
            look_up(bytes([width]) + run(wrong, 48, width), np.arange(2, dtype=np.int32), 48)[0]
            == OUT_OF_RANGE
        )


def undelta(stream: bytes, count: int, dtype: str) -> tuple[int, list[int]]:
    buffer = pa.py_buffer(stream)
    out = np.full(count, -5, dtype)
    return delta.decode_delta(buffer.address, buffer.size, out), out.tolist()


def differences(
    values: Sequence[int], bits: int, block: int = 128, miniblocks: int = 4, spare: int = 0
) -> bytes:
    """DELTA_BINARY_PACKED, in whole numbers modulo 2**bits; `spare` bits more than needed a value."""
    out = varint(block) + varint(miniblocks) + varint(len(values)) + zigzag(values[0])
    steps = [signed(b - a, bits) for a, b in itertools.pairwise(values)]
    for begin in range(0, len(steps), block):
        part = steps[begin : begin + block]
        least = min(part)
        each = block // miniblocks
        minis = [
            [(step - least) % 2**bits for step in part[i : i + each]] for i in range(0, block, each)
        ]
        widths = [
            min(bits, max(mini, default=0).bit_length() + spare) if mini else 0 for mini in minis
        ]
        out += zigzag(least) + bytes(widths)
        for mini, width in zip(minis, widths, strict=True):
            out += packed(mini + [0] * (each - len(mini)), width) if mini else b""
    return out


def signed(value: int, bits: int) -> int:
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half


@st.composite
def integers(draw: st.DrawFn) -> tuple[str, list[int]]:
    dtype = draw(st.sampled_from(DTYPES))
    reach = 2 ** draw(st.integers(0, BITS[dtype] - 1))
    value = st.integers(-reach, reach - 1)
    size = draw(st.sampled_from([1, 2, 31, 32, 33, 128, 129, 130, 300]))
    return dtype, draw(
        st.lists(value, min_size=size, max_size=size)
        | st.just([reach - 1, -reach] * (size // 2) + [0])
    )


@SETTINGS
@given(
    integers(),
    st.sampled_from([(128, 4), (128, 1), (256, 8), (1024, 4)]),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_differences_are_summed(
    case: tuple[str, list[int]], shape: tuple[int, int], spare: int, fewer: int
) -> None:
    dtype, values = case
    stream = differences(values, BITS[dtype], *shape, spare)
    count = max(1, len(values) - fewer)
    assert undelta(stream, count, dtype) == (0, values[:count])
    found, out = undelta(stream[: -fewer - 1], len(values), dtype)
    assert found == delta.BROKEN or out == values


@pytest.mark.parametrize(
    "head",
    [
        b"",
        varint(128),
        varint(0) + varint(1) + varint(9) + b"\0",
        varint(128) + varint(0) + varint(9) + b"\0",
        varint(128) + varint(3) + varint(9) + b"\0",
        varint(128) + varint(8) + varint(9) + b"\0",
        varint(2**40) + varint(4) + varint(9) + b"\0",
        varint(128) + varint(4) + varint(4) + b"\0",
        varint(128) + varint(4) + varint(9) + b"\xff" * 11,
        varint(128) + varint(4) + varint(9) + b"\0\0" + bytes([65, 0, 0, 0]) + bytes(999),
        varint(128) + varint(4) + varint(9) + b"\0\0" + bytes([64, 0]),
        varint(128) + varint(4) + varint(9) + b"\0\0" + bytes([64, 0, 0, 0]) + bytes(63),
    ],
)
def test_broken_differences(head: bytes) -> None:
    assert undelta(head, 9, "int64")[0] == delta.BROKEN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_streams_of_bytes_are_joined(dtype: str, count: int) -> None:
    values = np.random.default_rng(count).integers(
        np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype
    )
    stored = [int(value).to_bytes(BITS[dtype] // 8, "little", signed=True) for value in values]
    buffer = pa.py_buffer(
        b"".join(bytes(value[i] for value in stored) for i in range(BITS[dtype] // 8))
    )
    out = np.zeros(count, dtype)
    join_streams(buffer.address, out)
    assert out.tolist() == values.tolist()

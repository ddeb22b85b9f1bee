import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablend.kernels.levels import count_hybrid, decode_hybrid, piece_offsets
from megablend.kernels.lz4 import lz4_length

SETTINGS = settings(max_examples=80, derandomize=True, deadline=None)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value // 128)


def packed(values: list[int], width: int) -> bytes:
    """Bit-packed groups of 8, by way of a string of binary digits."""
    digits = "".join(format(value, f"0{width}b")[::-1] for value in values)
    return bytes(int(digits[i : i + 8][::-1], 2) for i in range(0, len(digits), 8))


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[int], int]:
    """A hybrid stream, its values, their width."""
    width = draw(st.integers(1, 8))
    value = st.integers(0, 2**width - 1)
    data, values = b"", []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            count = draw(st.sampled_from([0, 1, 7, 63, 64, 200, 20_000]))
            repeated = draw(value)
            data += varint(count * 2) + bytes([repeated])
            values += [repeated] * count
        else:
            groups = draw(st.integers(1, 9))
            run = draw(st.lists(value, min_size=groups * 8, max_size=groups * 8))
            data += varint(groups * 2 + 1) + packed(run, width)
            values += run
    return data, values, width


@SETTINGS
@given(streams(), st.floats(0, 1))
def test_hybrid_streams_come_back(stream: tuple[bytes, list[int], int], share: float) -> None:
    data, values, width = stream
    runs = np.frombuffer(data, np.uint8)
    assert count_hybrid(runs, width) == len(values)
    out = np.full(int(share * len(values)), 255, np.uint8)
    decode_hybrid(runs, width, out)
    assert out.tolist() == values[: len(out)]


@SETTINGS
@given(streams(), st.integers(0, 40))
def test_a_stream_that_breaks_off_is_noticed_or_shorter(stream: tuple[bytes, list[int], int], cut: int) -> None:
    data, values, width = stream
    runs = np.frombuffer(data[: max(0, len(data) - cut)], np.uint8)
    found = count_hybrid(runs, width)
    assert -1 <= found <= len(values)
    if found > 0:
        out = np.empty(found, np.uint8)
        decode_hybrid(runs, width, out)
        assert out.tolist() == values[:found]


def test_a_last_group_may_be_cut_short() -> None:
    runs = np.frombuffer(varint(2 * 2 + 1) + packed([1, 0, 1, 1, 1, 1, 0, 0], 1), np.uint8)
    assert count_hybrid(runs, 1) == 8


@pytest.mark.parametrize("data", [b"\x80", b"\xff\xff\xff\xff\xff\x01", b"\x04"])
def test_broken_runs(data: bytes) -> None:
    assert count_hybrid(np.frombuffer(data, np.uint8), 3) == -1


def test_no_bytes_hold_no_levels() -> None:
    assert count_hybrid(np.frombuffer(b"", np.uint8), 1) == 0


def naive_offsets(rep: list[int], definition: list[int], max_def: int) -> list[int]:
    pieces: list[int] = []
    for r, d in zip(rep, definition, strict=True):
        if r == 0 or not pieces:
            pieces.append(0)
        pieces[-1] += d == max_def
    return [sum(pieces[:i]) for i in range(len(pieces) + 1)]


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=80))
def test_pieces_begin_at_rows_and_at_the_page(levels: list[tuple[int, int]]) -> None:
    rep, definition = [r for r, _ in levels], [d for _, d in levels]
    out = np.zeros(len(levels) + 1, np.int64)
    used = piece_offsets(np.array(rep, np.uint8), np.array(definition, np.uint8), 3, out)
    assert out[:used].tolist() == naive_offsets(rep, definition, 3)


@pytest.mark.parametrize("size", [0, 1, 14, 15, 16, 269, 270, 271, 5000, 70_000])
@pytest.mark.parametrize("kinds", [1, 2, 256])
def test_lz4_lengths(size: int, kinds: int) -> None:
    data = bytes(random.Random(size).choices(range(kinds), k=size))
    block = pa.Codec("lz4_raw").compress(data, asbytes=True)
    assert lz4_length(np.frombuffer(block, np.uint8)) == size
    for cut in range(1, min(len(block), 5)):
        assert lz4_length(np.frombuffer(block[:-cut], np.uint8)) < size

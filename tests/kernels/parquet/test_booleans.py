"""Booleans out of bits and runs, against what pyarrow and plain loops make of the same bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.parquet.values import decode_bits
from tests.examples import examples


def address(data: bytes) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], int]:
    held = np.frombuffer(data + b"\xff", np.uint8).copy()
    return held, int(held.__array_interface__["data"][0])


@examples(60)
@given(st.lists(st.booleans(), max_size=70))
def test_bits(values: list[bool]) -> None:
    data = sum(value << i for i, value in enumerate(values)).to_bytes(
        (len(values) + 7) // 8, "little"
    )
    held, at = address(data)
    out = np.zeros(len(values), np.bool_)
    assert decode_bits(at, len(data), False, out) == 0
    assert out.tolist() == values
    if len(data) > 0:
        assert decode_bits(at, len(data) - 1, False, np.zeros(len(values), np.bool_)) == -1
    del held


@examples(60)
@given(st.lists(st.tuples(st.integers(1, 200), st.booleans(), st.booleans()), max_size=6))
def test_runs(parts: list[tuple[int, bool, bool]]) -> None:
    """Each part is a run of one value, or groups of eight alternating ones."""
    data = b""
    values = list[bool]()
    for count, value, packed in parts:
        if packed:
            groups = count % 5 + 1
            data += bytes([groups << 1 | 1]) + (b"\x55" if value else b"\xaa") * groups
            values += [value, not value] * (4 * groups)
        else:
            header = count << 1
            data += bytes([header & 127 | 128, header >> 7]) + bytes([value])
            values += [value] * count
    held, at = address(data)
    for short in (0, 1, 3):
        out = np.zeros(max(0, len(values) - short), np.bool_)
        assert decode_bits(at, len(data), True, out) == 0
        assert out.tolist() == values[: len(out)]
    assert decode_bits(at, len(data), True, np.zeros(len(values) + 1, np.bool_)) == -1
    del held


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x04", b"\x00", b"\x03"])
def test_broken_runs(data: bytes) -> None:
    held, at = address(data)
    assert decode_bits(at, len(data), True, np.zeros(20, np.bool_)) == -1
    del held

"""Encoded streams made by hand, bit by bit, for the tests of Parquet's kernels."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value // 128)


def zigzag(value: int) -> bytes:
    return varint(2 * value if value >= 0 else -2 * value - 1)


def packed(values: Sequence[int], width: int) -> bytes:
    """Bit-packed groups of 8, by way of a string of binary digits."""
    digits = "".join(format(value, f"0{width}b")[::-1] for value in values) if width else ""
    return bytes(int(digits[i : i + 8][::-1], 2) for i in range(0, len(digits), 8))


def run(value: int, count: int, width: int) -> bytes:
    return varint(count * 2) + value.to_bytes((width + 7) // 8, "little")


def groups(values: Sequence[int], width: int) -> bytes:
    return varint(len(values) // 8 * 2 + 1) + packed(values, width)


@st.composite
def hybrids(draw: st.DrawFn, width: int, top: int, most: int = 400) -> tuple[bytes, list[int]]:
    """A hybrid stream of values up to `top`, and its values."""
    value = st.integers(0, top)
    data = b""
    values = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            count = draw(st.sampled_from([0, 1, 7, 63, 64, most]))
            repeated = draw(value)
            data += run(repeated, count, width)
            values += [repeated] * count
        else:
            size = draw(st.integers(1, 9)) * 8
            part = draw(st.lists(value, min_size=size, max_size=size) | st.just([top] * size))
            data += groups(part, width)
            values += part
    return data, values

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.exact import length_totals
from megablend.kernels.exact.length_totals import total_lengths

WORD = (1 << 32) - 1


def naive(lengths: list[int], position: int) -> tuple[int, int, int]:
    """By Python's integers, with the constants of MurmurHash3 and of the golden ratio."""

    def mixed(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B & WORD
        h = (h ^ h >> 13) * 0xC2B2AE35 & WORD
        return h ^ h >> 16

    ratio = round((5**0.5 - 1) / 2 * 2**32) | 1  # odd, so that no two positions are alike
    words = [
        mixed(length + ratio * number & WORD) for number, length in enumerate(lengths, position)
    ]
    return min([0, *lengths]), sum(lengths), sum(words) & WORD


@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=70),
    st.sampled_from([0, 1, 5, WORD - 3, 1 << 40]),
)
def test_like_plain_integers(lengths: list[int], position: int) -> None:
    assert total_lengths(np.array(lengths, np.int32), position) == naive(lengths, position)


def test_in_plain_python() -> None:
    """As with NUMBA_DISABLE_JIT: beyond 32 bits, and with sums that wrap."""
    plain = getattr(total_lengths, "py_func", total_lengths)
    lengths = [5, -7, (1 << 31) - 1]
    with np.errstate(over="ignore"):
        assert plain(np.array(lengths, np.int32), 1 << 40) == naive(lengths, 1 << 40)


@pytest.mark.parametrize(
    "size", [length_totals._CHUNK + more for more in (-1, 0, 1)] + [3 * length_totals._CHUNK + 7]
)
def test_more_lengths_than_stay_in_the_cache(size: int) -> None:
    lengths = np.random.default_rng(size).integers(0, 1 << 31, size).astype(np.int32)
    assert total_lengths(lengths, 3) == naive(lengths.tolist(), 3)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40), st.data())
def test_checksums_of_pieces_add_up(lengths: list[int], data: st.DataObject) -> None:
    array = np.array(lengths, np.int32)
    cut = data.draw(st.integers(0, len(lengths)))
    whole = total_lengths(array, 0)
    pieces = [total_lengths(array[:cut], 0), total_lengths(array[cut:], cut)]
    assert whole[1] == sum(piece[1] for piece in pieces)
    assert whole[2] == sum(piece[2] for piece in pieces) & WORD


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.data())
def test_lengths_that_change_or_change_places_have_another_checksum(
    lengths: list[int], data: st.DataObject
) -> None:
    first, second = (data.draw(st.integers(0, len(lengths) - 1)) for _ in range(2))
    other = lengths.copy()
    if lengths[first] == lengths[second]:
        other[first] += 1
    else:
        other[first], other[second] = other[second], other[first]
    assert (
        total_lengths(np.array(lengths, np.int32), 0)[2]
        != total_lengths(np.array(other, np.int32), 0)[2]
    )

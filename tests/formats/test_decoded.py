"""Decoded blocks in arrays, against lists of single ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from megablend.formats.base import NO_OFFSETS, DecodedBlock
from megablend.formats.decoded import DTYPES, KINDS, DecodedBlocks, addresses_of
from tests.examples import examples

Listed = list[tuple[str, list[int], list[int]]]


def listed(blocks: DecodedBlocks) -> Listed:
    """(type, tokens, offsets) of each; of all, by every way to get at one."""
    assert [block.tokens.tolist() for block in blocks] == [
        blocks[i].tokens.tolist() for i in range(len(blocks))
    ]
    assert [block.tokens.tolist() for block in blocks[::-1]] == [
        block.tokens.tolist() for block in blocks
    ][::-1]
    assert [len(block.tokens) for block in blocks] == blocks.sizes.tolist()
    return [
        (str(block.tokens.dtype), block.tokens.tolist(), block.offsets.tolist()) for block in blocks
    ]


@st.composite
def parts(draw: st.DrawFn) -> tuple[DecodedBlocks, Listed]:
    """Blocks made of single ones, or of buffers in which the tokens begin anywhere."""
    dtype = draw(st.sampled_from([each for each in DTYPES if each.kind in "iu"]))
    tokens = draw(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=4))
    expected = [(str(dtype), each, [0, len(each)]) for each in tokens]
    if draw(st.booleans()):
        blocks = [DecodedBlock(np.array(each, dtype), np.array([0, len(each)])) for each in tokens]
        return DecodedBlocks.of(blocks), expected
    begin = draw(st.integers(0, 9))
    owners = [
        pa.py_buffer(b"?" * begin + np.array(each, dtype).tobytes() + b"?") for each in tokens
    ]
    sizes = np.array([len(each) for each in tokens], np.int64)
    offsets = [np.array([0, len(each)]) for each in tokens]
    kinds = np.full(len(tokens), KINDS[dtype], np.int8)
    return DecodedBlocks(owners, kinds, sizes, addresses_of(owners) + begin, offsets), expected


@examples(150)
@given(st.lists(parts(), max_size=4), st.data())
def test_blocks_joined_and_taken_are_those_of_lists(
    found: list[tuple[DecodedBlocks, Listed]], data: st.DataObject
) -> None:
    whole = DecodedBlocks.joined([part for part, _ in found])
    expected = [each for _, part in found for each in part]
    assert listed(whole) == expected
    places = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=6)) if expected else []
    assert listed(whole.taken(np.array(places, np.int64))) == [expected[i] for i in places]
    assert [offsets for _, _, offsets in listed(whole.without_offsets())] == [
        [0] if not isinstance(owner, DecodedBlock) else each
        for owner, (_, _, each) in zip(whole.owners, expected, strict=True)
    ]


def test_blocks_are_read_only() -> None:
    buffer = pa.allocate_buffer(16)
    blocks = DecodedBlocks(
        [buffer],
        np.array([KINDS[np.dtype("i4")]], np.int8),
        np.array([4]),
        addresses_of([buffer]),
        None,
    )
    assert not blocks[0].tokens.flags.writeable
    assert blocks[0].offsets is NO_OFFSETS


def test_extra_columns_go_along() -> None:
    def block(*numbers: float) -> DecodedBlock:
        extra: npt.NDArray[Any] = np.array(numbers, np.float32)
        return DecodedBlock(np.arange(len(numbers)), NO_OFFSETS, (extra,))

    whole = DecodedBlocks.joined(
        [DecodedBlocks.of([block(1.5), block(2.5, 3.5)]), DecodedBlocks.of([block(4.5)])]
    )
    [column] = whole.taken(np.array([2, 1])).extra
    assert [each.tokens.view(np.float32).tolist() for each in column] == [[4.5], [2.5, 3.5]]

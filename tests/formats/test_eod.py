"""Tokens put after documents, against lists."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.formats.base import (
    ENDS_AT_DOCUMENT_END,
    HAS_EARLIER_TOKENS,
    STARTS_MID_DOCUMENT,
    DecodedBlock,
)
from megablend.formats.eod import with_eod
from tests.examples import examples

PIECES = st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=8)


@examples(200)
@given(PIECES, st.integers(0, 7), st.sampled_from(["uint16", "int32", "int64"]))
def test_each_ended_document_with_tokens_gets_one(
    pieces: list[list[int]], flags: int, dtype: str
) -> None:
    expected = []
    for i, piece in enumerate(pieces):
        carried = i == 0 and flags & STARTS_MID_DOCUMENT and flags & HAS_EARLIER_TOKENS
        ended = i < len(pieces) - 1 or flags & ENDS_AT_DOCUMENT_END
        expected.append([*piece, 0] if ended and (piece or carried) else piece)
    tokens = np.array([token for piece in pieces for token in piece], dtype)
    offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
    found = with_eod(DecodedBlock(tokens, offsets), flags, 0)
    assert found.tokens.dtype == tokens.dtype
    cut = [found.tokens[a:b].tolist() for a, b in pairwise(found.offsets)]
    assert cut == expected


@pytest.mark.parametrize("pieces", [0, 1])
def test_blocks_of_nothing(pieces: int) -> None:
    block = DecodedBlock(np.empty(0, np.int32), np.zeros(pieces + 1, np.int64))
    assert len(with_eod(block, ENDS_AT_DOCUMENT_END, 7).tokens) == 0

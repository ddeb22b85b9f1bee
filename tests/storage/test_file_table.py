"""Tables of files, against lists of texts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megablend.storage import file_table
from megablend.storage.file_table import Texts, TextsBuilder

LETTERS = "ab/?\n\0\x85\u00e9\u20ac\U0001f600\udcff\ud800"


def draw_texts(draw: random.Random) -> list[str]:
    return [
        "".join(draw.choices(draw.choice([LETTERS, "ab/?"]), k=draw.randrange(9)))
        for _ in range(draw.randrange(30))
    ]


@pytest.mark.parametrize("seed", range(30))
def test_any_texts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several columns, some rows of each, in portions that end anywhere."""
    draw = random.Random(seed)
    monkeypatch.setattr(file_table, "_DECODED_ROWS", draw.randrange(1, 30))
    monkeypatch.setattr(file_table, "_MAX_DECODED_BYTES", draw.randrange(100))
    monkeypatch.setattr(file_table, "_SCANNED_BYTES", draw.randrange(1, 30))
    expected: list[str] = []
    builder = TextsBuilder()
    for _ in range(draw.randrange(4)):
        texts = draw_texts(draw)
        rows = draw.sample(range(len(texts)), draw.randint(0, len(texts)))
        builder.extend(Texts.of(texts).take(np.array(rows, np.int64)))
        expected += [texts[row] for row in rows]
        builder.append("a")
        expected.append("a")
    column = builder.build()
    assert column.list_all() == expected
    assert column.list_all(3, 7) == expected[3:7]
    assert [column.get(row) for row in range(len(expected))] == expected
    for text in {*expected, "", "absent"}:
        rows = [row for row, each in enumerate(expected) if each == text]
        assert column.find(text).tolist() == rows
    found = set(
        column.find_rows(
            lambda letters, before: (letters == ord("?")) & (before == ord("/"))
        ).tolist()
    )
    inside = {row for row, text in enumerate(expected) if "/?" in text}
    # The byte before a text may be one of another text
    assert inside <= found <= inside | {row for row, text in enumerate(expected) if text[:1] == "?"}

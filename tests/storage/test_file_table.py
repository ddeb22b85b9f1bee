"""Tables of files, against lists of texts."""

from __future__ import annotations

import random

import pytest

from megablend.storage import file_table
from megablend.storage.file_table import (
    count_bytes,
    drop_bytes,
    find_texts,
    join_tables,
    list_texts,
    make_table,
)

LETTERS = "ab/?\n\0\x85\u00e9\u20ac\U0001f600\udcff\ud800"


def draw_texts(draw: random.Random) -> list[str]:
    return [
        "".join(draw.choices(draw.choice([LETTERS, "ab/?"]), k=draw.randrange(9)))
        for _ in range(draw.randrange(30))
    ]


@pytest.mark.parametrize("seed", range(30))
def test_any_texts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tables, in portions that end anywhere."""
    draw = random.Random(seed)
    monkeypatch.setattr(file_table, "_ROWS", draw.randrange(1, 30))
    parts = [draw_texts(draw) for _ in range(1 + draw.randrange(4))]
    expected = [text for texts in parts for text in texts]
    rows = [[(i, text, text) for i, text in enumerate(texts)] for texts in parts]
    table = join_tables([make_table(each, ("size", "path", "etag")) for each in rows])
    column = table["path"]
    assert table["size"].to_pylist() == [i for texts in parts for i in range(len(texts))]
    assert list_texts(column) == expected
    assert list_texts(column, 3, 7) == expected[3:7]
    encoded = [text.encode("utf-8", "surrogatepass") for text in expected]
    assert count_bytes(column).tolist() == [len(each) for each in encoded]
    assert drop_bytes(column, 2).to_pylist() == [each[2:] for each in encoded]
    found = find_texts(column, r"/\?|[\x00-\x1f]|\xC2[\x80-\x9F]").tolist()
    assert found == [any(each in text for each in ("/?", "\n", "\0", "\x85")) for text in expected]

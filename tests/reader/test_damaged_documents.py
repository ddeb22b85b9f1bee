"""Data without checksums whose documents, but not whose tokens, are other ones than the index counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import megablend
from megablend.errors import CorruptFileError
from tests.formats.writers import write_arrow
from tests.runs import make_config


def test_where_end_of_document_tokens_are_added_documents_must_be_as_many_as_were_indexed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, [[1, 2], [3, 4], [5, 6]])
    source = {"name": "a", "path": str(path), "append_eod": 0}
    config = make_config(tmp_path, [source], samples=1)
    megablend.build(config)
    dataset = megablend.open(config)
    assert dataset[0]["tokens"].tolist() == [1, 2, 0, 3, 4, 0, 5, 6]

    lists, damaged = (
        np.array(offsets, "<i4").tobytes() for offsets in ([0, 2, 4, 6], [0, 0, 4, 6])
    )
    data = path.read_bytes()
    assert data.count(lists) == 1
    path.write_bytes(data.replace(lists, damaged))  # the file stays open
    with pytest.raises(
        CorruptFileError, match=r"a\.arrow.*2 documents with tokens end in this block, but 3"
    ):
        dataset.read_blocks([0])

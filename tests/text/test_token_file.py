"""Token files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megablend.errors import CorruptFileError
from megablend.storage.by_scheme import make_storage
from megablend.text.documents import Document, Place, Portion
from megablend.text.engine import Tokens
from megablend.text.token_file import TokenFileWriter, read_columns


def test_a_damaged_token_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with TokenFileWriter(path, has_keys=False) as writer:
        portion = Portion.gather([Document("x", None, Place(0, 0))], 1, 1)
        writer.write(portion, Tokens(np.arange(3, dtype=np.int32), np.array([3])))
    data = path.read_bytes()
    storage = make_storage()
    assert read_columns(storage, str(path), ["tokens", "key"]).to_pydict() == {
        "tokens": [[0, 1, 2]]
    }
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for start in (4, footer):
        path.write_bytes(data[:start] + b"\xff" * 20 + data[start + 20 :])
        with pytest.raises(CorruptFileError, match=r"a\.parquet: cannot be read .*remove it and"):
            read_columns(storage, str(path), ["tokens"])

"""Sources whose documents are hardly meant are warned of; flat columns: tests/formats/test_flat.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from tests.runs import make_config

WARNING = "each file of 'a' counts as a document, so `split` and `order: document` move whole files"


@pytest.mark.parametrize(
    ("settings", "options", "is_warned"),
    [
        ({"order": "document"}, {}, True),
        ({"split": [1, 1, 0]}, {}, True),
        ({"split": [1, 0, 0]}, {}, False),
        ({}, {}, False),
        ({"order": "document"}, {"eod_token": 0}, False),
        ({"order": "document", "sequence_length": 100}, {}, False),
    ],
)
def test_large_raw_files_that_are_one_document_each(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, int], *, is_warned: bool
) -> None:
    for name in ("x", "y"):
        (np.arange(2000) % 50).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    source = {
        "name": "a",
        "path": str(tmp_path / "*.bin"),
        "weight": 1,
        "format": "raw",
        "format_options": {"dtype": "uint16", **options},
    }
    config = make_config(tmp_path, [source], epochs=1, **settings)
    built = megablend.build(config)
    assert any(WARNING in warning for warning in built.warnings) == is_warned
    described: Any = megablend.describe(config)
    assert any(WARNING in warning for warning in described.warnings) == is_warned

"""Names of release 0.1.0 that have changed since are still there, with a warning."""

from pathlib import Path

import numpy as np
import pytest

import megablend
from tests.runs import documents, make_config, write_source


@pytest.mark.parametrize(("old", "new"), [("Built", "BuildResult"), ("Pages", "BlockBatch")])
def test_renamed_names_are_still_there(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"megablend\.{old} is now called megablend\.{new}"):
        assert getattr(megablend, old) is getattr(megablend, new)


def test_read_pages_reads_blocks(tmp_path: Path) -> None:
    source = write_source(tmp_path, 0, "parquet", documents(0, 20, 20, 1)) | {"weight": 1}
    config = make_config(tmp_path, [source], samples=4)
    megablend.build(config)
    store = megablend.open_index(config["cache"])
    with pytest.warns(DeprecationWarning, match="read_pages is now called read_blocks"):
        found = store.read_pages([0])
    assert np.array_equal(found.tokens, store.read_blocks([0]).tokens)

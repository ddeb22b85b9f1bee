"""Names of release 0.1.0 that have changed since are still there, with a warning."""

from pathlib import Path

import numpy as np
import pytest

import megablend
from megablend.config import load_config
from megablend.errors import ConfigError
from tests.runs import documents, make_config, write_source


@pytest.mark.parametrize(("old", "new"), [("Built", "BuildResult"), ("Pages", "BlockBatch")])
def test_renamed_names_are_still_there(old: str, new: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=rf"megablend\.{old} is now called megablend\.{new}"
    ):
        assert getattr(megablend, old) is getattr(megablend, new)


def test_read_pages_reads_blocks(tmp_path: Path) -> None:
    source = write_source(tmp_path, 0, "parquet", documents(0, 20, 20, 1)) | {"weight": 1}
    config = make_config(tmp_path, [source], samples=4)
    megablend.build(config)
    store = megablend.open_index(config["cache"])
    with pytest.warns(DeprecationWarning, match="read_pages is now called read_blocks"):
        found = store.read_pages([0])
    assert np.array_equal(found.tokens, store.read_blocks([0]).tokens)


def test_stretches_of_a_sample_are_spans(tmp_path: Path) -> None:
    source = write_source(tmp_path, 0, "parquet", documents(0, 20, 20, 1)) | {"weight": 1}
    config = make_config(tmp_path, [source], samples=4)
    megablend.build(config)
    sample = megablend.open(config).sample(0)
    with pytest.warns(DeprecationWarning, match="Sample.stretches is now called spans"):
        assert sample.stretches is sample.spans


def test_the_old_names_of_config_keys_and_orders_are_accepted(tmp_path: Path) -> None:
    source = {"name": "a", "path": "a.parquet"}
    old = {
        "cache": "c",
        "sequence_length": 8,
        "samples": 1,
        "sources": [source],
        "cycle": 5,
        "order": "row",
    }
    with pytest.warns(DeprecationWarning, match="key 'cycle' is now called 'shuffle_window'"):
        config = load_config(old)
    assert (config.shuffle_window, config.order) == (5, "document")
    with pytest.warns(DeprecationWarning, match=r"Config\.cycle is now called"):
        assert config.cycle == 5
    path = tmp_path / "config.yaml"
    path.write_text(
        "cache: c\ncycle: 0\nsequence_length: 8\nsamples: 1\nsources: [{name: a, path: a.parquet}]\n"
    )
    with (
        pytest.warns(DeprecationWarning, match="shuffle_window"),
        pytest.raises(ConfigError, match=r"config.yaml:2: cycle: found 0, expected 1 or more"),
    ):
        load_config(path)
    with pytest.raises(
        ConfigError,
        match="cycle: duplicate key: cycle is the old name of shuffle_window; remove cycle",
    ):
        load_config(old | {"shuffle_window": 5})

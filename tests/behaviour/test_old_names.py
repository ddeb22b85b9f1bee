"""Names of release 0.1.0 that stay for ever: keys and orders of configs. Its names in Python are gone."""

from pathlib import Path

import pytest

import megablend
from megablend.config import load_config
from megablend.errors import ConfigError


@pytest.mark.parametrize("old", ["Built", "Pages"])
def test_names_in_python_are_gone(old: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'megablend' has no attribute '{old}'"):
        getattr(megablend, old)


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
    config = load_config(old)
    assert (config.shuffle_window, config.order) == (5, "document")
    assert load_config(old | {"order": "page"}).order == "block"
    path = tmp_path / "config.yaml"
    path.write_text(
        "cache: c\ncycle: 0\nsequence_length: 8\nsamples: 1\nsources: [{name: a, path: a.parquet}]\n"
    )
    with pytest.raises(ConfigError, match=r"config.yaml:2: cycle: found 0, expected 1 or more"):
        load_config(path)
    with pytest.raises(
        ConfigError,
        match="cycle: unknown key; it is the old name of `shuffle_window`; write that instead",
    ):
        load_config(old | {"shuffle_window": 5})

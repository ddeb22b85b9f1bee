"""Remedies in messages about the plugin's settings, and about files that changed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ChangedFileError, ConfigError
from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset
from tests.megatron.plugin_data import draw_documents, plugin_config, write_word


def test_a_shared_file_system_that_is_neither_yes_nor_no(tmp_path: Path) -> None:
    says = r"shared_fs is 'maybe'; choose one of (\w+), (\w+), (\w+)"
    with pytest.raises(ConfigError, match=says) as caught:
        plugin_config(tmp_path, blend=(["a"], None), split="1", shared_fs="maybe")
    found = re.search(says, str(caught.value))
    assert found
    for word in found.groups():
        assert plugin_config(tmp_path, blend=(["a"], None), split="1", shared_fs=word).shared_fs == word


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("kind", "order", "says"),
    [
        ("parquet", "megatron", "when it was indexed"),
        ("arrow", "megatron", "when it was indexed"),
        ("parquet", "block", "when it was indexed"),
        ("megatron", "block", "when it was indexed"),
        ("megatron", "megatron", "was replaced while it was in use"),
    ],
)
@pytest.mark.usefixtures("distributed")
def test_a_file_that_changed_is_answered_with_what_a_user_of_megatron_can_do(
    tmp_path: Path, kind: str, order: str, says: str, at_once: bool
) -> None:
    """There is no config whose `run:` could be another."""
    word = write_word(tmp_path / "data", kind, draw_documents(1))
    config = plugin_config(tmp_path / "cache", blend=([word], None), split="1", order=order, max_open_files=1)

    def build() -> Any:
        return MegablendDatasetBuilder(MegablendGPTDataset, [60, 0, 0], lambda: True, config).build()[0]

    dataset = build()
    if "in use" in says:
        assert [len(dataset[k]["tokens"]) for k in (0, 1)] == [16, 16]
    shutil.rmtree(tmp_path / "data")
    write_word(tmp_path / "data", kind, draw_documents(2))
    remedy = rf"{says}.*; restore the file, or remove the cache \((.*)\) and restart the job, which builds it anew$"
    numbers = [[k, k + 1] if at_once else [k] for k in range(59)]
    with pytest.raises(ChangedFileError, match=remedy) as caught:
        [dataset.__getitems__(batch) for batch in numbers]
    assert "run:" not in str(caught.value)
    found = re.search(remedy, str(caught.value))
    assert found
    shutil.rmtree(found[1])
    assert len(build().__getitems__([*range(60)])) == 60

"""Remedies in messages about the plugin's settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megablend.errors import ConfigError
from tests.megatron.plugin_data import plugin_config


def test_a_shared_file_system_that_is_neither_yes_nor_no(tmp_path: Path) -> None:
    says = r"shared_fs is 'maybe'; choose one of (\w+), (\w+), (\w+)"
    with pytest.raises(ConfigError, match=says) as caught:
        plugin_config(tmp_path, blend=(["a"], None), split="1", shared_fs="maybe")
    found = re.search(says, str(caught.value))
    assert found
    for word in found.groups():
        assert plugin_config(tmp_path, blend=(["a"], None), split="1", shared_fs=word).shared_fs == word

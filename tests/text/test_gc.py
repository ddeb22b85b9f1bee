"""Token files that no index needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megablend.errors import ConfigError
from megablend.operations.build import build
from megablend.operations.gc import gc
from megablend.operations.session import Session
from megablend.reader.dataset import Dataset
from tests.cli.commands import run
from tests.text.test_build import make_config, token_files, write_text

pytestmark = pytest.mark.usefixtures("small_parts")


def test_only_what_no_index_needs_is_removed(tmp_path: Path) -> None:
    write_text(tmp_path / "data", num=60)
    config = make_config(tmp_path)
    build(config)
    tokens = tmp_path / "cache/tokens"
    needed = token_files(tokens)
    name = next(iter(needed))
    other = name.replace("-", "-" + "0" * 24 + ".", 1).split(".parquet")[0][: name.rindex("-") + 25]
    shutil.copy(tokens / name, tokens / f"{other}.parquet")
    (tokens / "notes.txt").write_text("not ours")
    assert gc(config, tokens=True).token_files == ()  # too young
    listed = gc(config, tokens=True, older_than_days=0, dry_run=True)
    assert listed.token_files == (f"{tokens}/{other}.parquet",)
    assert listed.bytes >= (tokens / name).stat().st_size
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    said = run("gc", path, "--tokens", "--older-than", 0)
    assert f"removed: tokens {tokens}/{other}.parquet" in said.stdout
    assert token_files(tokens) == needed
    assert (tokens / "notes.txt").exists()
    assert Dataset(Session(config).open()).sample(3).tokens.any()
    with pytest.raises(ConfigError, match="found only with a config that has a text"):
        gc(config["cache"], tokens=True)

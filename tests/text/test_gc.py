"""Token files that no index needs."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import megablend.operations.gc
from megablend.caches.local import LocalCacheStore
from megablend.errors import CacheError, ConfigError
from megablend.index.verify.gc import Collected, collect
from megablend.operations.build import build
from megablend.operations.gc import gc
from megablend.operations.session import Session
from megablend.operations.verify import verify
from megablend.reader.dataset import Dataset
from megablend.text.token_folder import TokenFolder
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


def test_what_a_build_commits_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data", num=60)
    config = make_config(tmp_path)
    build(config)
    write_text(tmp_path / "more/data", num=40)
    other = make_config(tmp_path, text="text", run="other")
    other["sources"][0]["path"] = f"{tmp_path}/more/data/*"

    def collect_and_build(*args: Any, **options: Any) -> Collected:
        collected = collect(*args, **options)
        monkeypatch.setattr(megablend.operations.gc, "collect", collect)
        build(other)
        return collected

    monkeypatch.setattr(megablend.operations.gc, "collect", collect_and_build)
    monkeypatch.setattr(time, "time", lambda: 1e10)  # all tokens are old
    assert gc(config, tokens=True, older_than_days=0).token_files == ()
    assert verify(config["cache"], data=True).problems == ()


def test_a_build_whose_tokens_are_removed_meanwhile_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data", num=60)
    config = make_config(tmp_path)
    build(config)
    tokens = tmp_path / "cache/tokens"
    path = tokens / next(iter(token_files(tokens)))
    shutil.rmtree(tmp_path / "cache/generations")  # no index names the tokens
    hold = LocalCacheStore.hold

    def hold_after_removal(store: LocalCacheStore, **options: Any) -> Any:
        monkeypatch.setattr(LocalCacheStore, "hold", hold)
        path.unlink()
        return hold(store, **options)

    monkeypatch.setattr(LocalCacheStore, "hold", hold_after_removal)
    says = rf"^{re.escape(str(path))}: another command \(.*\) removed this token file before .* build again$"
    with pytest.raises(CacheError, match=says):
        build(config | {"run": "other"})
    build(config | {"run": "other"})
    assert verify(config["cache"], data=True).problems == ()


def test_a_build_of_nothing_new_lists_its_tokens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data", num=60)
    config = make_config(tmp_path)
    build(config)
    listed = []
    list_files = TokenFolder.list_files

    def noted(folder: TokenFolder, *names: str) -> Any:
        listed.append(names)
        return list_files(folder, *names)

    monkeypatch.setattr(TokenFolder, "list_files", noted)
    build(config)
    assert len(listed) == 1

"""What is told before text is tokenised."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megablend.errors import CacheError
from megablend.operations.build import build
from megablend.operations.dry_run import dry_run
from megablend.operations.session import Session
from megablend.operations.source_specs import list_specs
from megablend.storage.by_scheme import make_storage
from megablend.text import tokenise
from megablend.text.estimate import Estimate, check_space, estimate_pending
from megablend.text.source import find_text
from megablend.text.token_folder import TokenFolder
from tests.text.test_build import make_config, write_text
from tests.text.test_lines import write


def estimate_all(config: dict[str, Any]) -> Estimate:
    loaded = Session(config).config
    (spec,) = list_specs(loaded)
    _, found, _ = estimate_pending(loaded, spec, make_storage(), processes=1)
    return found


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_dry_run_tells_what_a_build_makes_and_changes_nothing(
    suffix: str, tmp_path: Path
) -> None:
    write_text(tmp_path / "data", num_files=3, suffix=suffix)
    config = make_config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (told,) = dry_run(config)
    assert told.tokenising is not None
    assert told.tokenising.startswith("3 text files, about ")
    assert sorted(tmp_path.rglob("*")) == before
    expected = estimate_all(config)
    assert expected.files == 3
    build(config)
    loaded = Session(config).config
    (spec,) = list_specs(loaded)
    found = find_text(loaded, spec, make_storage())
    parts = [part for entry in found.entries.values() for part in entry.parts]
    assert sum(part.tokens for part in parts) == pytest.approx(expected.tokens, rel=0.1)
    sizes = [path.stat().st_size for path in (tmp_path / "cache/tokens").rglob("*.parquet")]
    # Of each file's beginning a token file is made, with a footer of its own
    assert 0.3 * expected.disk_bytes < sum(sizes) < 3 * expected.disk_bytes
    again = estimate_all(config)
    assert (again.files, again.tokens, again.disk_bytes) == (0, 0, 0)


def test_of_a_sample_of_a_few_bytes_no_more_is_expected_than_there_can_be(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "x" * 5_000_000 + '"}\n')
    size = path.stat().st_size
    expected = estimate_all(make_config(tmp_path, on_bad_document="skip", max_document=1000))
    assert expected.bytes == size
    assert expected.tokens <= size
    assert expected.disk_bytes <= 4 * size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_text_is_as_long_as_its_beginning_says(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "data").mkdir()
    config = make_config(tmp_path)
    random = "".join(Random(5).choices("0123456789abcdef", k=100_000))
    for text in (random, "a" * 1_000_000):
        data = json.dumps({"text": text}).encode()
        path = write(tmp_path / f"data/a.jsonl{suffix}", data)
        expected = estimate_all(config)
        assert len(data) <= expected.bytes < 1.1 * len(data)
        path.unlink()


def test_compressed_text_counts_even_if_the_sample_has_none(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = json.dumps({"text": "a" * 1000}).encode()
    for i in range(17):
        write(tmp_path / f"data/{i:02d}.jsonl", data)
    text = "".join(Random(5).choices("0123456789abcdef", k=100_000))
    path = write(tmp_path / "data/17.jsonl.gz", json.dumps({"text": text}).encode())
    assert estimate_all(make_config(tmp_path)).bytes >= 17 * len(data) + path.stat().st_size


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    monkeypatch.setattr(TokenFolder, "count_free_bytes", lambda _: 1000)
    monkeypatch.setattr(tokenise, "_ESTIMATED_BYTES", 0)
    with pytest.raises(
        CacheError, match=r"has 0.0 GB of free space, .* set `token_files` to a folder"
    ):
        build(config)
    assert not list((tmp_path / "cache").rglob("*.parquet"))


def test_a_bucket_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "data")
    loaded = Session(make_config(tmp_path)).config
    (spec,) = list_specs(loaded)
    setup = find_text(loaded, spec, make_storage()).setup
    monkeypatch.setattr(TokenFolder, "count_free_bytes", lambda _: None)
    check_space(setup, 1 << 60)

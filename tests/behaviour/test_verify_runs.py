"""A cache is verified with the runs that stand upon it."""

import shutil
from pathlib import Path

import pytest

import megablend
from tests.runs import documents, make_config, write_source


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    source = write_source(tmp_path, 0, "parquet", documents(0, 20, 30, 1))
    megablend.build(make_config(tmp_path, [source], samples=20, run="demo"))
    return tmp_path / "cache"


def test_a_cache_with_its_runs_is_sound(cache: Path) -> None:
    assert (
        megablend.verify(cache).problems == megablend.verify(str(cache), data=True).problems == ()
    )


def test_a_ledger_that_was_edited(cache: Path) -> None:
    ledger = cache / "runs" / "demo.json"
    ledger.write_text(ledger.read_text().replace("20", "21"))
    (problem,) = megablend.verify(cache).problems
    assert problem.startswith(f"{ledger}: the ledger does not match its checksum")


def test_a_run_whose_index_is_gone(cache: Path) -> None:
    shutil.rmtree(next((cache / "generations").iterdir()))
    (problem,) = megablend.verify(cache).problems
    assert problem.startswith(f"{cache}: run 'demo' uses index ")


def test_a_cache_without_an_index(cache: Path) -> None:
    """As a first build leaves that failed; `OK` alone would be read as ready to train from."""
    shutil.rmtree(cache / "runs")
    shutil.rmtree(next((cache / "generations").iterdir()))
    found = megablend.verify(cache)
    assert found.problems == ()
    assert found.notes == (f"{cache}: holds no index yet; run `megablend build CONFIG`",)

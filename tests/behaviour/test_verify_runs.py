"""A cache is verified with the runs that stand upon it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.base import CacheStore, Entry
from megablend.caches.local import LocalCacheStore
from megablend.index.verify import verify
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import run_names
from megablend.run.skips import Skips, load_skips
from megablend.system.atomic_write import list_committed
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


@pytest.mark.parametrize("place", ["find_damaged_files", "list_data_problems"])
def test_an_index_that_is_removed_meanwhile_is_no_problem(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    other = write_source(tmp_path, 1, "parquet", documents(1, 20, 30, 1))
    megablend.build(make_config(tmp_path, [other], samples=20, run="other"))
    megablend.remove_run(str(cache), "demo")
    called = getattr(verify, place)

    def collect_before(*args: Any) -> Any:
        removed.extend(megablend.gc(cache, older_than_days=0).removed)
        return called(*args)

    removed = list[str]()
    monkeypatch.setattr(verify, place, collect_before)
    assert megablend.verify(cache, data=True).problems == ()
    assert len(removed) == 1


def test_a_run_that_is_built_meanwhile_is_no_problem(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_source(tmp_path, 1, "parquet", documents(1, 20, 30, 1))

    def build_before(store: CacheStore) -> list[str]:
        megablend.build(make_config(tmp_path, [other], samples=20, run="other"))
        return run_names(store)

    monkeypatch.setattr("megablend.operations.verify.run_names", build_before)
    assert megablend.verify(cache).problems == ()


def test_what_is_removed_while_it_is_listed_is_no_problem(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_before(folder: Path) -> list[str]:
        return sorted([*list_committed(folder), "f" * 32])

    monkeypatch.setattr("megablend.caches.local.list_committed", list_before)
    assert len(megablend.gc(cache, dry_run=True).kept) == 1


def test_a_store_is_not_asked_anew_for_each_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether an index is still there is asked once an index."""
    source = write_source(tmp_path, 0, "parquet", documents(0, 20, 30, 1))
    megablend.build(make_config(tmp_path, [source], samples=20, run="demo"))
    files = list(tmp_path.glob("**/*.parquet"))
    for file in files:
        file.unlink()
    list_entries = LocalCacheStore.list_entries
    listed = []

    def list_and_count(store: LocalCacheStore, kind: str) -> list[Entry]:
        listed.append(kind)
        return list_entries(store, kind)

    monkeypatch.setattr(LocalCacheStore, "list_entries", list_and_count)
    assert len(megablend.verify(tmp_path / "cache", data=True).problems) == len(files) > 1
    assert listed.count("generations") == 3  # to verify them, by age, and for their files


def test_a_run_that_is_removed_meanwhile_is_no_problem(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megablend.skip(str(cache), 0, 4, batch_size=1, run="demo")

    def remove_before(store: CacheStore, ledger: Ledger) -> Skips:
        megablend.remove_run(str(cache), "demo")
        return load_skips(store, ledger)

    monkeypatch.setattr("megablend.operations.verify.load_skips", remove_before)
    assert megablend.verify(cache).problems == ()

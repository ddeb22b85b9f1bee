"""Sample indices that ranks make together. Ranks are threads here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megablend.distributed.base import SingleProcess
from megablend.errors import CacheError, PlanError
from megablend.megatron.cache_builder import build_artefact as build
from megablend.megatron.cache_builder import parts, schedule, worker
from megablend.megatron.cache_builder import schedule as needs
from megablend.megatron.cache_builder.build_cache import prepare_cache
from megablend.megatron.cache_builder.commit import ArtefactWriter
from megablend.megatron.request.request import GREEDY, Blend, CacheRequest
from tests.megatron.meeting import on_ranks
from tests.pairs import contents, write_pair
from tests.storages import STORAGE


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large enough, and in many pieces."""
    monkeypatch.setattr(schedule, "DIVIDED_NS", 0)
    for what in ("artefact", GREEDY):
        monkeypatch.setitem(needs._NS, what, 1.0)
    monkeypatch.setattr(parts.Parts, "block", 70)
    monkeypatch.setattr(parts.Parts, "max_rows", 50)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The job and the part of each that is written, in the order in which they are."""
    write = parts.Parts._write
    found = list[tuple[int, int]]()

    def noted(self: parts.Parts, number: int) -> None:
        write(self, number)
        found.append((number, self._part))

    monkeypatch.setattr(parts.Parts, "_write", noted)
    return found


def request_for(folder: Path, cache: str, lengths: list[Any], **options: Any) -> CacheRequest:
    prefixes = [write_pair(folder / "data" / f"{i}", each) for i, each in enumerate(lengths)]
    common: dict[str, Any] = {
        "path_to_cache": str(folder / cache),
        "random_seed": 5,
        "sequence_length": 16,
        "tokenizer": {"class": "T"},
        "sizes": (4000, 200, 0),
        "blend": Blend(
            prefixes=tuple(prefixes), weights=tuple(map(float, range(1, len(prefixes) + 1)))
        ),
        "split": "9,1,0",
    }
    return CacheRequest(**{**common, **options})


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("extra", [False, True])
def test_ranks_write_the_bytes_of_one(
    num_ranks: int, extra: bool, tmp_path: Path, divided: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(0, 40, 3000), rng.integers(0, 900, 300), [3000, 0, 2, 1] * 9]
    options: dict[str, Any] = {
        "add_extra_token_to_sequence": extra,
        "mid_level_dataset_surplus": 0.1,
    }
    prepare_cache(
        request_for(tmp_path, "alone", lengths, **options), launch=SingleProcess(), storage=STORAGE
    )
    assert not divided
    request = request_for(tmp_path, "shared", lengths, **options)
    reports = on_ranks(
        num_ranks, lambda launch: prepare_cache(request, launch=launch, storage=STORAGE)
    )
    assert all(len(report.missing) == 8 for report in reports)
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    assert {part for _, part in divided} == set(range(num_ranks))
    assert len(divided) == len(set(divided)) == num_ranks * len({job for job, _ in divided})
    work = tmp_path / "shared" / ".megablend"
    assert not [path for path in work.iterdir() if path.name.startswith(".tmp")]


@pytest.mark.parametrize("size", [None, 60])
def test_kept_tails(size: int | None, tmp_path: Path, divided: list[tuple[int, int]]) -> None:
    lengths = [[5, 9, 1, 30, 2, 17, 8, 3]]
    options: dict[str, Any] = {
        "sizes": (None, size, None),
        "blend": None,
        "split": None,
        "drop_last_partial_validation_sequence": False,
    }
    blends = (None, Blend(prefixes=(str(tmp_path / "data" / "0"),)), None)
    alone = request_for(tmp_path, "alone", lengths, **options, blend_per_split=blends)
    prepare_cache(alone, launch=SingleProcess(), storage=STORAGE)
    shared = request_for(tmp_path, "shared", lengths, **options, blend_per_split=blends)
    on_ranks(4, lambda launch: prepare_cache(shared, launch=launch, storage=STORAGE))
    assert len(divided) == 4
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


def test_a_part_that_fails_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = parts.Parts._count

    def fail(self: parts.Parts, number: int) -> None:
        if self._part == 1:
            raise PlanError("no such run")
        count(self, number)

    monkeypatch.setattr(parts.Parts, "_count", fail)
    request = request_for(tmp_path, "cache", [[20] * 4000])
    for error in on_ranks(3, lambda launch: prepare_cache(request, launch=launch, storage=STORAGE)):
        assert isinstance(error, PlanError)
        assert str(error) == "no such run"
    assert not list((tmp_path / "cache").glob("*-GPTDataset-train-*"))
    assert not list((tmp_path / "cache" / ".megablend").glob(".tmp*"))
    monkeypatch.setattr(parts.Parts, "_count", count)
    prepare_cache(
        request_for(tmp_path, "alone", [[20] * 4000]), launch=SingleProcess(), storage=STORAGE
    )
    assert all(
        report.missing
        for report in on_ranks(
            3, lambda launch: prepare_cache(request, launch=launch, storage=STORAGE)
        )
    )
    assert contents(tmp_path / "cache") == contents(tmp_path / "alone")


def test_what_another_build_has_done_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divided: list[tuple[int, int]]
) -> None:
    """It lies there whole once the lock is held, as looking at the cache again finds."""
    from megablend.megatron.cache_builder import build_cache as module

    request = request_for(tmp_path, "cache", [[20] * 4000])
    opened = module._open_cache

    def late(*arguments: Any) -> list[str] | None:
        if arguments[5].rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(module, "_open_cache", opened)
                prepare_cache(request, launch=SingleProcess(), storage=STORAGE)
        return opened(*arguments)

    monkeypatch.setattr(module, "_open_cache", late)
    reports = on_ranks(2, lambda launch: prepare_cache(request, launch=launch, storage=STORAGE))
    assert not any(report.missing for report in reports)
    assert not divided


def test_an_error_ends_builds_of_other_ranks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank fails as the others have begun on work without end."""

    def endless(*args: Any, **options: Any) -> Any:
        while True:
            yield np.zeros((1, 2), np.int32)

    def failing(*args: Any, **options: Any) -> None:
        raise CacheError("full")

    monkeypatch.setattr(schedule, "DIVIDED_NS", 1e18)
    # So that none waits for work without end
    monkeypatch.setattr(schedule.Assignment, "workers", 4)
    monkeypatch.setattr(worker, "is_small", lambda job: False)
    monkeypatch.setattr(build, "sample_rows", endless)
    monkeypatch.setattr(ArtefactWriter, "_commit", failing)  # of the blend
    request = request_for(tmp_path, "cache", [[20] * 400, [20] * 400])
    for error in on_ranks(2, lambda launch: prepare_cache(request, launch=launch, storage=STORAGE)):
        assert isinstance(error, CacheError)
        assert str(error) == "full"

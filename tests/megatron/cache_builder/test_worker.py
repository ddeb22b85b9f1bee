"""Ranks that build their shares. They are threads here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megablend.distributed.base import SingleProcess
from megablend.errors import CacheError
from megablend.megatron.cache_builder import build_artefact as build
from megablend.megatron.cache_builder import schedule
from megablend.megatron.cache_builder.build_cache import prepare_cache
from megablend.megatron.cache_builder.commit import ArtefactWriter
from megablend.megatron.request.request import Blend, CacheRequest
from tests.megatron.meeting import on_ranks
from tests.pairs import contents, write_pair
from tests.storages import STORAGE


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
def test_ranks_write_the_bytes_of_one(num_ranks: int, extra: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(0, 40, 3000), rng.integers(0, 900, 300), [3000, 0, 2, 1] * 9]
    options: dict[str, Any] = {
        "add_extra_token_to_sequence": extra,
        "mid_level_dataset_surplus": 0.1,
    }
    prepare_cache(
        request_for(tmp_path, "alone", lengths, **options), launch=SingleProcess(), storage=STORAGE
    )
    request = request_for(tmp_path, "shared", lengths, **options)
    reports = on_ranks(
        num_ranks, lambda launch: prepare_cache(request, launch=launch, storage=STORAGE)
    )
    assert all(len(report.missing) == 8 for report in reports)
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    work = tmp_path / "shared" / ".megablend"
    assert not [path for path in work.iterdir() if path.name.startswith(".tmp")]


def test_what_another_build_has_done_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_an_error_ends_builds_of_other_ranks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank fails as the others have begun on work without end."""

    def endless(*args: Any, **options: Any) -> Any:
        while True:
            yield np.zeros((1, 2), np.int32)

    def failing(*args: Any, **options: Any) -> None:
        raise CacheError("full")

    # So that none waits for work without end
    monkeypatch.setattr(schedule.Assignment, "workers", 4)
    monkeypatch.setattr(build, "sample_rows", endless)
    monkeypatch.setattr(ArtefactWriter, "_commit", failing)  # of the blend
    request = request_for(tmp_path, "cache", [[20] * 400, [20] * 400])
    for error in on_ranks(2, lambda launch: prepare_cache(request, launch=launch, storage=STORAGE)):
        assert isinstance(error, CacheError)
        assert str(error) == "full"

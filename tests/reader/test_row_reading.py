"""Runs in row order: single documents out of their blocks, for any ranks, after any restart, within memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import megablend
from megablend.errors import CacheError, ConfigError, PlanError
from tests.runs import EOD, documents, make_config, write_source

KINDS = ["parquet-v2-unindexed", "arrow", "megatron"]


def make(folder: Path, **settings: Any) -> dict[str, Any]:
    sources = [
        write_source(folder, d, kind, documents(d, 60, 90, seed=4)) for d, kind in enumerate(KINDS)
    ]
    for source, weight in zip(sources, (5, 3, 2), strict=True):
        source |= {"weight": weight, "append_eod": EOD}
    config = make_config(folder, sources, **({"samples": 240, "order": "row"} | settings))
    megablend.build(config)
    return config


def batches(
    config: dict[str, Any], ranks: int = 1, state: Any = None, **options: Any
) -> list[torch.Tensor]:
    """All of a run's tokens, by step."""
    loaders = [
        megablend.Loader(
            megablend.open(config, state=state),
            micro_batch_size=12 // ranks,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            **options,
        )
        for rank in range(ranks)
    ]
    return [torch.cat([batch["tokens"] for batch in parts]) for parts in zip(*loaders, strict=True)]


def test_documents_come_whole_in_an_order_of_their_own(tmp_path: Path) -> None:
    config = make(tmp_path, samples=800)
    dataset = megablend.open(config)
    found = {
        dataset.sample(k).ordinal: dataset.sample(k)
        for k in range(len(dataset))
        if dataset.sample(k).source == 1
    }
    laid = [token for ordinal in sorted(found) for token in found[ordinal].tokens[:-1].tolist()]
    whole = [document for document in documents(1, 60, 90, seed=4) if document]
    first = laid[: sum(len(document) + 1 for document in whole)]
    assert len(first) == sum(len(document) + 1 for document in whole)
    parts = [part for part in " ".join(map(str, first)).split(f" {EOD} ") if part]
    read = [[int(token) for token in part.removesuffix(f" {EOD}").split()] for part in parts]
    assert sorted(read) == sorted(whole)
    assert read != whole
    starts = [document[0] for document in read]
    assert sum(abs(a - b) < 200 for a, b in pairwise(starts)) < len(starts) // 2


def test_any_ranks_and_any_restart_give_the_same_batches(tmp_path: Path) -> None:
    config = make(tmp_path)
    whole = batches(config)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=12)
    for _, _batch in zip(range(7), loader, strict=False):
        pass
    for ranks, workers in ((1, 0), (2, 0), (3, 0)):
        rest = batches(config, ranks, loader.state_dict(), num_workers=workers)
        assert all(torch.equal(a, b) for a, b in zip(rest, whole[7:], strict=True))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_give_the_same_batches(tmp_path: Path) -> None:
    config = make(tmp_path)
    found = batches(config, num_workers=2)
    assert all(torch.equal(a, b) for a, b in zip(found, batches(config), strict=True))


def test_masks_at_documents_see_those_of_the_order(tmp_path: Path) -> None:
    config = make(tmp_path, inter_document_masking=True)
    dataset = megablend.open(config)
    for k in range(0, 240, 7):
        sample = dataset.sample(k)
        ends = (sample.tokens[:-1] == EOD).nonzero()[0] + 1
        assert set(sample.starts.tolist()) == {0, *ends.tolist()}
        assert dataset[k]["max_seqlen"] >= 1


def test_little_memory_is_enough_and_less_than_a_step_is_refused(tmp_path: Path) -> None:
    config = make(tmp_path)
    expected = batches(config)
    assert all(
        torch.equal(a, b)
        for a, b in zip(batches(config | {"memory": 120_000}), expected, strict=True)
    )
    with pytest.raises(ConfigError, match=r"memory: found .*blocks of a step of 12 samples: "):
        batches(config | {"memory": 6_000})


def test_describe_tells_what_it_costs_and_what_its_tables_take(tmp_path: Path) -> None:
    config = make(tmp_path, lanes=12)
    row = megablend.describe(config, micro_batch_size=12)
    assert row.to_dict()["order"] == "document"
    assert all(
        source["document_table_bytes"] > 4 * source["rows"]
        for source in row.to_dict()["index"]["sources"]
    )
    page = config | {"order": "page", "run": "page"}
    assert megablend.build(page).documents is None
    assert (
        row.to_dict()["read_amplification"]
        > 1.5 * megablend.describe(page, micro_batch_size=12).to_dict()["read_amplification"]
    )


def test_a_run_is_not_opened_in_another_order_than_it_was_built_in(tmp_path: Path) -> None:
    config = make(tmp_path)
    with pytest.raises(PlanError, match="order"):
        megablend.build(config | {"order": "page"})


def test_a_table_that_is_gone_is_made_again_by_a_build(tmp_path: Path) -> None:
    config = make(tmp_path)
    expected = batches(config)
    for folder in (tmp_path / "cache" / "documents").iterdir():
        (folder / "manifest.json").unlink()
    with pytest.raises(CacheError, match="has no document table; rebuild the index"):
        batches(config)
    built = megablend.build(config)
    assert built.documents is not None
    assert (built.documents.documents, built.documents.counted) == (180, 0)
    assert all(torch.equal(a, b) for a, b in zip(batches(config), expected, strict=True))


def test_a_run_that_keeps_its_index_keeps_its_tables(tmp_path: Path) -> None:
    config = make(tmp_path)
    expected = batches(config)
    (tmp_path / "source0" / "2.parquet").write_bytes(
        (tmp_path / "source0" / "0.parquet").read_bytes()
    )
    built = megablend.build(config)
    assert built.pinned
    assert all(torch.equal(a, b) for a, b in zip(batches(config), expected, strict=True))
    renewed = megablend.build(config | {"run": "renewed"})
    assert renewed.documents is not None
    # The same bytes were counted before
    assert (renewed.documents.documents, renewed.documents.counted) == (210, 0)


def test_a_validation_pass_needs_no_table(tmp_path: Path) -> None:
    config = make(tmp_path, split="90,10,0")
    assert len(megablend.open(config, "valid")) > 0
    sources = {"train": config["sources"][:2], "valid": config["sources"][2:]}
    listed = {name: value for name, value in config.items() if name not in ("split", "sources")} | {
        "sources": sources,
        "run": "l",
    }
    built = megablend.build(listed)
    assert built.documents is not None
    assert built.documents.documents == 120
    assert len(megablend.open(listed, "valid")) > 0

"""Page and row order: megablend's own plan, returned as GPTDataset's dict. No arrays are built;
each sample is computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megablend.config import Config, load_config
from megablend.distributed.base import Communicator
from megablend.errors import ConfigError, DataError
from megablend.formats.base import Array
from megablend.megatron.cache_builder.document_tables import INDEX_FOLDER
from megablend.megatron.compat import query_result, setting
from megablend.megatron.core import Split
from megablend.megatron.plugin.config import MegablendDatasetConfig
from megablend.megatron.plugin.dataset import MegablendGPTDataset, cache_of, make_dataset_storage
from megablend.megatron.request.address import PAIR, parse_address
from megablend.operations.build import build
from megablend.operations.runs import open_run
from megablend.prefetch.samples import Sample
from megablend.reader import Dataset
from megablend.run.ledger_file import load_ledger
from megablend.run.skips import load_skips
from megablend.storage.location import make_absolute

Blend = tuple[Sequence[str], Sequence[float] | None]


class PageOrderDataset(MegablendGPTDataset):
    """A split of a run as a GPTDataset: its masks, labels and padding are the installed
    GPTDataset's own.

    Index i is the i-th sample that is trained on: Megatron counts by itself, so ranges that the run
    skips are left out here.
    """

    def __init__(self, run: Dataset, split: Split, config: MegablendDatasetConfig) -> None:
        super().__init__(
            run, None, np.zeros(0, np.int32), run.skips.count_trained(len(run)), split, config
        )
        self._batch: dict[int, Sample] = {}
        """Samples that were read together and are being asked for, by their index."""

    def __len__(self) -> int:
        run: Dataset = self.dataset
        return run.skips.count_trained(len(run))

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """GPTDataset's dict, with `dataset_id` if several sources are blended."""
        found: dict[str, Any] = super().__getitem__(idx)
        if len(self.dataset.run.sources) == 1:
            return found
        return {"dataset_id": self.dataset.run.plan.locate(self._sample(idx or 0))[0], **found}

    def __getitems__(self, indices: Sequence[int | None]) -> list[dict[str, Any]]:
        """The dicts of several samples, whose blocks are read together.
        Raises as `__getitem__` does."""
        wanted = [int(idx) for idx in indices if idx is not None]
        with suppress(DataError, IndexError):  # one by one, the sample that it is of is named
            self._batch = dict(
                zip(
                    wanted, self.dataset.samples([self._sample(idx) for idx in wanted]), strict=True
                )
            )
        try:
            return [self[idx] for idx in indices]
        finally:
            self._batch = {}

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        """Tokens of a sample. Documents have no numbers in this order."""
        sample = self._batch.get(int(idx)) or self.dataset.sample(self._sample(idx))
        lengths: Array = np.diff(sample.starts, append=len(sample.tokens))
        return query_result(self.config, sample.tokens, np.zeros(0, np.int64), lengths.tolist())

    def _sample(self, idx: int) -> int:
        """The number of the idx-th sample that is not skipped."""
        run: Dataset = self.dataset
        return run.skips.position(int(idx))

    def _build_document_sample_shuffle_indices(self) -> tuple[None, None, None]:
        return None, None, None


def build_pages(
    config: MegablendDatasetConfig, sizes: Sequence[int | None], launch: Communicator
) -> None:
    """Index the data and commit the run's order. Called by all ranks of the launch. Raises: as
    megablend.build does."""
    build(run_config(config, sizes), launch=launch, storage=make_dataset_storage(config))


def open_pages(
    config: MegablendDatasetConfig, sizes: Sequence[int | None]
) -> list[PageOrderDataset | None]:
    """The splits that have data. Raises: CacheError if the run was not built, or is to be
    lengthened; PlanError."""
    checked = run_config(config, sizes)
    storage = make_dataset_storage(config)
    found: list[PageOrderDataset | None] = []
    for split, name in enumerate(("train", "valid", "test")):
        listed = name in checked.sources if checked.listed_by_split else checked.shares[split] > 0
        if sizes[split] == 0 or not listed:
            found.append(None)
        else:
            run = open_run(checked, name, storage=storage)
            skips = load_skips(checked.cache_store, run.ledger) if name == "train" else None
            found.append(PageOrderDataset(Dataset(run, skips=skips), Split(split), config))
    return found


def run_config(config: MegablendDatasetConfig, sizes: Sequence[int | None]) -> Config:
    """The equivalent config of `megablend build`.

    Raises: ConfigError for what these orders do not have.
    """
    if setting(config, "multiple_validation_sets"):
        raise ConfigError(
            f"order: {config.order} supports a single validation set; leave out "
            "multiple_validation_sets, or choose order: megatron"
        )
    if not config.drop_last_partial_validation_sequence:
        raise ConfigError(
            f"order: {config.order} makes no partial sequences; leave "
            "drop_last_partial_validation_sequence at True, or choose order: megatron"
        )
    blends: list[Blend | None] = list(config.blend_per_split or [config.blend, None, None])
    sources = {
        name: [_source(number, word, blend[1]) for number, word in enumerate(blend[0])]
        for name, blend in zip(("train", "valid", "test"), blends, strict=True)
        if blend is not None
    }
    cache = str(Path(cache_of(config)) / INDEX_FOLDER)
    asked: dict[str, Any] = {
        "cache": cache,
        "run": config.run,
        "sequence_length": config.sequence_length,
        "seed": config.random_seed,
        "order": config.order,
        "samples": _with_skips(cache, config.run, sizes[0]) if sizes[0] else None,
        "valid_samples": sizes[1] or None,
        "test_samples": sizes[2] or None,
        "split": config.split,
        "lanes": config.lanes,
        "shuffle_window": config.shuffle_window,
        "memory": config.memory,
        "sources": sources,
        "storage": config.storage,
        "add_extra_token_to_sequence": bool(config.add_extra_token_to_sequence),
    }
    return load_config({name: value for name, value in asked.items() if value is not None})


def _with_skips(cache: str, run: str, samples: int) -> int:
    """How long the run has to be for Megatron to train on `samples` samples:
    longer by those that it skips.

    Raises: CacheError if the ledger or the list of skipped samples is damaged.
    """
    ledger = load_ledger(cache, run)
    return samples if ledger is None else load_skips(cache, ledger).position(samples - 1) + 1


def _source(number: int, word: str, weights: Sequence[float] | None) -> dict[str, Any]:
    """A source by its place in the blend, so that data may move; without weights, its tokens
    count."""
    address = parse_address(word)
    path = (
        make_absolute(address.pattern, str(Path.cwd()))
        if address.format == PAIR
        else address.pattern
    )
    share = {"epochs": 1} if weights is None else {"weight": str(weights[number])}
    return {
        "name": f"{number}",
        "path": path,
        "column": address.column,
        "append_eod": address.append_eod,
        **share,
    }

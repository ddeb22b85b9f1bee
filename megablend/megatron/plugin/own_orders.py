"""Datasets in megablend's own orders, whose samples are the same kind of dicts as GPTDataset's. No
index arrays are built: megablend's plan computes where the tokens of a sample are."""

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
from megablend.index.read.document_table import open_table
from megablend.megatron.cache_builder.document_tables import INDEX_FOLDER
from megablend.megatron.compat import query_result, setting
from megablend.megatron.core import Split
from megablend.megatron.plugin.config import MegablendDatasetConfig, cache_of
from megablend.megatron.plugin.dataset import MegablendGPTDataset, make_dataset_storage
from megablend.megatron.request.address import PAIR, parse_address
from megablend.operations.build import build
from megablend.operations.runs import open_run
from megablend.operations.session import Session
from megablend.prefetch.samples import Sample
from megablend.reader import Dataset
from megablend.run.skips import load_skips, skips_of
from megablend.storage.location import make_absolute

Blend = tuple[Sequence[str], Sequence[float] | None]


class OwnOrderDataset(MegablendGPTDataset):
    """A GPTDataset of the samples of one split. Masks, labels and padding are made by the installed
    GPTDataset.

    Index i is the i-th sample that is trained on. Samples that the run skips have no index, because
    Megatron itself counts the samples it has consumed.
    """

    def __init__(self, run: Dataset, split: Split, config: MegablendDatasetConfig) -> None:
        super().__init__(
            run, None, np.zeros(0, np.int32), run.skips.count_trained(len(run)), split, config
        )
        self._batch: dict[int, Sample] = {}
        """The samples that `__getitems__` has read together and is about to return, by index."""

    def __len__(self) -> int:
        run: Dataset = self.dataset
        return run.skips.count_trained(len(run))

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Return a sample as the same dict that GPTDataset returns, with `dataset_id` if several
        sources are blended.

        Raises: IndexError if `idx` is out of range; DataError if a file is missing or damaged.
        """
        members: dict[str, Any] = super().__getitem__(idx)
        if len(self.dataset.run.sources) == 1:
            return members
        return {
            "dataset_id": self.dataset.run.plan.locate(self._sample_number(idx or 0))[0],
            **members,
        }

    def __getitems__(self, indices: Sequence[int | None]) -> list[dict[str, Any]]:
        """Return the dicts of several samples. Their blocks are read together. Raises: see
        `__getitem__`."""
        wanted = [int(idx) for idx in indices if idx is not None]
        with suppress(DataError, IndexError):  # raised below, where it names its sample
            self._batch = dict(
                zip(
                    wanted,
                    self.dataset.samples([self._sample_number(idx) for idx in wanted]),
                    strict=True,
                )
            )
        try:
            return [self[idx] for idx in indices]
        finally:
            self._batch = {}

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        """Return the tokens of a sample, as GPTDataset's method of this name does, but with an
        empty array of document numbers: in these orders, documents are not numbered."""
        sample = self._batch.get(int(idx)) or self.dataset.sample(self._sample_number(idx))
        lengths: Array = np.diff(sample.starts, append=len(sample.tokens))
        return query_result(self.config, sample.tokens, np.zeros(0, np.int64), lengths.tolist())

    def _sample_number(self, idx: int) -> int:
        """Return the sample number for index `idx`. Indices do not count skipped samples."""
        run: Dataset = self.dataset
        return run.skips.position(int(idx))

    def _build_document_sample_shuffle_indices(self) -> tuple[None, None, None]:
        return None, None, None


def build_own_orders(
    config: MegablendDatasetConfig, sizes: Sequence[int | None], launch: Communicator
) -> None:
    """Index the data and commit the run. All ranks of the launch must call this function. Raises:
    see megablend.build."""
    build(run_config(config, sizes), launch=launch, storage=make_dataset_storage(config))


def open_own_orders(
    config: MegablendDatasetConfig, sizes: Sequence[int | None]
) -> list[OwnOrderDataset | None]:
    """Open the datasets of train, valid and test; None for a split without data. Raises: CacheError
    if the run was not built or must be extended, or if a table of documents is missing or damaged,
    which a build makes again; PlanError."""
    settings = run_config(config, sizes)
    storage = make_dataset_storage(config)
    datasets: list[OwnOrderDataset | None] = []
    for split, name in enumerate(("train", "valid", "test")):
        if sizes[split] == 0 or not settings.has_split(name):
            datasets.append(None)
        else:
            run = open_run(settings, name, storage=storage)
            for source in settings.sources_needing_lengths:
                open_table(run.store.snapshot, run.store.snapshot.sources.numbers[source])
            dataset = Dataset(run, skips=skips_of(run))
            datasets.append(OwnOrderDataset(dataset, Split(split), config))
    return datasets


def run_config(config: MegablendDatasetConfig, sizes: Sequence[int | None]) -> Config:
    """Return the megablend config that is equivalent to Megatron's config and sizes.

    Raises: ConfigError for a setting that these orders do not support.
    """
    if setting(config, "multiple_validation_sets"):
        raise ConfigError(
            f"order: {config.order} supports a single validation set; leave out "
            "multiple_validation_sets, or choose order: megatron"
        )
    if not config.drop_last_partial_validation_sequence:
        raise ConfigError(
            f"order: {config.order} never makes partial sequences; leave "
            "drop_last_partial_validation_sequence at True, or choose order: megatron"
        )
    blends: list[Blend | None] = list(config.blend_per_split or [config.blend, None, None])
    sources = {
        name: [_source(number, word, blend[1]) for number, word in enumerate(blend[0])]
        for name, blend in zip(("train", "valid", "test"), blends, strict=True)
        if blend is not None
    }
    cache = str(Path(cache_of(config)) / INDEX_FOLDER)
    settings: dict[str, Any] = {
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
    return load_config({name: value for name, value in settings.items() if value is not None})


def _with_skips(cache: str, run: str, samples: int) -> int:
    """Return the number of samples that the run must have so that Megatron can train on `samples`
    of them: these samples, and the skipped samples between them.

    Raises: CacheError if the ledger or the list of skipped samples is damaged.
    """
    session = Session(cache, run=run)
    if session.ledger is None:
        return samples
    return load_skips(session.cache, session.ledger).position(samples - 1) + 1


def _source(number: int, word: str, weights: Sequence[float] | None) -> dict[str, Any]:
    """Return the config of a source. The source is named by its position in the blend, so that its
    data may be moved. Without weights, sources are weighted by their numbers of tokens."""
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

"""The map-style dataset, which returns a dict like GPTDataset's for each sample number: the same on
every rank, in every worker, after every restart."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import groupby
from typing import Any

import numpy.typing as npt
import torch
import torch.utils.data

from megablend.config.numbers import whole_number
from megablend.errors import DataError, StateError
from megablend.index.blocks.block_store import BlockBatch
from megablend.lazy import cached_property
from megablend.prefetch.block_cache import BlockCache
from megablend.prefetch.memory_budget import cache_bytes_of
from megablend.prefetch.samples import Sample, read_each, read_samples
from megablend.reader.callers import warn_if_shuffled
from megablend.reader.error_context import name_sample
from megablend.reader.tensors import sample_dict
from megablend.reader.transform import Transform, apply, checked
from megablend.run.run import Run
from megablend.run.skips import Skips
from megablend.run.state import State
from megablend.system.failures import translating

_NAMED = 8
"""The number of sources that `repr` names."""


class Dataset(torch.utils.data.Dataset[dict[str, Any]]):
    """One split of a run. Made by `megablend.open`.

    Safe to share between threads, to pickle (spawned workers) and to fork; opens a file when one of
    its blocks is first read.
    """

    def __init__(
        self,
        run: Run,
        *,
        consumed_samples: int = 0,
        transform: Transform | None = None,
        skips: Skips | None = None,
    ) -> None:
        self.run = run
        self.skips = skips or Skips()
        """Ranges of samples that samplers and loaders skip."""
        self.transform = checked(transform)
        """A function of each sample's dict, whose return value replaces the sample."""
        self._warned_of_shuffling = False
        self.consumed_samples = self.check_position(consumed_samples)
        """Number of samples that training has consumed, at which new loaders begin. Neither the
        dataset nor its loaders update it."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # as in Run

    def __len__(self) -> int:
        if not self._warned_of_shuffling:
            self._warned_of_shuffling = warn_if_shuffled()
        return self.run.num_samples

    def __repr__(self) -> str:
        run = self.run
        named = ", ".join(f"{i}: {name}" for i, name in enumerate(self.sources[:_NAMED]))
        more = f", ... {len(self.sources) - _NAMED:,} more" if len(self.sources) > _NAMED else ""
        return f"<megablend.Dataset {run.ledger.run!r} {run.split}: {len(self):,} samples, dataset_id {named}{more}>"

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the split's sources; a sample's `dataset_id` is an index into them."""
        return tuple(source.name for source in self.run.sources)

    @cached_property
    def cache_bytes(self) -> int:
        """The bytes of blocks that `self[k]` caches while no loader reads ahead."""
        return cache_bytes_of(self.run)

    @cached_property
    def block_cache(self) -> BlockCache:
        """The cache of blocks for `self[k]`."""
        return BlockCache(self.run.store, self.cache_bytes)

    def __getitem__(self, k: int | None) -> Any:
        """Return sample k; for None, a sample with a loss mask of zeros, to pad the last batch (as
        GPTDataset does): sample 0, or the first one that is as long as the last ones.

        Raises: IndexError outside [0, len); TypeError if k is not an integer; MissingFileError,
            ChangedFileError, CorruptFileError from its files; TransformError.
        """
        sample = self.untransformed(k)
        return sample if self.transform is None else apply(self.transform, sample, k)

    def untransformed(self, k: int | None) -> dict[str, Any]:
        """Return sample k before the transform. Raises: the errors of indexing."""
        ks = [self.run.sections[-1].start if k is None else operator.index(k)]
        run = self.run.view_at(ks[0])
        try:
            with translating(self._name(ks[0])):
                sample = sample_dict(run.settings, read_samples(run, self.block_cache, ks))
        except DataError as error:
            raise name_sample(self.run, ks, error) from error
        if k is None:
            sample["loss_mask"].zero_()
        return sample

    def __getitems__(self, ks: Sequence[int]) -> list[Any]:
        """Return samples `ks`, for a DataLoader to collate; a padding sample if there are none, as
        for some ranks in a short last step."""
        return [self[k] for k in ks] or [self[None]]

    def sample(self, k: int) -> Sample:
        """Return the provenance of sample k: source, ordinal, blocks, tokens, document starts.
        Raises: the errors of indexing."""
        number = operator.index(k)
        with translating(self._name(number)):
            return read_each(self.run.view_at(number), self.block_cache, [number])[0]

    def _name(self, number: int) -> str:
        """Return the name of a sample in messages. Numbers outside the run are clipped, since
        Python refuses to write very long ones."""
        return f"sample {min(max(number, -1), self.run.num_samples)}"

    def samples(self, ks: Sequence[int]) -> list[Sample]:
        """Return the provenance of samples `ks`; blocks of neighbouring ones of the same length are
        read together. Raises: the errors of indexing."""
        provenances = list[Sample]()
        with translating("samples"):
            for _, group in groupby(ks, key=lambda k: self.run.view_at(k).section):
                numbers = list(group)
                view = self.run.view_at(numbers[0])
                provenances += read_each(view, self.block_cache, numbers)
        return provenances

    def with_transform(self, transform: Transform | None) -> Dataset:
        """Return a copy of the dataset with another transform, or none; both share the cache of
        blocks. Raises: ConfigError if the transform is not callable."""
        block_cache = self.block_cache
        dataset = copy(self)
        dataset.transform = checked(transform)
        dataset.__dict__["block_cache"] = block_cache
        return dataset

    def read_blocks(self, block_ids: npt.ArrayLike) -> BlockBatch:
        """Return the tokens and document pieces of any blocks of the index. Raises: IndexError,
        DataError."""
        return self.run.store.read_blocks(block_ids)

    def state_dict(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """Return the state after `consumed_samples` samples (default: `self.consumed_samples`), as
        a JSON-serializable dict."""
        ledger = self.run.ledger
        if consumed_samples is None:
            consumed_samples = self.consumed_samples
        return State(
            run=ledger.run,
            split=self.run.split,
            indices=ledger.indices,
            stages=ledger.links,
            consumed_samples=operator.index(consumed_samples),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let new loaders begin where a state was saved.
        Raises: StateError if the state's index or plan differs."""
        self.consumed_samples = self.check_state(state)

    def check_state(self, state: Mapping[str, Any]) -> int:
        """Check a state, and return its consumed samples.
        Raises: StateError if the state's index or plan differs."""
        saved = State.from_dict(state)
        ledger = self.run.ledger
        saved.check(split=self.run.split, indices=ledger.indices, stages=ledger.links)
        return self.check_position(saved.consumed_samples)

    def position(self, trained_samples: int) -> int:
        """Return the number of the next sample after `trained_samples` samples, which also counts
        the samples skipped before it.

        For loops that count by themselves: `consumed_samples=dataset.position(trained)`. Raises:
            see `check_position`.
        """
        trained_samples = whole_number("trained_samples", trained_samples, least=0)
        return self.check_position(self.skips.position(trained_samples))

    def check_position(self, consumed_samples: int) -> int:
        """Return `consumed_samples` as an int. Raises: ConfigError if it is not a whole number;
        StateError if it is outside the run or among skipped samples."""
        consumed_samples = whole_number("consumed_samples", consumed_samples)
        if not 0 <= consumed_samples <= self.run.num_samples:
            raise StateError(
                f"consumed_samples is {consumed_samples:,}; expected 0 to {self.run.num_samples:,}, the samples of "
                "this run"
            )
        skipped = self.skips.containing(consumed_samples)
        if skipped is not None:
            raise StateError(
                f"sample {consumed_samples:,} is within samples {skipped[0]:,} to {skipped[1]:,}, which run "
                f"{self.run.ledger.run!r} skips; resume from a checkpoint saved at sample {skipped[0]:,} or earlier, or clear "
                "the skips (`megablend skip CONFIG --clear`)"
            )
        return consumed_samples

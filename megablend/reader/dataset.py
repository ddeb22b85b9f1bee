"""The map-style dataset, which returns a dict like GPTDataset's for each sample number. The samples
are the same on every rank, in every worker and after every restart."""

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
from megablend.prefetch.memory_budget import sample_bytes, split_budget
from megablend.prefetch.samples import Sample, read_each, read_samples
from megablend.reader.callers import warn_if_shuffled
from megablend.reader.error_context import name_sample
from megablend.reader.tensors import batch_dict
from megablend.reader.transform import Transform, apply, checked, sample_of
from megablend.run.run import Run
from megablend.run.skips import Skips
from megablend.run.state import State
from megablend.system.failures import translating

_NAMED = 8
"""The number of sources that `repr` names."""


class Dataset(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style dataset of the samples of one split of a run. Made by `megablend.open`.

    It may be shared between threads, pickled (for spawned workers) and forked. Files are opened
    when one of their blocks is first read.
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
        """A function that is applied to each sample's dict. Its return value replaces the
        sample."""
        self._warned_of_shuffling = False
        self.consumed_samples = self.check_position(consumed_samples)
        """Number of samples that training has consumed. New loaders begin at this position. Neither
        the dataset nor its loaders update it."""

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
        """Number of bytes of blocks that `self[k]` caches while no loader reads ahead."""
        budget = split_budget(self.run, max(map(sample_bytes, self.run.sections)))
        return budget.blocks + budget.cache + budget.planning

    @cached_property
    def block_cache(self) -> BlockCache:
        """The cache of blocks for `self[k]`."""
        return BlockCache(self.run.store, self.cache_bytes)

    def __getitem__(self, k: int | None) -> Any:
        """Return sample k. For None, return a padding sample for the last batch, as GPTDataset
        does: a sample with a loss mask of zeros, and of the same length as the last samples.

        Raises: IndexError outside [0, len); TypeError if k is not an integer; MissingFileError,
            ChangedFileError, CorruptFileError for the files of the sample; TransformError.
        """
        sample = self.untransformed(k)
        return sample if self.transform is None else apply(self.transform, sample, k)

    def untransformed(self, k: int | None) -> dict[str, Any]:
        """Return sample k without applying the transform. Raises: the same errors as indexing."""
        if isinstance(k, list):
            raise TypeError(
                "found a list of sample numbers, expected one number; give a PretrainingSampler to a DataLoader as batch_sampler="
            )
        ks = [self.run.sections[-1].start if k is None else operator.index(k)]
        run = self.run.view_at(ks[0])
        try:
            with translating(self._name(ks[0])):
                samples = read_samples(run, self.block_cache, ks)
                sample = sample_of(batch_dict(run.settings, samples), 0)
        except DataError as error:
            raise name_sample(self.run, ks, error) from error
        if k is None:
            sample["loss_mask"].zero_()
        return sample

    def __getitems__(self, ks: Sequence[int]) -> list[Any]:
        """Return the list of samples `ks`, for a DataLoader to collate. For an empty list, which
        some ranks get in a short last step, return one padding sample."""
        return [self[k] for k in ks] or [self[None]]

    def sample(self, k: int) -> Sample:
        """Return sample k with its provenance: source, ordinal, blocks, tokens, document starts.
        Raises: the errors of indexing."""
        number = operator.index(k)
        with translating(self._name(number)):
            return read_each(self.run.view_at(number), self.block_cache, [number])[0]

    def _name(self, number: int) -> str:
        """Return the name of a sample in messages. Numbers outside the run are clipped, since
        Python refuses to write very long ones."""
        return f"sample {min(max(number, -1), self.run.num_samples)}"

    def samples(self, ks: Sequence[int]) -> list[Sample]:
        """Return samples `ks` with their provenance. Blocks of consecutive samples of the same
        length are read together. Raises: the same errors as indexing."""
        provenances = list[Sample]()
        with translating("samples"):
            for _, group in groupby(ks, key=lambda k: self.run.view_at(k).section):
                numbers = list(group)
                view = self.run.view_at(numbers[0])
                provenances += read_each(view, self.block_cache, numbers)
        return provenances

    def with_transform(self, transform: Transform | None) -> Dataset:
        """Return a copy of the dataset with another transform, or with none. Both datasets share
        one cache of blocks. Raises: ConfigError if the transform is not callable."""
        block_cache = self.block_cache
        dataset = copy(self)
        dataset.transform = checked(transform)
        dataset.__dict__["block_cache"] = block_cache
        return dataset

    def read_blocks(self, block_ids: npt.ArrayLike) -> BlockBatch:
        """Return the tokens and document pieces of blocks of the index, given by their numbers.
        Raises: IndexError if a number is out of range; DataError if a file is missing, changed or
        damaged."""
        return self.run.store.read_blocks(block_ids)

    def state_dict(
        self, consumed_samples: int | None = None, from_beginning: bool | None = None
    ) -> dict[str, Any]:
        """Return the state after `consumed_samples` samples (default: `self.consumed_samples`), as
        a JSON-serializable dict.

        Args:
            from_beginning: not supported. Composer passes it, for MosaicML's own datasets.

        Raises: StateError if `from_beginning` is given.
        """
        if from_beginning is not None:
            raise StateError(
                "Composer saves the state of the dataset of a DataLoader, and would resume at the wrong sample; pass it "
                "train_dataloader=megablend.Loader(...), not a DataLoader"
            )
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
        """Set the position to that of a saved state. Loaders that are created from now on begin
        there.
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
        """Return the number of the next sample after training on `trained_samples` samples. Unlike
        `trained_samples`, this number includes skipped samples.

        For training loops that count samples themselves:
        `consumed_samples=dataset.position(trained)`. Raises: see `check_position`.
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

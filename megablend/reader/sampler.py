"""A sampler that assigns samples to batches, split over data-parallel ranks exactly as Megatron's
pretraining sampler does.

Source: Megatron-LM, MegatronPretrainingSampler: each micro step is micro_batch_size *
data_parallel_size consecutive sample numbers, of which rank r takes the r-th run of
micro_batch_size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError, StateError
from megablend.reader.callers import is_taken_ahead, refuse_second_split, warn_if_skipped_too
from megablend.reader.dataset import Dataset
from megablend.reader.ranks import DataParallelGroup, resolve_rank
from megablend.run.fitting_steps import unfit_step


class PretrainingSampler(Sampler[list[int]]):
    """A stateful batch sampler, to be passed to a DataLoader as `batch_sampler`.

    Iteration continues from `consumed_samples`, which counts the samples of all ranks in the
    batches yielded so far. The iteration ends with the run; for validation and test, the next
    iteration starts again at 0. The sampler cannot be used with accelerate.prepare, which would
    split its batches among processes a second time. Iterating it there raises an error (use
    megablend.Loader instead).

    Args:
        dataset: made by `megablend.open`.
        consumed_samples: the position to begin at; by default the dataset's `consumed_samples`.
        data_parallel_rank, data_parallel_size: the rank of this process, and the number of ranks.
            Both are required in a job of several processes.
        data_parallel_group: a torch ProcessGroup, or one dimension of a DeviceMesh, given instead
            of rank and size.
        drop_last: omit the last step if it has less than micro_batch_size * data_parallel_size
            samples. Otherwise, a rank that gets no sample of this step has an empty batch, for
            which the dataset returns one sample whose loss mask is 0.
        replicas: number of jobs that read the run together, each with the same number of processes;
            data_parallel_size is then the number of ranks of all jobs.

    Raises: ConfigError if sizes or rank are out of range, not integers, or missing in a job of
        several processes, or if the job has fewer processes than data-parallel ranks (some samples
        would then never be read); StateError if `consumed_samples` is out of range.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        data_parallel_group: DataParallelGroup | None = None,
        consumed_samples: int | None = None,
        drop_last: bool = True,
        replicas: int = 1,
    ) -> None:
        check_dataset(dataset)
        micro_batch_size = whole_number("micro_batch_size", micro_batch_size, least=1)
        rank, size = resolve_rank(
            data_parallel_rank, data_parallel_size, data_parallel_group, replicas=replicas
        )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = rank
        self.data_parallel_size = size
        self.step_samples = micro_batch_size * size
        """Number of samples in one micro step, over all ranks."""
        self.drop_last = drop_last
        if drop_last and 0 < len(dataset) < self.step_samples:
            warnings.warn(
                f"{dataset.run.split} has {len(dataset):,} samples, fewer than the {self.step_samples:,} in one step "
                f"(micro batch {micro_batch_size} x {size} ranks): the sampler yields no batches; use a smaller "
                "micro batch, or drop_last=False",
                RuntimeWarning,
                stacklevel=2,
            )
        self.consumed_samples = (
            dataset.consumed_samples
            if consumed_samples is None
            else dataset.check_position(consumed_samples)
        )
        self._resumed_at = self.consumed_samples
        """The position at which this sampler began, or the position of the state that was loaded
        last."""
        self._taken_ahead_to: int | None = None
        """The position up to which a DataLoader has taken batches ahead for its workers; None where
        batches are taken when they are needed."""
        # A position that nobody gave may still come from `load_state_dict`.
        if consumed_samples is not None or dataset.consumed_samples:
            self.check_steps()

    def check_steps(self) -> None:
        """Check that no step after the current position contains samples of different lengths, or
        skipped samples. Raises: ConfigError."""
        dataset = self.dataset
        problem = unfit_step(dataset.run, dataset.skips, self.next_start(), self.step_samples)
        if problem is not None:
            raise ConfigError(
                f"micro batch {self.micro_batch_size} x {self.data_parallel_size} ranks: {problem}"
            )

    def __len__(self) -> int:
        """Return the number of batches that the next iteration yields."""
        return self.steps_after(self.next_start())

    def next_start(self) -> int:
        """Return the sample number at which the next iteration begins. For validation and test,
        this is 0 after the end of the split."""
        if self.dataset.run.split != "train" and self.steps_after(self.consumed_samples) == 0:
            return 0
        return self.consumed_samples

    def steps_after(self, consumed_samples: int) -> int:
        """Return the number of micro steps from a sample number to the end of the run."""
        skips = self.dataset.skips
        left = skips.count_trained(self.dataset.run.num_samples)
        left -= skips.count_trained(consumed_samples)
        return left // self.step_samples if self.drop_last else -(-left // self.step_samples)

    def next_step(self, consumed_samples: int) -> tuple[int, int]:
        """Return the range [start, stop) of the samples of all ranks in the next step after
        `consumed_samples`. After that step, `consumed_samples` is `stop`."""
        skips = self.dataset.skips
        num_samples = self.dataset.run.num_samples
        if not skips.ranges:  # a fast path, since this is called for each batch
            return consumed_samples, min(consumed_samples + self.step_samples, num_samples)
        start = skips.next_sample(consumed_samples)
        stop = min(start + self.step_samples, num_samples)
        return start, stop

    def __iter__(self) -> Iterator[list[int]]:
        refuse_second_split()
        self.check_steps()
        start = self.next_start()
        if self.dataset.run.split == "train" and self.steps_after(start) > 0:
            self._check_position()
        is_ahead = is_taken_ahead()
        if 0 < start == self._resumed_at:
            warn_if_skipped_too(start)
        for _ in range(self.steps_after(start)):
            start, stop = self.next_step(start)
            begin = start + self.data_parallel_rank * self.micro_batch_size
            # Before the yield: the state includes the batch that was just yielded
            self.consumed_samples = stop
            self._taken_ahead_to = stop if is_ahead else None
            yield list(range(begin, min(begin + self.micro_batch_size, stop)))
            start = stop

    def seek(self, consumed_samples: int) -> None:
        """Continue at a position, which is not checked."""
        self.consumed_samples = consumed_samples
        self._taken_ahead_to = None

    def _check_position(self) -> None:
        """Check that the position is known. At the end of the run, where all batches may have
        arrived, only warn if it is not. Raises: StateError."""
        if self._taken_ahead_to != self.consumed_samples:
            return
        problem = (
            f"the position is {self.consumed_samples}, but a DataLoader's workers have taken batches ahead, which may not have "
            "been trained on; use megablend.Loader, torchdata's StatefulDataLoader or num_workers=0, or count trained samples "
            "yourself: dataset.state_dict(dataset.position(trained))"
        )
        if self.steps_after(self.consumed_samples) > 0:
            raise StateError(problem)
        warnings.warn(problem, RuntimeWarning, stacklevel=3)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches yielded so far.

        Raises: StateError if a DataLoader with workers has taken batches ahead, so that it is not
            known which of them were trained on.
        """
        self._check_position()
        return self.dataset.state_dict(self.consumed_samples)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a saved state. The number of ranks and the micro batch size
        may differ from those of the saved state.
        Raises: StateError; ConfigError, see `check_steps`."""
        self.seek(self.dataset.check_state(state))
        self._resumed_at = self.consumed_samples
        self.check_steps()


def check_dataset(dataset: object) -> None:
    """Check that an object is a megablend dataset. Raises: ConfigError."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"found {type(dataset).__name__}, expected a dataset returned by megablend.open"
        )

"""Which samples make which batch, split over data-parallel ranks exactly as Megatron's pretraining sampler does.

Source: Megatron-LM, MegatronPretrainingSampler: each micro step is micro_batch_size * data_parallel_size consecutive sample
numbers, of which rank r takes the r-th run of micro_batch_size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.reader.dataset import Dataset


class PretrainingSampler(Sampler[list[int]]):
    """A stateful batch sampler: give it to a DataLoader as `batch_sampler`.

    An iteration goes on from `consumed_samples`, which counts the samples of all ranks in the batches handed out. It ends with
    the run; of validation and test, the next iteration begins again at 0.

    Args:
        dataset: made by `megablend.open`.
        consumed_samples: where to begin; by default where the dataset's state says.
        drop_last: leave out a last step of less than micro_batch_size * data_parallel_size samples. Otherwise a rank that gets
            none of them has an empty batch, for which the dataset gives one sample whose loss mask is 0.

    Raises: ConfigError where sizes or rank are out of range, or no numbers; StateError where `consumed_samples` is out of range.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int | None = None,
        drop_last: bool = True,
    ) -> None:
        check_dataset(dataset)
        micro_batch_size = whole_number("micro_batch_size", micro_batch_size, least=1)
        data_parallel_size = whole_number("data_parallel_size", data_parallel_size, least=1)
        data_parallel_rank = whole_number("data_parallel_rank", data_parallel_rank)
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ConfigError(
                f"found data_parallel_rank {data_parallel_rank}, expected 0 to {data_parallel_size - 1}: data_parallel_size is "
                f"{data_parallel_size}"
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.step_samples = micro_batch_size * data_parallel_size
        """Samples of one micro step, over all ranks."""
        self.drop_last = drop_last
        if drop_last and 0 < len(dataset) < self.step_samples:
            warnings.warn(
                f"{dataset.run.split} has {len(dataset):,} samples, fewer than the {self.step_samples:,} of a step (micro batch "
                f"{micro_batch_size} x {data_parallel_size} ranks): no batch comes of it; take fewer, or drop_last=False",
                RuntimeWarning,
                stacklevel=2,
            )
        if consumed_samples is not None:
            dataset.begin_after(consumed_samples)
        self.consumed_samples = dataset.consumed_samples

    def __len__(self) -> int:
        """Batches that are left."""
        return self.steps_after(self.consumed_samples)

    def steps_after(self, consumed_samples: int) -> int:
        """Micro steps from a sample number to the run's end."""
        left = len(self.dataset) - consumed_samples
        return left // self.step_samples if self.drop_last else -(-left // self.step_samples)

    def __iter__(self) -> Iterator[list[int]]:
        if len(self) == 0 and self.dataset.run.split != "train":
            self.consumed_samples = 0
        start = self.consumed_samples
        for _ in range(len(self)):
            mine = start + self.data_parallel_rank * self.micro_batch_size
            start = min(start + self.step_samples, len(self.dataset))
            self.consumed_samples = start  # before the yield: the state of a batch in hand counts it
            yield list(range(mine, min(mine + self.micro_batch_size, start)))

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed out so far."""
        return self.dataset.state_dict(self.consumed_samples)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with any number of ranks and any micro batch. Raises StateError."""
        self.dataset.load_state_dict(state)
        self.consumed_samples = self.dataset.consumed_samples


def check_dataset(dataset: object) -> None:
    """Raises: ConfigError for what is none of our datasets."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"found {type(dataset).__name__}, expected a dataset that megablend.open gave")

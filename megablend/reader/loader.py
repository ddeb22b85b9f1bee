"""A torch DataLoader whose state counts the batches that were handed out, not those that workers have read ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from megablend.plan.memory import block_bytes
from megablend.reader.dataset import Dataset
from megablend.reader.sampler import PretrainingSampler
from megablend.reader.steps import Steps


class Loader:
    """Batches of one data-parallel rank, from where the run stands.

    Iterating goes on after the last batch handed out, also in a new iteration. `state_dict()` and `load_state_dict()` follow
    torchdata's and torch.distributed.checkpoint's Stateful protocol.

    Args:
        dataset, micro_batch_size, data_parallel_rank, data_parallel_size, consumed_samples, drop_last: as PretrainingSampler's.
        **options: of torch.utils.data.DataLoader, such as num_workers, pin_memory, multiprocessing_context.
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
        **options: Any,
    ) -> None:
        self.sampler = PretrainingSampler(
            dataset,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            consumed_samples=consumed_samples,
            drop_last=drop_last,
        )
        self.dataset = dataset
        self.consumed_samples = self.sampler.consumed_samples
        """Samples, over all ranks, of the batches handed out."""
        self._steps: Steps | None = None
        if "collate_fn" in options:  # it is for single samples
            self._loader = DataLoader(dataset, batch_sampler=self.sampler, **options)
            return
        options.setdefault("pin_memory", torch.cuda.is_available())
        stride = self.sampler.step_samples * max(1, options.get("num_workers", 0))
        block_bytes(dataset.run, micro_batch_size=micro_batch_size, stride=stride)  # now, not in a worker
        self._steps = Steps(dataset, micro_batch_size=micro_batch_size, step_samples=self.sampler.step_samples)
        self._loader = DataLoader(self._steps, batch_size=None, sampler=self.sampler, **options)

    def __len__(self) -> int:
        """Batches that are left."""
        return self.sampler.steps_after(self.consumed_samples)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if len(self) == 0 and self.dataset.run.split != "train":
            self.consumed_samples = 0
        self.sampler.consumed_samples = self.consumed_samples
        for batch in self._batches():
            self.consumed_samples = min(self.consumed_samples + self.sampler.step_samples, len(self.dataset))
            yield batch
        self.close()

    def _batches(self) -> Iterator[dict[str, Any]]:
        if self._steps is None or self._loader.num_workers > 0:
            yield from self._loader
            return
        for ks in self.sampler:  # what a DataLoader does around each batch takes longer than the batch
            batch = self._steps[ks]
            yield {name: tensor.pin_memory() for name, tensor in batch.items()} if self._loader.pin_memory else batch

    def close(self) -> None:
        """Stop reading ahead in this process, and let go of what was read; going on is possible, from new."""
        if self._steps is not None:
            self._steps.close()

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed out so far."""
        return self.dataset.state_dict(self.consumed_samples)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with any number of ranks and any micro batch. Raises StateError."""
        self.sampler.load_state_dict(state)
        self.consumed_samples = self.sampler.consumed_samples

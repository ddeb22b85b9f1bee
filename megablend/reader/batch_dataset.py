"""The dataset of batches that a Loader, or a worker of a DataLoader, reads. When a batch is
requested, the batches of the following steps are read ahead."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.utils.data

from megablend.errors import DataError, MegablendError
from megablend.formats import bound_caches
from megablend.prefetch.due_reporter import DueReporter, report_due
from megablend.prefetch.memory_budget import plan_budget
from megablend.prefetch.read_ahead import ReadAhead
from megablend.prefetch.read_counts import ReadMeter
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.windows import plan_windows
from megablend.reader.dataset import Dataset
from megablend.reader.error_context import name_sample
from megablend.reader.tensors import batch_dict
from megablend.reader.transform import collated
from megablend.system import count_cpus
from megablend.system.failures import translate

MAX_DECODING = 8
"""Maximum number of decoding threads of a process."""


class BatchDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset whose items are batches, indexed by lists of sample numbers. It reads ahead in the
    process that uses it.

    Reading ahead is restarted if a request does not follow the previous one, or if the length of
    samples changes.

    Args:
        dataset: the dataset to read.
        micro_batch_size, step_samples: number of samples per step of this rank, and of all ranks.
        num_batches: number of batches that exist at the same time; see `plan_budget`.
    """

    def __init__(
        self, dataset: Dataset, *, micro_batch_size: int, step_samples: int, num_batches: int = 2
    ) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._step_samples = step_samples
        self._num_batches = num_batches
        self._ahead: ReadAhead | None = None
        self._due: DueReporter | None = None
        self._section = dataset.run.sections[0]
        """The section of the run (samples of the same length and masks) that is read ahead."""
        self._next_first = 0
        """The first sample of the next step that is read ahead."""
        self._process = os.getpid()
        """The id of the process that reads ahead. After a fork, it is the parent's."""
        self.meter = ReadMeter()
        """The counters of this process's reads."""

    def __getitem__(self, ks: list[int]) -> dict[str, torch.Tensor]:
        """Return the batch of consecutive samples `ks`; for an empty list, a batch of one padding
        sample. Raises: see ReadAhead.next."""
        if not ks:
            padding: dict[str, torch.Tensor] = collated([self._dataset.untransformed(None)])
            return padding
        try:
            samples = self._read_ahead_from(ks[0]).next()
        except BaseException as error:  # even an interrupt, which may occur anywhere: start over
            self.close()
            explained = self._explain(error, ks)
            if explained is not None:
                raise explained from error
            raise
        assert samples is not None
        assert len(samples.tokens) == len(ks)
        self._next_first = ks[0] + self._stride()
        if self._due is not None:
            assert self._ahead is not None
            self._due.take_step(self._ahead.count_steps_ahead())
        return batch_dict(self._section, samples)

    def _explain(self, error: BaseException, ks: list[int]) -> MegablendError | None:
        """Return a more detailed error for an error in reading samples `ks`; None if there are no
        further details."""
        if isinstance(error, DataError):
            return name_sample(self._dataset.run, ks, error)
        return translate(error, f"the batch of sample {ks[0]}")

    def close(self) -> None:
        """Stop reading ahead, and release the blocks that were read."""
        if self._due is not None:
            self._due.close()
        self._due = None
        if self._ahead is not None:
            self._ahead.close()
            self._dataset.block_cache.resize(self._dataset.cache_bytes)
        self._ahead = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "dataset": self._dataset,
            "micro_batch_size": self._micro_batch_size,
            "step_samples": self._step_samples,
            "num_batches": self._num_batches,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _read_ahead_from(self, first: int) -> ReadAhead:
        """Return the ReadAhead whose next step begins with sample `first`. A new one is made if
        necessary."""
        continues = first == self._next_first and first < self._section.stop
        if self._ahead is None or self._process != os.getpid() or not continues:
            self.close()
            self._ahead = self._begin(first)
            self._process = os.getpid()
        return self._ahead

    def _begin(self, first: int) -> ReadAhead:
        """Start reading ahead at sample `first`."""
        run = self._dataset.run.view_at(first)
        self._section = run.settings
        batch_size = self._micro_batch_size
        stride = self._stride()
        sequence = StepSequence(
            first=first, micro_batch_size=batch_size, stride=stride, stop=self._section.stop
        )
        budget = plan_budget(run, micro_batch_size=batch_size, num_batches=self._num_batches)
        self._dataset.block_cache.resize(min(budget.cache, self._dataset.cache_bytes))
        bound_caches(budget.dictionaries)
        self._due = report_due(run, sequence)
        return ReadAhead(
            run,
            plan_windows(run, sequence, budget),
            budget=budget,
            num_fetching=run.store.max_reads,
            num_decoding=min(MAX_DECODING, count_cpus()),
            meter=self.meter,
        )

    def _stride(self) -> int:
        """Return the number of samples between the starts of two consecutive steps of this
        process."""
        worker = torch.utils.data.get_worker_info()
        return self._step_samples * (1 if worker is None else worker.num_workers)

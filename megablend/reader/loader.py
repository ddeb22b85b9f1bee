"""The loader of a data-parallel rank's batches. Its state counts the batches that were yielded, not
the batches that workers have read ahead."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from megablend.errors import ConfigError, MegablendError, StateError
from megablend.index.verify.check_files import FileChecker
from megablend.prefetch.memory_budget import batches_of
from megablend.prefetch.memory_need import check_memory
from megablend.reader.batch_dataset import BatchDataset
from megablend.reader.callers import (
    begins_pass,
    count_of_lightning,
    warn_if_composer_skips,
    warn_if_taken_ahead,
)
from megablend.reader.dataset import Dataset
from megablend.reader.file_watch import FileWatch
from megablend.reader.loader_stats import (
    CountedSteps,
    LoaderCounts,
    collate_shared,
    describe_progress,
)
from megablend.reader.options import checked_options
from megablend.reader.ranks import DataParallelGroup
from megablend.reader.sampler import PretrainingSampler, check_dataset
from megablend.reader.start_method import choose_start_method, start_worker
from megablend.reader.transform import AHEAD, Threads, Transform, transformed
from megablend.run.fitting_steps import unfit_lanes
from megablend.run.run_files import list_files
from megablend.storage.store_options import find_options
from megablend.system.failures import translating

SETTINGS = (
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
"""Names of the attributes of a DataLoader that a Loader also has."""


MAX_EMPTY = 1000
"""The number of iterations in succession that may begin at the end of the run. A program that
begins so many waits for batches that never come."""


@dataclass(slots=True, eq=False)
class _Pass:
    """An iteration in progress."""

    num_batches: int
    """Total number of batches that the iteration yields."""


class Loader:
    """An iterable over the batches of one data-parallel rank, from the run's current position on.

    Iteration continues after the last batch yielded, also in a new iterator. All iterators of a
    Loader share its position: each batch is yielded once, and after `load_state_dict` an iteration
    in progress continues at the loaded position. They may not be used in several threads at the
    same time. In an iteration that Lightning or Composer begins, validation starts at the first
    sample. `state_dict()` and `load_state_dict()` follow the Stateful protocol of torchdata and
    torch.distributed.checkpoint. Loaders over the same dataset are independent.

    accelerate.prepare leaves a Loader unchanged. A Loader also has the attributes that accelerate's
    skip_first_batches requires, which Hugging Face's Trainer calls on resuming: the settings of a
    DataLoader, and `batch_sampler`. From these, accelerate makes a plain DataLoader, which does not
    read ahead. It is faster to load the Loader's own state, and to set Trainer's ignore_data_skip.

    Args:
        dataset, micro_batch_size, data_parallel_rank, data_parallel_size, data_parallel_group,
            consumed_samples, drop_last, replicas: as for PretrainingSampler.
        transform: a function that is applied to each sample's dict as the final step, in threads,
            or in the workers (it must then be picklable if they are spawned). Its return values are
            collated as torch does.
        **options: options of torch.utils.data.DataLoader, such as num_workers, pin_memory,
            multiprocessing_context.

    Raises: ConfigError for invalid arguments; StateError if `consumed_samples` is out of range.
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
        transform: Transform | None = None,
        **options: Any,
    ) -> None:
        if transform is not None:
            check_dataset(dataset)
            if dataset.transform is not None:
                raise ConfigError(
                    "transform: both the dataset and the loader have one; pass it to only one of them"
                )
            dataset = dataset.with_transform(transform)
        self.sampler = PretrainingSampler(
            dataset,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            data_parallel_group=data_parallel_group,
            consumed_samples=consumed_samples,
            drop_last=drop_last,
            replicas=replicas,
        )
        self.dataset = dataset
        self.batch_size = self.sampler.micro_batch_size
        self.drop_last = drop_last
        self.collate_fn: Callable[[list[Any]], Any] | None = options.get("collate_fn")
        """The function that collates single samples, in a DataLoader that other code makes from
        `dataset` and `batch_sampler`; None for torch's default."""
        self.consumed_samples = self.sampler.consumed_samples
        """Number of samples, over all ranks, in the batches yielded so far."""
        self._counts = LoaderCounts()
        self._steps: BatchDataset | None = None
        self._check_memory: Callable[..., None] | None = None
        self._threads = Threads()
        self._watch = _make_watch(
            dataset, self.sampler.data_parallel_rank, self.sampler.data_parallel_size
        )
        self._position_lost = False
        self._process = os.getpid()
        """The id of the process that made the Loader, of which a worker has a copy."""
        self._num_empty = 0
        """Number of iterations in succession that have begun at the end of the run."""
        self._pass: _Pass | None = None
        # Batches before the loaded state that Lightning includes in its count of the next iteration
        self._counted_before = 0
        options = choose_start_method(checked_options(options), dataset.run, dataset.transform)
        if options["num_workers"] > 0:
            options["worker_init_fn"] = partial(start_worker, options.get("worker_init_fn"))
        self._check_lanes(options["num_workers"])
        self._loader: DataLoader[Any]
        if "collate_fn" in options:  # it takes single samples
            if options["num_workers"] > 0:
                options["collate_fn"] = partial(collate_shared, options["collate_fn"])
            self._loader = DataLoader(dataset, batch_sampler=self.sampler, **options)
        else:
            self._loader = self._make_ahead(options)

    def _make_ahead(self, options: dict[str, Any]) -> DataLoader[Any]:
        """Make the DataLoader whose dataset reads ahead, with these options. Raises: ConfigError if
        the memory limit is too small."""
        dataset = self.dataset
        num_workers = options["num_workers"]
        step_samples = self.sampler.step_samples
        num_batches = batches_of(num_workers, options.get("prefetch_factor"))
        if dataset.transform is not None and num_workers == 0:
            num_batches += 2 * AHEAD  # inputs and outputs of the threads
        sizes = {"micro_batch_size": self.batch_size, "num_batches": num_batches}
        stride = step_samples * max(1, num_workers)
        # Raises errors here, not in a worker
        self._check_memory = partial(
            check_memory, dataset.run, dataset.skips, stride=stride, **sizes
        )
        self._check_memory(first=self.sampler.next_start())
        self._steps = BatchDataset(dataset, step_samples=step_samples, **sizes)
        batches: torch.utils.data.Dataset[Any] = self._steps
        if num_workers > 0:
            batches = CountedSteps(self._steps, dataset.transform)
        return DataLoader(batches, batch_size=None, sampler=self.sampler, **options)

    def __len__(self) -> int:
        """Return the number of batches that the next iteration yields; while an iteration is in
        progress, the total number that it yields.

        After `load_state_dict`, this is the number of remaining batches; `batches_total` is the
        number for the whole run. If Lightning has loaded the state from its checkpoint, the batches
        that Lightning has already counted are added. For validation, Lightning and Composer get the
        number of a full pass.
        """
        if self._pass is not None:
            return self._pass.num_batches
        if begins_pass() and self.dataset.run.split != "train":
            return self.batches_total
        self.sampler.seek(self.consumed_samples)
        return self._counted_before + len(self.sampler)

    @property
    def batches_total(self) -> int:
        """The number of batches in the whole run, regardless of the position."""
        return self.sampler.steps_after(0)

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS and "_loader" in self.__dict__:
            return getattr(self._loader, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def batch_sampler(self) -> LentSampler:
        """A sampler that yields the sample numbers of each remaining batch, for a DataLoader over
        `dataset` that other code makes.

        The Loader's position advances when batches are requested. If that DataLoader has workers,
        they request batches in advance; the position is then unknown, and `state_dict` raises
        StateError.
        """
        return LentSampler(self)

    def next_indices(self) -> Iterator[list[int]]:
        """Yield the sample numbers of `batch_sampler`."""
        self.sampler.seek(self.consumed_samples)
        self._position_lost = self._loader.num_workers > 0
        try:
            for ks in self.sampler:
                self._watch.start(self.consumed_samples)
                self._watch.raise_found()
                self.consumed_samples = self.sampler.consumed_samples
                yield ks
        finally:  # also when the garbage collector ends this generator, in any thread
            self._watch.stop()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        is_training = self.dataset.run.split == "train"
        if begins_pass() and not is_training:
            self.consumed_samples = 0
        elif is_training:
            warn_if_taken_ahead()
            if self.consumed_samples > 0:
                warn_if_composer_skips(self.consumed_samples)
        self._warn_of_copies()
        self.sampler.seek(self.consumed_samples)
        self.sampler.check_steps()  # before workers start, rather than at the step that does not fit
        self.consumed_samples = self.sampler.next_start()
        self._check_end()
        self._pass = _Pass(self._counted_before + len(self.sampler))
        self._counted_before = 0
        return self._yield_batches(self._pass)

    def _yield_batches(self, current: _Pass) -> Iterator[dict[str, Any]]:
        """Yield the batches of an iteration. The position advances with each batch, and files are
        watched until the iteration ends.

        Where the position has moved otherwise, since a state was loaded or another iteration has
        begun, reading begins again at the new position.
        """
        position: int | None = None  # where this iteration has left the Loader
        batches: Iterator[Any] = iter(())
        try:
            while True:
                if self.consumed_samples != position or self._pass is not current:
                    if position is not None and not self.sampler.steps_after(self.consumed_samples):
                        break  # rather than begin another pass over validation
                    batches = self._begin(current)
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                # Only after a DataLoader's workers were forked
                self._watch.start(self.consumed_samples)
                self._watch.raise_found()
                self._num_empty = 0
                position = self.sampler.next_step(self.consumed_samples)[1]
                self.consumed_samples = position
                yield batch
        except MegablendError:
            self.close()
            raise
        finally:  # also when the garbage collector ends this generator, in any thread
            self._watch.stop()
            if self._pass is current:  # unless another iteration has begun since
                self._pass = None
        self.close()

    def _begin(self, current: _Pass) -> Iterator[Any]:
        """Begin to read at the Loader's position, as the iteration in progress."""
        self.sampler.seek(self.consumed_samples)
        if self._pass is not current:
            current.num_batches = self._counted_before + len(self.sampler)
            self._counted_before = 0
            self._pass = current
        return self._counts.watch(self._batches())

    def _check_end(self) -> None:
        """Warn if an iteration of a training run that has been read begins at its end.

        Raises: StateError if a program begins one after another that yields no batch.
        """
        run = self.dataset.run
        if len(self.sampler) > 0:
            return
        self._num_empty += 1
        if self._num_empty >= MAX_EMPTY:
            raise StateError(
                f"the Loader was iterated {MAX_EMPTY} times at the end of the run, which has {run.num_samples} samples: the "
                "program waits for more; end it by `batches_total`, or extend the run (`samples` or `epochs` in the config)"
            )
        if self.consumed_samples == 0:
            return  # the run is shorter than a step, of which the sampler has warned
        warnings.warn(
            f"the run is read: {self.consumed_samples} of its {run.num_samples} samples are consumed, and this iteration yields "
            "no batch; to train longer, extend the run (`samples` or `epochs` in the config)",
            RuntimeWarning,
            stacklevel=3,
        )

    def _warn_of_copies(self) -> None:
        """Warn if a worker of another DataLoader iterates its copy of this Loader."""
        worker = torch.utils.data.get_worker_info()
        if worker is None or self._process == os.getpid():
            return
        repeated = (
            f", and each of the {worker.num_workers} workers yields the same batches"
            if worker.num_workers > 1
            else ""
        )
        warnings.warn(
            "a Loader is iterated in a worker of another DataLoader: the state of the Loader in the training process does not "
            f"advance{repeated}; iterate the Loader itself, with its own num_workers=",
            RuntimeWarning,
            stacklevel=3,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has the position but no iteration in progress and
        no workers."""
        loader = copy(self._loader)
        loader.__dict__["_iterator"] = None  # that of persistent workers
        return {**self.__dict__, "_loader": loader, "_pass": None}

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Yield the batches from the sampler's position on, and count what was read for them."""
        batches: Iterator[Any]
        if self._steps is None or self._loader.num_workers > 0:
            with translating("the Loader's workers, whose locks are in /dev/shm"):
                batches = iter(self._loader)
            if self._steps is None:
                yield from batches
                return
            for batch, counts in batches:
                self._counts.reads = self._counts.reads.plus(counts)
                yield batch
            return
        # Without workers, no DataLoader is used: its work per batch takes longer than reading one
        steps = self._steps
        if self.dataset.transform is None:
            batches = (steps[ks] for ks in self.sampler)
        else:
            batches = transformed(steps, self.dataset.transform, self.sampler, self._threads)
        for batch in batches:
            self._counts.reads = self._counts.reads.plus(steps.meter.take())
            yield _pinned(batch) if self._loader.pin_memory else batch

    def close(self) -> None:
        """Stop reading and transforming ahead in this process, and free the memory used for it. The
        iteration can be continued later."""
        self._watch.close()
        self._threads.close()
        if self._steps is not None:
            self._steps.close()

    def stats(self) -> dict[str, Any]:
        """Return the progress of the run by source, and statistics of reading on this rank since
        the Loader was created, as JSON-serializable values.

        Returns: the keys of `describe_progress`, which are exact over all ranks and restarts:
            consumed_samples (the position, including skipped samples), num_samples, and sources
            (name, dataset_id, samples, tokens, epochs, share, planned_share; without skipped
            samples). The other keys are about this rank: rank, batches, waiting_seconds (the time
            spent waiting for the next batch), and reads. `reads` has the counters of this
            process, and of the workers as far as their batches have arrived: requests, bytes,
            blocks, reading_seconds and decoding_seconds (sums, even of times that overlap),
            masked_samples, retries, and with a mirror the bytes by origin: mirror_bytes,
            source_bytes, peer_bytes, direct_bytes (see ReadCounts). It is None with a `collate_fn`,
            since samples are then not read ahead.
        """
        counts = self._counts
        return describe_progress(self.dataset.run, self.consumed_samples, self.dataset.skips) | {
            "rank": self.sampler.data_parallel_rank,
            "batches": counts.batches,
            "waiting_seconds": counts.waiting_seconds,
            "reads": None if self._steps is None else counts.reads._asdict(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches yielded so far.

        Raises: StateError if a DataLoader with workers has taken batches from `batch_sampler`.
        """
        if self._position_lost:
            raise StateError(
                "the Loader's position is not known, since another DataLoader with workers took its batches (accelerate's "
                "skip_first_batches, or resuming with Trainer); load the Loader's state_dict instead of skipping batches "
                "(with Trainer: ignore_data_skip=True), or use num_workers=0"
            )
        return self.dataset.state_dict(self.consumed_samples)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a saved state. The number of ranks and the micro batch size
        may differ from those of the saved state.

        Raises: StateError; ConfigError if the step size or `memory` is unsuitable for the rest of
            the run.
        """
        self.sampler.load_state_dict(state)
        if self._check_memory is not None:
            self._check_memory(first=self.sampler.next_start())
        self.consumed_samples = self.sampler.consumed_samples
        self._position_lost = False
        self._num_empty = 0
        self._pass = None
        self._counted_before = count_of_lightning(default=self.batches_total - len(self.sampler))

    def _check_lanes(self, num_workers: int) -> None:
        """Warn if the number of lanes does not match the step size, so that several processes would
        read the same blocks."""
        run = self.dataset.run
        if not run.has_lanes or self.sampler.data_parallel_rank > 0:  # one rank warns for all
            return
        for lanes in dict.fromkeys(blend.lanes for blend in run.blends):
            problem = unfit_lanes(
                lanes,
                micro_batch_size=self.sampler.micro_batch_size,
                data_parallel_size=self.sampler.data_parallel_size,
                num_workers=num_workers,
            )
            if problem is not None:
                warnings.warn(problem, RuntimeWarning, stacklevel=3)  # at the call of Loader()


class LentSampler(Sampler[list[int]]):
    """A sampler that yields the sample numbers of a Loader's batches; see
    `Loader.batch_sampler`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._num_batches = len(loader)
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last

    def __len__(self) -> int:
        """Return the number of batches that remained when this sampler was created. It is constant,
        because code that skips batches subtracts from it."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.next_indices()


def _make_watch(dataset: Dataset, rank: int, size: int) -> FileWatch:
    """Return a FileWatch for this rank's share of the files of the split's sources."""
    run = dataset.run
    store = run.store
    options = run.runtime.objects
    files = list_files(run)[rank::size]
    if any(dict(settings).get("versions") for _, settings in options.by_prefix):
        # A process that has read a version of an object keeps reading it, even if the object
        # changes
        files = [
            file
            for file in files
            if not find_options(options, store.snapshot.path(file.number, store.roots)).versions
        ]
    checker = FileChecker(store.snapshot, store.roots, store.storage)
    return FileWatch(checker, files, per_second=run.runtime.file_checks_per_second)


def _pinned(value: Any) -> Any:
    """Return a copy of a batch with its tensors in pinned memory."""
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, Mapping):
        return {name: _pinned(item) for name, item in value.items()}
    # A named tuple remains one, as in torch's DataLoader
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_pinned(item) for item in value))
    if isinstance(value, list | tuple):
        return [_pinned(item) for item in value]
    return value

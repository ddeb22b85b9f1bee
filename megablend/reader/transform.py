"""A user's function on each sample: the final step, run in threads in parallel with training, or in
a DataLoader's workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.utils.data

from megablend.errors import ConfigError, TransformError
from megablend.system import count_cpus

Transform = Callable[[dict[str, Any]], Any]
"""A sample as `dataset[k]` returns it -> its replacement: anything that torch can collate."""
AHEAD = 3
"""Batches transformed in advance, in addition to the one that is awaited."""


def checked(transform: Transform | None) -> Transform | None:
    """Return the transform unchanged. Raises: ConfigError if it is not callable."""
    if transform is None or callable(transform):
        return transform
    raise ConfigError(f"transform: found {transform!r}, expected a function of a sample's dict")


def apply(transform: Transform, sample: dict[str, Any], k: int | None) -> Any:
    """Transform sample k (None: a padding sample). Raises: TransformError."""
    try:
        return transform(sample)
    except Exception as error:
        name = "the sample that pads a short step" if k is None else f"sample {k}"
        raise TransformError(
            f"transform failed on {name}: {type(error).__name__}: {error}"
        ) from error


def apply_to_batch(transform: Transform, batch: Mapping[str, Any], ks: list[int]) -> Any:
    """Transform the samples `ks` of a batch (empty: a padding sample) one by one, and collate them.
    Raises: TransformError."""
    numbers: list[int | None] = [*ks] or [None]
    samples = [apply(transform, sample_of(batch, i), k) for i, k in enumerate(numbers)]
    try:
        return torch.utils.data.default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise TransformError(
            f"the transformed samples {numbers[0]} to {numbers[-1]} cannot be collated ({error}); return tensors of the "
            "same shapes for every sample, or pass the loader a collate_fn"
        ) from error


def sample_of(batch: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The i-th sample of a batch as `dataset[k]` returns it: dataset_id is an int."""
    sample: dict[str, Any] = {
        name: sample_of(value, i) if isinstance(value, Mapping) else value[i]
        for name, value in batch.items()
    }
    return sample | {"dataset_id": int(sample["dataset_id"])} if "dataset_id" in sample else sample


class TransformedSteps(torch.utils.data.Dataset[Any]):
    """Batches by step, transformed where they are read; for a DataLoader's workers."""

    def __init__(self, steps: torch.utils.data.Dataset[Any], transform: Transform) -> None:
        self._steps = steps
        self._transform = transform

    def __getitem__(self, ks: list[int]) -> Any:
        """The batch of samples `ks`. Raises as the steps do; TransformError."""
        return apply_to_batch(self._transform, self._steps[ks], ks)


class Threads:
    """The transform threads. They are started on demand, also after `close` and in a forked
    child."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.generation = os.getpid(), 0
        """Process id and number of closes; work submitted in another generation is not done any
        more."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `function(*args)` in a thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                min(AHEAD, count_cpus()), thread_name_prefix="megablend-transform"
            )
        return self._pool.submit(function, *args)

    def get_current(self) -> tuple[int, int]:
        """The current generation; a forked child, which does not have its parent's
        threads, starts a new one."""
        if self.generation[0] != os.getpid():
            self._pool = None
            self.generation = (os.getpid(), 0)
        return self.generation

    def close(self) -> None:
        """Stop the threads and cancel pending work."""
        self.get_current()
        pool = self._pool
        self._pool = None
        self.generation = (self.generation[0], self.generation[1] + 1)
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def __reduce__(self) -> tuple[type[Threads], tuple[()]]:
        return Threads, ()


def transformed(
    steps: torch.utils.data.Dataset[Any],
    transform: Transform,
    batches: Iterable[list[int]],
    threads: Threads,
) -> Iterator[Any]:
    """Yield the batches of samples `batches`, transformed by threads: while one is used, the next
    AHEAD are transformed.

    Raises as the steps do, and TransformError, when the failing batch is due.
    """
    coming = iter(batches)
    pending = deque[tuple[list[int], Future[Any]]]()
    generation = threads.get_current()
    try:
        while True:
            # Closed or forked: start pending batches again
            if generation != (generation := threads.get_current()):
                pending = deque([(ks, _begin(threads, steps, transform, ks)) for ks, _ in pending])
            while len(pending) <= AHEAD and (ks := next(coming, None)) is not None:
                pending.append((ks, _begin(threads, steps, transform, ks)))
            if not pending:
                return threads.close()
            yield pending.popleft()[1].result()
    except GeneratorExit:  # perhaps from the garbage collector, in any thread: it must not wait for threads; `close` does
        raise
    except BaseException:
        threads.close()
        raise


def _begin(
    threads: Threads, steps: torch.utils.data.Dataset[Any], transform: Transform, ks: list[int]
) -> Future[Any]:
    """Read a batch and start to transform it; an error of reading is raised when the batch is
    due."""
    try:
        batch = steps[ks]
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed
    return threads.submit(apply_to_batch, transform, batch, ks)

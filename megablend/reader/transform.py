"""Apply a user's function to each sample as the final step. This is done in threads, in parallel
with training, or in a DataLoader's workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
import torch.utils.data

from megablend.errors import ConfigError, TransformError
from megablend.system import count_cpus
from megablend.system.failures import translate

Transform = Callable[[dict[str, Any]], Any]
"""A function that takes a sample, as returned by `dataset[k]`, and returns its replacement, which
may be anything that torch can collate."""
AHEAD = 3
"""Number of batches that are transformed in advance, in addition to the next one."""


def checked(transform: Transform | None) -> Transform | None:
    """Return the transform unchanged. Raises: ConfigError if it is not callable."""
    if transform is None or callable(transform):
        return transform
    raise ConfigError(
        f"transform: found {transform!r}, expected a function that takes and returns a sample"
    )


def apply(transform: Transform, sample: dict[str, Any], k: int | None) -> Any:
    """Return the transformed sample k. If k is None, it is a padding sample. Raises:
    TransformError."""
    try:
        return transform(sample)
    except Exception as error:
        name = "the sample that pads a short step" if k is None else f"sample {k}"
        raise TransformError(
            f"transform failed on {name}: {type(error).__name__}: {error}"
        ) from error


def apply_to_batch(transform: Transform, batch: Mapping[str, Any], ks: list[int]) -> Any:
    """Transform the samples `ks` of a batch one by one, and return them collated. If `ks` is empty,
    the batch is a padding sample. Raises: TransformError."""
    numbers: list[int | None] = [*ks] or [None]
    samples = [apply(transform, sample_of(batch, i), k) for i, k in enumerate(numbers)]
    try:
        return collated(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise translate(error, f"samples {numbers[0]} to {numbers[-1]}") or TransformError(
            f"the transformed samples {numbers[0]} to {numbers[-1]} cannot be collated ({error}); return tensors of the "
            "same shapes for every sample, or pass the loader a collate_fn"
        ) from error


def sample_of(batch: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return the i-th sample of a batch as GPTDataset returns it, and `dataset[k]`: without the
    batch dimension, and with dataset_id as an int."""
    sample = dict[str, Any]()
    for name, value in batch.items():
        if isinstance(value, Mapping):
            sample[name] = sample_of(value, i)
        else:
            sample[name] = int(value[i]) if name == "dataset_id" else value[i]
    return sample


def collated(samples: list[Any]) -> Any:
    """Return samples collated as by torch. Numbers become tensors on the CPU, as the other values
    are, whatever default device the trainer has set. Raises: see `default_collate`."""
    with torch.device("cpu"):
        return torch.utils.data.default_collate(samples)


class Threads:
    """The threads that apply the transform. They are started on demand, even after `close` and in a
    forked child."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Begin a new generation of threads. None is started yet."""
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._generation = object()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `function(*args)` in a thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                min(AHEAD, count_cpus()), thread_name_prefix="megablend-transform"
            )
        return self._pool.submit(function, *args)

    def get_generation(self) -> object:
        """Return an object that identifies the current generation of threads; work of earlier
        generations is dropped. A forked child does not have its parent's threads, so it begins a
        new generation."""
        if self._process != os.getpid():
            self._begin()
        return self._generation

    def close(self) -> None:
        """Stop the threads and cancel pending work."""
        self.get_generation()
        pool = self._pool
        self._begin()
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
    """Yield transformed batches. While one batch is used, threads transform the next AHEAD batches.

    Args:
        steps: the batches before the transform, indexed by lists of sample numbers.
        batches: the sample numbers of each batch.

    Raises: the errors of the steps; TransformError. Each is raised when its batch is due.
    """
    coming = iter(batches)
    # Batches in progress: their samples and futures
    pending = deque[tuple[list[int], Future[Any]]]()
    generation = threads.get_generation()
    try:
        while True:
            if threads.get_generation() != generation:  # closed or forked: work begins again
                generation = threads.get_generation()
                pending = deque([(ks, _begin(threads, steps, transform, ks)) for ks, _ in pending])
            for ks in islice(coming, AHEAD + 1 - len(pending)):
                pending.append((ks, _begin(threads, steps, transform, ks)))
            if not pending:
                break
            _, transformed_batch = pending.popleft()
            yield transformed_batch.result()
        threads.close()
    except GeneratorExit:
        # Perhaps raised by the garbage collector, in any thread: it must not wait for threads, as
        # closing them does
        raise
    except BaseException:
        threads.close()
        raise


def _begin(
    threads: Threads, steps: torch.utils.data.Dataset[Any], transform: Transform, ks: list[int]
) -> Future[Any]:
    """Read a batch and start to transform it. An error in reading is stored in the future, and
    raised when the batch is due."""
    try:
        batch = steps[ks]
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed
    return threads.submit(apply_to_batch, transform, batch, ks)

"""A user's function on each sample's tensors: the last step, in threads while training goes on, or in a DataLoader's workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.utils.data

from megablend.errors import ConfigError, TransformError

Transform = Callable[[dict[str, Any]], Any]
"""A sample as `dataset[k]` gives it -> what takes its place: anything that torch collates."""
AHEAD = 3
"""Batches in threads, besides the one that is waited for."""


def checked(transform: Transform | None) -> Transform | None:
    """The same. Raises: ConfigError for what cannot be called."""
    if transform is None or callable(transform):
        return transform
    raise ConfigError(f"transform: found {transform!r}, expected a function of a sample's dict")


def apply(transform: Transform, sample: dict[str, Any], k: int | None) -> Any:
    """What becomes of sample k (None: one to pad with). Raises: TransformError."""
    try:
        return transform(sample)
    except Exception as error:
        name = "the sample that pads a short step" if k is None else f"sample {k}"
        raise TransformError(f"transform failed on {name}: {type(error).__name__}: {error}") from error


def apply_to_batch(transform: Transform, batch: Mapping[str, Any], ks: list[int]) -> Any:
    """A batch whose samples `ks` (none: one to pad with) were transformed one by one, collated. Raises: TransformError."""
    numbers: list[int | None] = [*ks] or [None]
    found = [apply(transform, sample_of(batch, i), k) for i, k in enumerate(numbers)]
    try:
        return torch.utils.data.default_collate(found)
    except (RuntimeError, TypeError, KeyError) as error:
        raise TransformError(
            f"what transform made of samples {numbers[0]} to {numbers[-1]} cannot be collated ({error}); return tensors of the "
            "same shapes for every sample, or give the loader a collate_fn"
        ) from error


def sample_of(batch: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The i-th sample of a batch, as `dataset[k]` gives it: dataset_id is an int."""
    found: dict[str, Any] = {
        name: sample_of(value, i) if isinstance(value, Mapping) else value[i] for name, value in batch.items()
    }
    return found | {"dataset_id": int(found["dataset_id"])} if "dataset_id" in found else found


class TransformedSteps(torch.utils.data.Dataset[Any]):
    """Batches by step, transformed where they are made: what a DataLoader's workers use."""

    def __init__(self, steps: torch.utils.data.Dataset[Any], transform: Transform) -> None:
        self._steps, self._transform = steps, transform

    def __getitem__(self, ks: list[int]) -> Any:
        """The batch of samples ks. Raises as the steps do; TransformError."""
        return apply_to_batch(self._transform, self._steps[ks], ks)


class Threads:
    """Those that transform. They begin when they are needed, also after a close and in a forked child."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.era = os.getpid(), 0
        """Work that was handed out in another era is not done any more."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have a thread call it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(AHEAD, os.cpu_count() or 1), thread_name_prefix="megablend-transform")
        return self._pool.submit(function, *args)

    def follow(self) -> tuple[int, int]:
        """The era now: another in a forked child, which does not have its parent's threads."""
        if self.era[0] != os.getpid():
            self._pool, self.era = None, (os.getpid(), 0)
        return self.era

    def close(self) -> None:
        """End them, and what they have not begun."""
        self.follow()
        pool, self._pool, self.era = self._pool, None, (self.era[0], self.era[1] + 1)
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def __reduce__(self) -> tuple[type[Threads], tuple[()]]:
        return Threads, ()


def transformed(
    steps: torch.utils.data.Dataset[Any], transform: Transform, batches: Iterable[list[int]], threads: Threads
) -> Iterator[Any]:
    """The batches of samples `batches`, transformed by threads: while one is used, the next AHEAD are worked on.

    Raises as the steps do, and TransformError, where the batch that is at fault is due.
    """
    coming, pending, era = iter(batches), deque[tuple[list[int], Future[Any]]](), threads.follow()
    try:
        while True:
            if era != (era := threads.follow()):  # closed, or forked: what was on its way is begun anew
                pending = deque([(ks, _begin(threads, steps, transform, ks)) for ks, _ in pending])
            while len(pending) <= AHEAD and (ks := next(coming, None)) is not None:
                pending.append((ks, _begin(threads, steps, transform, ks)))
            if not pending:
                return
            yield pending.popleft()[1].result()
    finally:
        threads.close()


def _begin(threads: Threads, steps: torch.utils.data.Dataset[Any], transform: Transform, ks: list[int]) -> Future[Any]:
    """A batch on its way; what goes wrong with reading it is told when it is due."""
    try:
        batch = steps[ks]
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed
    return threads.submit(apply_to_batch, transform, batch, ks)

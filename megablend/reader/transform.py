"""A user's function on each sample's tensors: the last step, in threads while training goes on, or in a DataLoader's workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.utils.data

from megablend.errors import TransformError

Transform = Callable[[dict[str, Any]], Any]
"""A sample as `dataset[k]` gives it -> what takes its place: anything that torch collates."""
AHEAD = 3
"""Batches in threads, besides the one that is waited for."""


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


def transformed(
    steps: torch.utils.data.Dataset[Any], transform: Transform, batches: Iterable[list[int]]
) -> Iterator[Any]:
    """The batches of samples `batches`, transformed by threads: while one is used, the next AHEAD are worked on.

    Raises as the steps do, and TransformError, where the batch that is at fault is due.
    """
    threads = ThreadPoolExecutor(min(AHEAD, os.cpu_count() or 1), thread_name_prefix="megablend-transform")
    pending: deque[Future[Any]] = deque()
    try:
        for ks in batches:
            pending.append(_begin(threads, steps, transform, ks))
            if len(pending) > AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _begin(
    threads: ThreadPoolExecutor, steps: torch.utils.data.Dataset[Any], transform: Transform, ks: list[int]
) -> Future[Any]:
    """A batch on its way; what goes wrong with reading it is told when it is due."""
    try:
        batch = steps[ks]
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed
    return threads.submit(apply_to_batch, transform, batch, ks)

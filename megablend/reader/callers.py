"""Detect other libraries that would use a run incorrectly, by inspecting the call stack. There is
no other way to detect them.

Frames are inspected, never stored. Local variables are read only in frames of those libraries:
`f_locals` creates a dict that lives as long as its frame, and would keep a user's loader alive
after its name is deleted.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from megablend.errors import ConfigError

_DEPTH = 4
"""The number of frames above a sampler's iteration that are searched for an enclosing sampler."""

_TRAINERS = ("composer.", "lightning.", "pytorch_lightning.")
"""Packages that validate on the first batches of a loader, each time they begin to iterate it."""


def warn_if_shuffled() -> bool:
    """Warn if the caller's caller is a sampler that shuffles, such as the sampler of
    DataLoader(shuffle=True).

    Called by a dataset's `__len__`, which such samplers call before they shuffle.

    Returns: whether a warning was issued.
    """
    frame = sys._getframe(1).f_back
    caller = _self_of(frame, "torch")
    if isinstance(caller, DistributedSampler) and frame is not None:
        _refuse_replacement(frame.f_back)
    shuffles = isinstance(caller, RandomSampler) or (
        isinstance(caller, DistributedSampler) and caller.__dict__.get("shuffle", False)
    )
    if shuffles:
        warnings.warn(
            f"{type(caller).__name__} shuffles a megablend dataset again, so its exact blend is lost and it cannot be resumed; "
            "use megablend.Loader, or a DataLoader with batch_sampler=megablend.PretrainingSampler(...)",
            RuntimeWarning,
            stacklevel=4,
        )
    return shuffles


def _refuse_replacement(frame: FrameType | None) -> None:
    """Raise an error if Ray's prepare_data_loader makes a DataLoader over a dataset in place of a
    Loader, or of a DataLoader with a PretrainingSampler: it would read samples in another order,
    in batches of another size, and the state would never advance.

    Args:
        frame: the frame that makes a DistributedSampler.

    Raises: ConfigError.
    """
    if frame is None or not _is_within(frame, ("ray.",)):
        return
    replaced = frame.f_locals.get("loader")
    if type(getattr(replaced, "batch_sampler", None)).__module__.startswith("megablend."):
        raise ConfigError(
            "Ray's prepare_data_loader would replace the order of the run and its state by a DistributedSampler; do not call it: "
            "use the Loader as it is, with data_parallel_rank= and data_parallel_size= from ray.train.get_context()"
        )


def warn_if_taken_ahead() -> None:
    """Warn if Ray's prepare_data_loader begins an iteration of the caller, a training Loader: it
    takes a batch more than it has handed out, which the Loader's state includes."""
    frame = sys._getframe(1).f_back
    if frame is not None and _is_within(frame, ("ray.",)):
        warnings.warn(
            "Ray's prepare_data_loader takes a batch ahead, which the Loader's state counts although it has not been trained on: "
            "a resumed run would leave it out; use the Loader as it is, and move its batches to the device yourself",
            RuntimeWarning,
            stacklevel=4,
        )


def warn_if_composer_skips(start: int) -> None:
    """Warn if Composer begins an iteration of the caller, a training Loader at sample `start`, and
    is about to skip the batches that it has counted in its epoch."""
    trainer = _self_of(sys._getframe(1).f_back, "composer")
    if not getattr(trainer, "spin_dataloaders", False):
        return
    state = getattr(trainer, "state", None)
    if "train" in getattr(state, "dataset_resumption", {}):
        return
    timestamp = getattr(state, "timestamp", None)
    num_skipped = int(getattr(timestamp, "batch_in_epoch", 0))
    if num_skipped > 0:
        warnings.warn(
            f"Composer skips {num_skipped} batches, although the Loader is already at sample {start}, so these batches are never "
            "trained on; load the Loader's state and pass spin_dataloaders=False to Trainer, or do not load it",
            RuntimeWarning,
            stacklevel=3,
        )


def begins_pass() -> bool:
    """Return whether the caller, a Loader, is begun or asked for its length by a trainer whose
    iterations of validation start at the first sample, also where an earlier one was not
    finished."""
    frame = sys._getframe(1).f_back
    return frame is not None and _is_within(frame, _TRAINERS)


def is_taken_ahead() -> bool:
    """Return whether torch's DataLoader takes batches for its workers from the caller, a sampler's
    iterator, before they are needed. (torchdata's StatefulDataLoader does so, too, with a class of
    its own that keeps the sampler's state of each batch.)"""
    frame = sys._getframe(1).f_back
    for _ in range(_DEPTH):
        if frame is None:
            break
        caller = _self_of(frame, "torch")
        if type(caller).__module__ == DataLoader.__module__ and hasattr(caller, "_num_workers"):
            num_workers: int = caller._num_workers
            return num_workers > 0
        frame = frame.f_back
    return False


def refuse_second_split() -> None:
    """Raise an error if accelerate requests the batches, since it would split them among processes
    a second time.

    Called when the first batch is requested from the caller, a sampler's iterator.

    Raises: ConfigError.
    """
    shard = _find_caller(sys._getframe(1).f_back, "BatchSamplerShard")
    n = getattr(shard, "num_processes", 1)
    if n > 1:
        raise ConfigError(
            f"accelerate.prepare splits this DataLoader's batches among {n} processes, but its PretrainingSampler has already "
            f"done so: {n - 1} of {n} batches would be dropped; use megablend.Loader, which accelerate leaves unchanged, or do "
            "not pass this DataLoader to prepare"
        )


def warn_if_skipped_too(start: int) -> None:
    """Warn if accelerate skips batches of a sampler that has already been resumed. The caller is
    the sampler's iterator.

    Args:
        start: the sample number at which the iterator begins.
    """
    skipping = _find_caller(sys._getframe(1).f_back, "SkipBatchSampler")
    num_skipped = getattr(skipping, "skip_batches", 0)
    if num_skipped > 0:
        warnings.warn(
            f"accelerate skips {num_skipped} batches, although the loader has already resumed at sample {start}, so these "
            "batches are never trained on; do not skip batches (with Trainer: ignore_data_skip=True)",
            RuntimeWarning,
            stacklevel=3,
        )


def count_of_lightning(default: int) -> int:
    """Return the number of batches that Lightning has counted, if Lightning is restoring the caller
    from one of its own checkpoints; otherwise 0.

    Lightning continues from this count, and ends an epoch when the count reaches the length of its
    loader. So the length must include these batches.

    Args:
        default: returned if Lightning is restoring the caller, but its count is not found.
    """
    frame = sys._getframe(1).f_back
    for package in ("lightning", "pytorch_lightning"):
        if frame is not None and type(_self_of(frame, package)).__name__ == "CombinedLoader":
            loop = _self_of(frame.f_back, package)
            try:
                num_batches: int = loop.epoch_loop.batch_progress.current.ready
            except AttributeError:
                return default
            return num_batches
    return 0


def _find_caller(frame: FrameType | None, class_name: str) -> Any:
    """Search a frame and the frames above it for a method of the given class of accelerate. Returns
    the method's object; None if there is no such method."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        caller = _self_of(frame, "accelerate")
        if type(caller).__name__ == class_name:
            return caller
        frame = frame.f_back
    return None


def _is_within(frame: FrameType, packages: tuple[str, ...]) -> bool:
    """Return whether a frame runs a function of one of these packages, given with a final dot, or
    of the module of this name."""
    return f"{frame.f_globals.get('__name__', '')}.".startswith(packages)


def _self_of(frame: FrameType | None, package: str) -> Any:
    """Return the object whose method a frame runs, if the method belongs to `package`; None
    otherwise."""
    if frame is None or not frame.f_globals.get("__name__", "").startswith(f"{package}."):
        return None
    return frame.f_locals.get("self")

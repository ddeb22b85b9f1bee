"""Other libraries' samplers that would read a run wrongly, told by who calls: they give no other sign.

Frames are looked at, never kept. Variables are looked at in those libraries' frames alone: `f_locals` makes a dict that stays
with its frame, and would keep a user's loader alive after its name is deleted.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

from megablend.errors import ConfigError

_DEPTH = 4
"""Frames above a sampler's iteration in which another sampler may stand around it."""


def warn_if_shuffled() -> bool:
    """Warn where the caller's caller is a sampler that shuffles: that of DataLoader(shuffle=True), or its like.

    Called by a dataset's `__len__`, which such samplers call before they draw.

    Returns: whether it warned.
    """
    frame = sys._getframe(1).f_back
    caller = _self_of(frame, "torch")
    shuffles = isinstance(caller, RandomSampler) or (
        isinstance(caller, DistributedSampler) and caller.__dict__.get("shuffle", False)
    )
    if shuffles:
        warnings.warn(
            f"{type(caller).__name__} shuffles a megablend dataset (DataLoader(shuffle=True), or a trainer's own sampler): its "
            "samples are shuffled and blended already, another shuffle loses the exact blend, and its position is in no state; "
            "use megablend.Loader, or a DataLoader with batch_sampler=megablend.PretrainingSampler(...)",
            RuntimeWarning,
            stacklevel=4,
        )
    return shuffles


def refuse_second_split() -> None:
    """Refuse to give batches to accelerate, which would split them among processes once more.

    Called when the caller (a sampler's iteration) is asked for its first batch.

    Raises: ConfigError.
    """
    frame: FrameType | None = sys._getframe(1).f_back
    for _ in range(_DEPTH):
        if frame is None:
            return
        caller = _self_of(frame, "accelerate")
        if type(caller).__name__ == "BatchSamplerShard" and getattr(caller, "num_processes", 1) > 1:
            n = caller.num_processes
            raise ConfigError(
                f"accelerate.prepare splits this DataLoader's batches among {n} processes, but its PretrainingSampler gives one "
                f"data-parallel rank's batches already: {n - 1} of {n} would be dropped; use megablend.Loader, which accelerate "
                "leaves as it is, or do not give this DataLoader to prepare"
            )
        frame = frame.f_back


def _self_of(frame: FrameType | None, package: str) -> Any:
    """The object whose method a frame runs, if the method is of this package; None otherwise."""
    if frame is None or not frame.f_globals.get("__name__", "").startswith(f"{package}."):
        return None
    return frame.f_locals.get("self")

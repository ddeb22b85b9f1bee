"""What may be passed on to torch's DataLoader: not what the loader decides itself, nor what cannot work here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError

OURS = {
    "batch_size": "give micro_batch_size=",
    "shuffle": "the config's `order` and `seed` decide the order",
    "sampler": "the run's plan decides which samples come; PretrainingSampler is for a DataLoader of your own",
    "batch_sampler": "the run's plan decides which samples come; PretrainingSampler is for a DataLoader of your own",
}
"""Options that are not to be passed on, and what is there instead."""


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a DataLoader, `pin_memory` and `num_workers` among them. Raises: ConfigError."""
    known = list(inspect.signature(DataLoader).parameters)
    for name, value in options.items():
        if name in OURS:
            raise ConfigError(f"{name}: found {value!r}, expected none: {OURS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "micro_batch_size", "consumed_samples"], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "it is no option of torch.utils.data.DataLoader"
            raise ConfigError(f"{name}: found {value!r}: {hint}")
    found = {name: value for name, value in options.items() if name != "collate_fn" or value is not None}
    found["num_workers"] = whole_number("num_workers", found.get("num_workers", 0), least=0)
    if found.get("prefetch_factor") is not None:
        whole_number("prefetch_factor", found["prefetch_factor"], least=1)
    if "collate_fn" in found and not callable(found["collate_fn"]):
        raise ConfigError(f"collate_fn: found {found['collate_fn']!r}, expected a function of a list of samples")
    if not found.get("in_order", True):
        raise ConfigError("in_order: found False, expected True: a state counts batches in their order")
    if found.get("pin_memory") and not _can_pin():
        raise ConfigError("pin_memory: found True, but torch sees no CUDA device; leave it out")
    found.setdefault("pin_memory", torch.cuda.is_available())
    return found


def _can_pin() -> bool:
    return torch.cuda.is_available() or torch.accelerator.is_available()

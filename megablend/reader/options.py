"""Check the options that are passed on to torch's DataLoader. Options that a Loader sets itself, or
that cannot work, are refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError, did_you_mean

OURS = {
    "batch_size": "pass micro_batch_size=",
    "shuffle": "the config's `order` and `seed` decide the order",
    "sampler": "the run's plan decides which samples come next; PretrainingSampler is for a DataLoader of your own",
    "batch_sampler": "the run's plan decides which samples come next; PretrainingSampler is for a DataLoader of your own",
}
"""DataLoader options that a Loader does not accept, with advice on what to use instead."""


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked options for a DataLoader, in which `pin_memory` and `num_workers` are set.
    Raises: ConfigError if an option is unknown, invalid or not supported."""
    torch_options = list(inspect.signature(DataLoader).parameters) if options else []
    for name, value in options.items():
        if name in OURS:
            raise ConfigError(
                f"{name}: found {value!r}, but a Loader does not take this option: {OURS[name]}"
            )
        if name not in torch_options:
            hint = did_you_mean(name, [*torch_options, "micro_batch_size", "consumed_samples"])
            raise ConfigError(
                f"{name}: found {value!r}: {hint or 'torch.utils.data.DataLoader has no such option'}"
            )
    checked = {
        name: value for name, value in options.items() if name != "collate_fn" or value is not None
    }
    checked["num_workers"] = whole_number("num_workers", checked.get("num_workers", 0), least=0)
    if checked.get("prefetch_factor") is not None:
        whole_number("prefetch_factor", checked["prefetch_factor"], least=1)
    if "collate_fn" in checked and not callable(checked["collate_fn"]):
        raise ConfigError(
            f"collate_fn: found {checked['collate_fn']!r}, expected a function that takes a list of samples"
        )
    if not checked.get("in_order", True):
        raise ConfigError(
            "in_order: found False, expected True: a saved state only counts the samples consumed so far, so batches "
            "must arrive in order"
        )
    if checked.get("pin_memory") and not (
        torch.cuda.is_available() or torch.accelerator.is_available()
    ):
        raise ConfigError(
            "pin_memory: found True, but torch finds no CUDA device; remove the option"
        )
    checked.setdefault("pin_memory", torch.cuda.is_available())
    return checked

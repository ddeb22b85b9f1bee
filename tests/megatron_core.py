"""The installed megatron-core's compiled helpers, and its functions of gpt_dataset."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def megatron(module: str) -> Any:
    """A module of megatron.core.datasets; what others say while it is imported is not our concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.datasets.{module}")

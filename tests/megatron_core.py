"""The installed megatron-core's compiled helpers, and its functions of gpt_dataset."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest


def megatron(module: str) -> Any:
    """A module of megatron.core.datasets, without the warnings of its import. Where it is not installed, the test is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        return importlib.import_module(f"megatron.core.datasets.{module}")

"""megablend: index builder and blended sampler for LLM pretraining.

    megablend.build("demo.yaml")                        # alone, or on every rank under mpirun: `megablend build demo.yaml`
    dataset = megablend.open("demo.yaml", split="train")
    loader = megablend.Loader(dataset, micro_batch_size=8, data_parallel_rank=0, data_parallel_size=1)
    for batch in loader: ...                            # GPTDataset's dict; loader.state_dict() goes into the checkpoint

Names are loaded when they are first used: `build` never imports torch, the training side never imports MPI.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megablend.api.amend import amend
    from megablend.api.build import build, build_index
    from megablend.api.build_results import BuildResult, BuiltIndex
    from megablend.api.check import CheckResult, check
    from megablend.api.describe import describe
    from megablend.api.diff import diff
    from megablend.api.export import export
    from megablend.api.find import find
    from megablend.api.gc import gc
    from megablend.api.manage_runs import list_runs, remove_run, rename_run, reset_run, show_run
    from megablend.api.open import open_dataset as open
    from megablend.api.runs import open_index
    from megablend.api.show import show, show_step
    from megablend.api.skip import list_skips, skip, unskip
    from megablend.api.verify import verify
    from megablend.blocks.block_batch import BlockBatch
    from megablend.blocks.block_store import BlockStore
    from megablend.config import Config, load_config
    from megablend.errors import (
        CacheError,
        ConfigError,
        DataError,
        LaunchError,
        MegablendError,
        PlanError,
        ResourceError,
        StateError,
        TransformError,
    )
    from megablend.reader import Dataset, Loader, PretrainingSampler

__version__ = "0.1.0"

_HOMES = {
    "amend": "megablend.api.amend",
    "build": "megablend.api.build",
    "BuildResult": "megablend.api.build_results",
    "check": "megablend.api.check",
    "CheckResult": "megablend.api.check",
    "BuiltIndex": "megablend.api.build_results",
    "build_index": "megablend.api.build",
    "describe": "megablend.api.describe",
    "diff": "megablend.api.diff",
    "export": "megablend.api.export",
    "find": "megablend.api.find",
    "gc": "megablend.api.gc",
    "list_runs": "megablend.api.manage_runs",
    "remove_run": "megablend.api.manage_runs",
    "rename_run": "megablend.api.manage_runs",
    "reset_run": "megablend.api.manage_runs",
    "show_run": "megablend.api.manage_runs",
    "open": "megablend.api.open",
    "open_index": "megablend.api.runs",
    "show": "megablend.api.show",
    "show_step": "megablend.api.show",
    "Config": "megablend.config",
    "load_config": "megablend.config",
    "BlockStore": "megablend.blocks.block_store",
    "BlockBatch": "megablend.blocks.block_batch",
    "skip": "megablend.api.skip",
    "list_skips": "megablend.api.skip",
    "unskip": "megablend.api.skip",
    "verify": "megablend.api.verify",
    "Dataset": "megablend.reader",
    "Loader": "megablend.reader",
    "PretrainingSampler": "megablend.reader",
    "CacheError": "megablend.errors",
    "ConfigError": "megablend.errors",
    "DataError": "megablend.errors",
    "LaunchError": "megablend.errors",
    "MegablendError": "megablend.errors",
    "PlanError": "megablend.errors",
    "ResourceError": "megablend.errors",
    "StateError": "megablend.errors",
    "TransformError": "megablend.errors",
}

__all__ = [
    "BlockBatch",
    "BlockStore",
    "BuildResult",
    "BuiltIndex",
    "CacheError",
    "CheckResult",
    "Config",
    "ConfigError",
    "DataError",
    "Dataset",
    "LaunchError",
    "Loader",
    "MegablendError",
    "PlanError",
    "PretrainingSampler",
    "ResourceError",
    "StateError",
    "TransformError",
    "amend",
    "build",
    "build_index",
    "check",
    "describe",
    "diff",
    "export",
    "find",
    "gc",
    "list_runs",
    "list_skips",
    "load_config",
    "open",
    "open_index",
    "remove_run",
    "rename_run",
    "reset_run",
    "show",
    "show_run",
    "show_step",
    "skip",
    "unskip",
    "verify",
]


_RENAMED = {"Built": "BuildResult", "Pages": "BlockBatch"}
"""Names of release 0.1.0, kept for one more release."""


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(
            f"megablend.{name} is now called megablend.{_RENAMED[name]}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        name = _RENAMED[name]
    if name not in _HOMES:
        raise AttributeError(f"module 'megablend' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), "open_dataset" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

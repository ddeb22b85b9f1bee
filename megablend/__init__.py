"""megablend: index builder and blended sampler for LLM pretraining.

    megablend.build("demo.yaml")                        # alone, or on every rank under mpirun: `megablend build demo.yaml`
    dataset = megablend.open("demo.yaml", split="train")
    loader = megablend.Loader(dataset, micro_batch_size=8, data_parallel_rank=0, data_parallel_size=1)
    for batch in loader: ...                            # GPTDataset's dict; loader.state_dict() goes into the checkpoint

Names are loaded when they are first used: `build` never imports torch, the training side never imports MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from megablend.index.blocks.block_store import BlockBatch, BlockStore
    from megablend.inspect.describe import describe
    from megablend.inspect.diff import diff
    from megablend.inspect.export import export
    from megablend.inspect.find import find
    from megablend.inspect.show import show, show_step
    from megablend.operations.amend import amend
    from megablend.operations.build import build, build_index
    from megablend.operations.build_results import BuildResult, BuiltIndex
    from megablend.operations.check import CheckResult, check
    from megablend.operations.gc import gc
    from megablend.operations.manage_runs import (
        list_runs,
        remove_run,
        rename_run,
        reset_run,
        show_run,
    )
    from megablend.operations.open import open_dataset, open_index
    from megablend.operations.skip import list_skips, skip, unskip
    from megablend.operations.verify import verify
    from megablend.reader import Dataset, Loader, PretrainingSampler

    open = open_dataset

__version__ = "0.2.0"

_MODULES = {
    "operations.amend": "amend",
    "operations.build": "build build_index",
    "operations.build_results": "BuildResult BuiltIndex",
    "operations.check": "CheckResult check",
    "inspect.describe": "describe",
    "inspect.diff": "diff",
    "inspect.export": "export",
    "inspect.find": "find",
    "operations.gc": "gc",
    "operations.manage_runs": "list_runs remove_run rename_run reset_run show_run",
    "operations.open": "open open_index",
    "inspect.show": "show show_step",
    "operations.skip": "list_skips skip unskip",
    "operations.verify": "verify",
    "index.blocks.block_store": "BlockBatch BlockStore",
    "config": "Config load_config",
    "errors": "CacheError ConfigError DataError LaunchError MegablendError PlanError ResourceError StateError TransformError",
    "reader": "Dataset Loader PretrainingSampler",
}
"""The public names of each module."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
"""The module of each public name."""

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
"""All public names but `open`, so that `from megablend import *` does not hide the built-in one."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megablend' has no attribute {name!r}")
    return getattr(
        importlib.import_module(f"megablend.{_HOMES[name]}"),
        "open_dataset" if name == "open" else name,
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

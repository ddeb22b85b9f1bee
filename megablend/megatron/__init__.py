"""Build Megatron-LM's dataset cache on all ranks, byte for byte as Megatron does; and replace
Megatron's dataset builder.

    megablend.megatron.prepare(config, sizes)               # on every rank: fills the cache that training will find
    MegablendDatasetBuilder(GPTDataset, sizes, is_built_on_rank, config).build()         # in the training script

Names are loaded when they are first used: `prepare` needs neither torch nor megatron-core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megablend.megatron.api import prepare
    from megablend.megatron.plugin.builder import MegablendDatasetBuilder
    from megablend.megatron.plugin.config import MegablendDatasetConfig
    from megablend.megatron.plugin.dataset import MegablendGPTDataset

__all__ = ["MegablendDatasetBuilder", "MegablendDatasetConfig", "MegablendGPTDataset", "prepare"]

_MODULES = {
    "MegablendDatasetBuilder": "megablend.megatron.plugin.builder",
    "MegablendDatasetConfig": "megablend.megatron.plugin.config",
    "MegablendGPTDataset": "megablend.megatron.plugin.dataset",
    "prepare": "megablend.megatron.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'megablend.megatron' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)

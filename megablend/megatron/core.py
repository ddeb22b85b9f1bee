"""The classes of megatron-core that ours extend,
imported without warnings of GPU libraries; and its version."""

from __future__ import annotations

import contextlib
import sys
import warnings
from functools import cache
from importlib import metadata
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "GPTDataset",
    "GPTDatasetConfig",
    "Split",
    "installed_version",
]


@cache
def installed_version() -> str:
    """Version of the imported megatron-core. A source checkout has no metadata, or takes precedence
    over an installed release."""
    core: Any = sys.modules["megatron.core"]
    version = getattr(core, "__version__", None)
    if version is None:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version("megatron-core")
    return str(version or "of unknown version")

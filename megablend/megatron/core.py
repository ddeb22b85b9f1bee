"""The classes of megatron-core that the plugin extends, imported without the warnings of GPU
libraries; and the installed version."""

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
    """Return the version of the imported megatron-core."""
    # Not from the metadata: a source checkout has none, or takes precedence over a release
    core: Any = sys.modules["megatron.core"]
    version = getattr(core, "__version__", None)
    if version is None:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version("megatron-core")
    return str(version or "of unknown version")

"""The classes of megatron-core that ours extend, imported without the warnings of GPU libraries that a CPU does without."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

__all__ = ["BlendedMegatronDatasetBuilder", "GPTDataset", "GPTDatasetConfig", "Split"]

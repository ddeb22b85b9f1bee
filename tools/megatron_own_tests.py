"""A pytest plugin that runs Megatron-LM's own tests of its datasets on a CPU, with megablend's classes in the place of its own.

    python -m pytest -p megatron_own_tests tests/unit_tests/data/test_builder.py     # in a checkout of Megatron-LM

The environment variable MEGABLEND_IN_PLACE chooses the classes: `none` (Megatron's own, to compare with), `builder`, or `all`
(builder, dataset and config). tools/try_megatron_versions.py runs it.
"""

from __future__ import annotations

import os
import typing
import warnings
from typing import Any

import torch
import typing_extensions

warnings.simplefilter("ignore")

CHOICES = ("none", "builder", "all")


def run_without_gpu() -> None:
    """Let tests that ask for a GPU and NCCL have a CPU and gloo; they use neither for datasets."""
    start: Any = torch.distributed.init_process_group
    setattr(typing, "override", typing_extensions.override)  # noqa: B010  # Megatron-LM means Python 3.12
    setattr(torch.cuda, "set_device", lambda device: None)  # noqa: B010
    setattr(torch.cuda, "device_count", lambda: 1)  # noqa: B010
    setattr(  # noqa: B010
        torch.distributed, "init_process_group", lambda backend, **options: start("gloo", **options)
    )
    from megatron.core import utils
    from packaging.version import Version

    # Versions up to 0.16 compare it without asking whether there is one
    utils._te_version = Version("0")


def put_in_place(choice: str) -> None:
    """Replace Megatron's classes in the modules that tests and scripts import them from."""
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

    from megablend.megatron import (
        MegablendDatasetBuilder,
        MegablendDatasetConfig,
        MegablendGPTDataset,
    )

    if choice != "none":
        blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder = MegablendDatasetBuilder
    if choice == "all":
        gpt_dataset.GPTDataset = MegablendGPTDataset
        gpt_dataset.GPTDatasetConfig = MegablendDatasetConfig


run_without_gpu()
put_in_place(CHOICES[CHOICES.index(os.environ.get("MEGABLEND_IN_PLACE", "none"))])

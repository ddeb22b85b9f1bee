"""What a training script imports with the plugin's classes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset
before = {name.partition(".")[0] for name in sys.modules}
from megablend.megatron import MegablendDatasetBuilder, MegablendDatasetConfig, MegablendGPTDataset
print(*sorted({name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names))
"""


def test_the_classes_import_nothing_large_but_megatron_and_torch() -> None:
    """numba, pyarrow, pydantic and their like take a second; building and reading import them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.stdout, done.returncode) == ("megablend\n", 0), done.stderr

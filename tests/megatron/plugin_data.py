"""The same documents in every format, and configs of the plugin over them."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megablend.megatron.plugin.config import MegablendDatasetConfig
from tests.formats.writers import KINDS
from tests.megatron.reference import Tokenizer
from tests.preloaded import python

ROOT = Path(__file__).parent.parent.parent
DRIVER = Path(__file__).with_name("plugin_driver.py")
LAUNCHERS = (
    "PMI",
    "MPI_",
    "OMPI_",
    "SLURM_",
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "TORCHELASTIC_",
)
PARQUET = {
    "parquet": "parquet",
    "parquet-v2-unindexed": "parquet",
    "arrow": "arrow",
    "arrow-lz4": "arrow",
}


def draw_documents(seed: int, num_documents: int = 200) -> list[list[int]]:
    """Documents of no token, of one, and of many pages."""
    rng = random.Random(seed)
    sizes = [
        rng.choice([0, 1, rng.randrange(40), rng.randrange(40), rng.randrange(400)])
        for _ in range(num_documents)
    ]
    return [[rng.randrange(1, 40_000) for _ in range(size)] for size in sizes]


def write_word(
    folder: Path, kind: str, documents: Sequence[Sequence[int]], eod: int | None = None
) -> str:
    """Write documents as a format's files; how a blend calls them. A pair has its end-of-document tokens written out."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "megatron":
        ended = [
            [*document, eod] if document and eod is not None else document for document in documents
        ]
        KINDS[kind].write(folder / "pair.bin", ended)
        return str(folder / "pair")
    middle = len(documents) // 3
    for i, part in enumerate((documents[:middle], documents[middle:])):
        KINDS[kind].write(folder / f"{i}{KINDS[kind].suffix}", part)
    option = "" if eod is None else f"&append_eod={eod}"
    return f"{PARQUET[kind]}:{folder}/*{KINDS[kind].suffix}?column=ids{option}"


def plugin_config(cache: Path, **options: Any) -> MegablendDatasetConfig:
    """megablend's config with what a test does not care about filled in."""
    filled = {
        "random_seed": 1234,
        "sequence_length": 16,
        "path_to_cache": str(cache),
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    return MegablendDatasetConfig(**{**filled, **options})


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Options without those that the installed version lacks and that are off; skips the test where one is on."""
    names = {field.name for field in fields(MegablendDatasetConfig)}
    missing = {name: value for name, value in options.items() if name not in names}
    if any(missing.values()):
        pytest.skip(f"the installed version has no {', '.join(missing)}")
    return {name: value for name, value in options.items() if name in names}


def assert_same_samples(found: Any, expected: Any, step: int = 1) -> None:
    """Two datasets hold the same dicts of tensors, bit for bit: every `step`-th one."""
    assert len(found) == len(expected) > 0
    numbers = range(0, len(expected), step)
    for k in [*numbers, None] if not hasattr(expected, "datasets") else numbers:
        ours = found[k]
        theirs = expected[k]
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_same_values(ours[name], value, (k, name))
    if hasattr(found, "__getitems__"):
        wanted = [*numbers, -1, 0]
        batch = found.__getitems__(wanted)
        for k, ours in zip(wanted, batch, strict=True):
            theirs = expected[k]
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                assert_same_values(ours[name], value, (k, name))
        own = {
            sample[name].data_ptr()
            for sample in batch
            for name in ("tokens", "labels", "loss_mask")
        }
        assert len(own) == 3 * len(batch)


def assert_same_values(found: Any, expected: Any, where: tuple[Any, str]) -> None:
    """Two values of samples have one type, dtype, shape and layout, and are equal."""
    assert type(found) is type(expected), where
    assert found.dtype == expected.dtype, where
    if isinstance(expected, torch.Tensor):
        assert found.is_contiguous() == expected.is_contiguous(), where
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), where


def environment(**extra: object) -> dict[str, str]:
    """The environment without what a launcher of the tests themselves may have left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in extra.items()},
    }


def launcher(name: str, num_ranks: int) -> list[str]:
    """What comes before the driver's own arguments."""
    if name == "torchrun":
        run = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_ranks}",
            "--no-python",
        ]
        return [*python("torch"), *run, *python("megatron"), str(DRIVER)]
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return [
        shutil.which("mpirun", path=beside) or "mpirun",
        "-n",
        str(num_ranks),
        *python("megatron"),
        str(DRIVER),
    ]

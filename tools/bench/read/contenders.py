"""Loaders of token samples, each as its users run it: batches of [8, 2048] tokens as torch tensors, in the process that asks.

Each is a function that gets ready (imports, and a cluster where one is needed) and returns a function that opens the data and
iterates over batches. It is run in a process of its own, by whichever Python has the package; nothing here imports one that it
does not use. All but Megatron-core's and megablend's give tokens alone; these two give GPTDataset's dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

LENGTH = 2048
BATCH = 8
BUFFER_ROWS = 10_000
"""Of shuffle buffers, as REIMU's and Youmu's comparisons have it."""

Open = Callable[[], Iterator[Tensor]]


def pyarrow_scan(folder: Path) -> Open:
    """Documents from front to back, cut into samples; nothing is shuffled."""
    import pyarrow.parquet as pq

    def batches() -> Iterator[Tensor]:
        left = np.empty(0, np.int32)
        for path in sorted(folder.glob("*.parquet")):
            with pq.ParquetFile(path) as file:
                for part in file.iter_batches(batch_size=1024):
                    left = np.concatenate([left, part.column(0).flatten().to_numpy()])
                    whole = len(left) // (BATCH * LENGTH) * BATCH * LENGTH
                    yield from torch.from_numpy(left[:whole].astype(np.int64)).view(
                        -1, BATCH, LENGTH
                    )
                    left = left[whole:]

    return batches


def megablend_order(order: str) -> Callable[[Path], Open]:
    """megablend's loader, in one of its orders."""

    def ready(folder: Path) -> Open:
        import megablend

        def batches() -> Iterator[Tensor]:
            dataset = megablend.open(folder / f"{order}.json")
            for batch in megablend.Loader(dataset, micro_batch_size=BATCH):
                yield batch["tokens"]

        return batches

    return ready


def hf_map(folder: Path) -> Open:
    """Hugging Face datasets: memory-mapped Arrow, shuffled by an indices mapping, read by a DataLoader."""
    import datasets

    def batches() -> Iterator[Tensor]:
        parts = [
            datasets.Dataset.from_file(str(path)) for path in sorted(folder.glob("[0-9]*.arrow"))
        ]
        rows = datasets.concatenate_datasets(parts).shuffle(seed=0).with_format("torch")
        for batch in DataLoader(rows, batch_size=BATCH, drop_last=True):
            yield batch["tokens"]

    return batches


def hf_streaming(folder: Path) -> Open:
    """Hugging Face datasets: Parquet as a stream through a shuffle buffer."""
    import datasets

    def batches() -> Iterator[Tensor]:
        paths = [str(path) for path in sorted(folder.glob("*.parquet"))]
        rows = datasets.load_dataset(
            "parquet",
            data_files=paths,
            split="train",
            streaming=True,
            cache_dir=str(folder / "cache"),
        )
        rows = rows.shuffle(seed=0, buffer_size=BUFFER_ROWS).with_format("torch")
        for batch in DataLoader(rows, batch_size=BATCH, drop_last=True):
            yield batch["tokens"]

    return batches


def ray_data(folder: Path) -> Open:
    """Ray Data: Parquet in random order of blocks, through a local shuffle buffer."""
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(num_cpus=2, object_store_memory=1 << 30, **options)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def batches() -> Iterator[Tensor]:
        rows = ray.data.read_parquet(str(folder)).randomize_block_order(seed=0)
        arrow = {
            "batch_format": "pyarrow",
            "local_shuffle_buffer_size": BUFFER_ROWS,
            "local_shuffle_seed": 0,
        }
        for batch in rows.iter_batches(batch_size=BATCH, drop_last=True, **arrow):
            values = batch["tokens"].combine_chunks().flatten().to_numpy()
            yield torch.from_numpy(values.astype(np.int64)).view(BATCH, LENGTH)

    return batches


def mosaicml_streaming(folder: Path) -> Open:
    """MosaicML Streaming: MDS shards, shuffled as it does by default, read by a DataLoader."""
    import streaming

    def batches() -> Iterator[Tensor]:
        rows = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
        for batch in DataLoader(rows, batch_size=BATCH, drop_last=True):
            yield batch["tokens"]

    return batches


def megatron_core(folder: Path) -> Open:
    """Megatron-core's GPTDataset over `.bin/.idx`, its indices built beforehand, read by a DataLoader in sample order."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size = 50_001
        pad = 50_001
        eod = 0
        eos = 0

        def __init__(self) -> None:
            self.unique_identifiers = OrderedDict([("class", "none")])

    def batches() -> Iterator[Tensor]:
        config = GPTDatasetConfig(
            random_seed=1234,
            sequence_length=LENGTH,
            path_to_cache=str(folder / "indices"),
            tokenizer=Tokenizer(),
            blend=([str(folder / "tokens")], None),
            split="1,0,0",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        dataset: Any = BlendedMegatronDatasetBuilder(
            GPTDataset, [None, 0, 0], lambda: True, config
        ).build()[0]
        for batch in DataLoader(dataset, batch_size=BATCH, drop_last=True):
            yield batch["tokens"]

    return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A loader and what it needs."""

    ready: Callable[[Path], Open]
    package: str
    """What has to be importable."""
    data: str
    """Which copy of the data it reads; see peers_data."""


CONTENDERS = {
    "pyarrow, sequential scan": Contender(ready=pyarrow_scan, package="pyarrow", data="parquet-1"),
    "megablend, sequential": Contender(
        ready=megablend_order("sequential"), package="megablend", data="parquet-1"
    ),
    "megablend, page order, 1 source": Contender(
        ready=megablend_order("page"), package="megablend", data="parquet-1"
    ),
    "megablend, page order, 10 sources": Contender(
        ready=megablend_order("page"), package="megablend", data="parquet-10"
    ),
    "megablend, page order, 100 sources": Contender(
        ready=megablend_order("page"), package="megablend", data="parquet-100"
    ),
    "megablend, row order": Contender(
        ready=megablend_order("row"), package="megablend", data="parquet-1"
    ),
    "Hugging Face datasets, map-style, shuffled": Contender(
        ready=hf_map, package="datasets", data="arrow"
    ),
    "Hugging Face datasets, streaming, buffer of 10,000": Contender(
        ready=hf_streaming, package="datasets", data="rows"
    ),
    "Ray Data, buffer of 10,000": Contender(ready=ray_data, package="ray", data="rows"),
    "MosaicML Streaming": Contender(ready=mosaicml_streaming, package="streaming", data="mds"),
    "Megatron-core": Contender(ready=megatron_core, package="megatron.core", data="bin"),
}

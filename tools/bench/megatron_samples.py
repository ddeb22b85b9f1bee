"""Samples of a `.bin/.idx` pair, or of a blend of several: Megatron's GPTDataset against MegablendGPTDataset.

    python tools/bench/megatron_samples.py [--pairs 1] [--rounds 5] [--parquet]

One process, the page cache full, samples in order; CPU time a sample, in turns. Medians of the rounds, and of their ratios.
With `--parquet` ours are Parquet files of the same documents, in megablend's block order; also by a Loader, which reads ahead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402

from megablend import Loader  # noqa: E402
from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset  # noqa: E402
from tests.megatron.plugin_data import plugin_config  # noqa: E402
from tests.megatron.reference import config_of, megatron_build, process_group  # noqa: E402
from tests.pairs import write_pair  # noqa: E402

BATCH = 8
DOCUMENT_TOKENS = 1_100


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parquet", action="store_true")
    parser.add_argument("--samples", type=int, default=4_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, process_group(Path(name)):
        for length in (1_024, 4_096):
            race(Path(name) / f"{length}", length, options)


def race(folder: Path, length: int, options: argparse.Namespace) -> None:
    """Print what a sample of `length` tokens takes."""
    lengths = [DOCUMENT_TOKENS // 2 + 37 * k % DOCUMENT_TOKENS for k in range(3_000)]
    prefixes = []
    for number in range(options.pairs):
        (folder / f"{number}").mkdir(parents=True)
        prefixes.append(write_pair(folder / f"{number}" / "pair", lengths))
    sizes = [options.samples, 0, 0]
    blend: dict[str, Any] = {"blend": (prefixes, None), "split": "1", "sequence_length": length}
    theirs = megatron_build(config_of(folder / "theirs", **blend), sizes)[0]
    if options.parquet:
        blend |= {
            "blend": ([write_parquet(Path(prefix), lengths) for prefix in prefixes], None),
            "order": "block",
        }
    config = plugin_config(folder / "ours", **blend)
    ours = MegablendDatasetBuilder(MegablendGPTDataset, sizes, lambda: True, config).build()[0]
    ways: dict[str, Callable[[], float]] = {
        "Megatron [k]": lambda: seconds(one_by_one, theirs, options.samples),
        "megablend [k]": lambda: seconds(one_by_one, ours, options.samples),
        "megablend __getitems__": lambda: seconds(by_batch, ours, options.samples),
    }
    if options.parquet:
        ways["megablend Loader"] = lambda: seconds(by_loader, ours, options.samples)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):  # the first warms the page cache and compiles
        for name, way in ways.items():
            if turn:
                taken[name].append(way())
            else:
                way()
    reference = taken["Megatron [k]"]
    for name, found in taken.items():
        ratios = [one / other for one, other in zip(found, reference, strict=True)]
        cost = statistics.median(found) * 1e6
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{options.pairs} pairs, {length:,} tokens, {name:24} {cost:7.1f} us, ratio {spread}",
            flush=True,
        )


def seconds(way: Callable[[Any, int], None], dataset: Any, samples: int) -> float:
    """CPU seconds a sample."""
    begun = time.process_time()
    way(dataset, samples)
    return (time.process_time() - begun) / samples


def one_by_one(dataset: Any, samples: int) -> None:
    """Read samples by `dataset[k]`."""
    for k in range(samples):
        dataset[k]


def by_batch(dataset: Any, samples: int) -> None:
    """Read samples by `__getitems__`, as torch's DataLoader does."""
    for k in range(0, samples, BATCH):
        dataset.__getitems__(list(range(k, min(samples, k + BATCH))))


def by_loader(dataset: Any, samples: int) -> None:
    """Read samples ahead, as megablend's Loader does."""
    loader = Loader(
        dataset.dataset, micro_batch_size=BATCH, data_parallel_rank=0, data_parallel_size=1
    )
    for _ in zip(range(0, samples, BATCH), loader, strict=False):
        pass


def write_parquet(prefix: Path, lengths: list[int]) -> str:
    """The tokens of a pair as a Parquet file, in pages of 64 KiB; returns the address."""
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    tokens = pa.array(np.fromfile(f"{prefix}.bin", "<u2").astype(np.int32))
    table = pa.table({"ids": pa.ListArray.from_arrays(pa.array(ends), tokens)})
    pq.write_table(
        table,
        f"{prefix}.parquet",
        data_page_size=64 << 10,
        write_page_index=True,
        use_dictionary=False,
    )
    return f"parquet:{prefix}.parquet?column=ids"


if __name__ == "__main__":
    main()

"""How much more than the pages used is read, predicted and measured, with pages of 64 KB and samples of 4k tokens.

Claims, where lanes match (8 lanes = micro batch x ranks): at most 1.05 for 1 and 10 sources, 1.15 for 100. `predicted` is what
`megablend describe` says, `measured` what real loaders of all ranks read of pages, over --cycles cycles of 8 x 512 samples.

    python tools/bench/read/amplification.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from pipeline import make_corpus

import megablend
from megablend.prefetch.read_amplification import read_amplification
from megablend.storage.base import Allocate, Bytes, Int64s
from megablend.storage.by_scheme import make_storage
from megablend.storage.wrapper import WrapperStorage

LANES = 8
CYCLE = 512
SAMPLE_TOKENS = 4096


class CountingStorage(WrapperStorage):
    """Local files; bytes of pages that are read are counted."""

    def __init__(self) -> None:
        super().__init__(make_storage())
        self.bytes = 0

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """Pages."""
        self.bytes += int(sizes.sum())
        return super().read_ranges(path, offsets, sizes, allocate)


def measured(config: dict[str, Any], micro_batch: int, ranks: int) -> float:
    """Bytes that the loaders of all ranks read, over those of the blocks used."""
    counting = CountingStorage()
    for rank in range(ranks):
        loader = megablend.Loader(
            megablend.open(config, storage=counting),
            micro_batch_size=micro_batch,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            drop_last=False,
        )
        for _ in loader:
            pass
    run = megablend.open(config).run
    spans = run.locate_spans(*run.plan.locate_many(np.arange(run.num_samples)))
    pairs = np.unique(np.stack([spans.epochs, spans.blocks]), axis=1)
    return counting.bytes / int(
        run.store.snapshot.blocks(pairs[1])["stored_bytes"].sum(dtype=np.int64)
    )


def main() -> None:
    """Make corpora, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument(
        "--mib",
        type=int,
        help="of tokens, 4 bytes each, in all sources together; default: one pass",
    )
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument(
        "--folder", help="where the corpora are made; a temporary folder where absent"
    )
    args = parser.parse_args()
    samples = args.cycles * LANES * CYCLE
    # More passes would find pages in memory that the last one read
    mib = args.mib or 1 + (samples * SAMPLE_TOKENS >> 18)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in args.sources:
            config = make_corpus(Path(folder) / str(number), number, mib)
            config |= {
                "sequence_length": SAMPLE_TOKENS,
                "lanes": LANES,
                "shuffle_window": CYCLE,
                "samples": samples,
            }
            megablend.build(config)
            run = megablend.open(config).run
            for micro_batch, ranks in ((8, 1), (1, 8), (4, 3)):
                predicted = read_amplification(
                    run,
                    micro_batch_size=micro_batch,
                    data_parallel_size=ranks,
                    num_workers=0,
                    stop=samples,
                )
                matches = "match" if LANES % (micro_batch * ranks) == 0 else "do not match"
                print(
                    f"{number:4} sources, micro batch {micro_batch} x {ranks} ranks (lanes {matches}): "
                    f"predicted {predicted:.4f}, measured {measured(config, micro_batch, ranks):.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

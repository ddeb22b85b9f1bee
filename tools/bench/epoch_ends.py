"""What it costs that a source's epoch ends before its next one begins, and what is gained.

Runs of equal sources, each read over and over; a rank holds each lane. "Before" is version 1 of the plan, in which runs of
neighbours do not end with an epoch; "after" is version 2. Simulated from the plan alone, without files:

- amplification: blocks read by all lanes / blocks used. A lane keeps the block it stands in.
- early: samples of the next epoch among the first epoch's worth of a source's samples, the most of any epoch and source, in
  percent of an epoch. As many samples were then not yet read.

    python tools/bench/epoch_ends.py [--lanes 8 64 512] [--sources 1 10 100] [--epoch-samples 2000 20000]
"""

from __future__ import annotations

import argparse
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megablend.blend.allocate import cycles_per_run
from megablend.blend.interleavings.base import StageRequest
from megablend.blend.interleavings.lanes import LanePlan

SAMPLE_TOKENS = 4096


def measure(
    plan: LanePlan, lanes: int, epoch_samples: int, block_tokens: int
) -> tuple[float, float]:
    """(amplification, early) of all samples of a plan of sources with epochs of that many samples."""
    ks = np.arange(plan.num_samples)
    sources, ordinals = plan.locate_many(ks)
    first_tokens = ordinals * SAMPLE_TOKENS
    touched = [
        (first_tokens + offset) // block_tokens
        for offset in range(0, SAMPLE_TOKENS + 1, block_tokens)
    ]
    touched.append((first_tokens + SAMPLE_TOKENS) // block_tokens)
    blocks = np.stack(touched) + (sources.astype(np.int64) << 40)
    read = len(np.unique(blocks * lanes + ks % lanes))
    early = max(
        _most_early(ordinals[sources == source], epoch_samples)
        for source in range(plan.num_sources)
    )
    return read / len(np.unique(blocks)), 100 * early / epoch_samples


def _most_early(ordinals: npt.NDArray[np.int64], epoch_samples: int) -> int:
    worth = range(epoch_samples, len(ordinals) + 1, epoch_samples)
    return max(int((ordinals[:count] >= count).sum()) for count in worth)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lanes", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--epoch-samples", type=int, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--block-tokens", type=int, default=16_384, help="64 KiB of int32")
    args = parser.parse_args()
    print(
        "| lanes | sources | samples of an epoch | amplification, before | after | early, % of an epoch, before | after |"
    )
    print("|---|---|---|---|---|---|---|")
    for lanes in args.lanes:
        for number in args.sources:
            for epoch_samples in args.epoch_samples:
                share = Fraction(1, number)
                span = cycles_per_run(args.block_tokens, share, SAMPLE_TOKENS, args.slots)
                results = [
                    measure(
                        LanePlan(
                            StageRequest(
                                totals=np.full(
                                    number, args.epochs * epoch_samples + epoch_samples // 2
                                ),
                                first_tokens=np.zeros(number, np.int64),
                                lanes=lanes,
                                shuffle_window=args.slots,
                                cycles=np.full(number, span),
                                seed=1,
                                epoch_tokens=epoch_tokens,
                                sample_tokens=SAMPLE_TOKENS,
                            )
                        ),
                        lanes,
                        epoch_samples,
                        args.block_tokens,
                    )
                    for epoch_tokens in (None, np.full(number, epoch_samples * SAMPLE_TOKENS))
                ]
                (amplified, early), (now_amplified, now_early) = results
                print(
                    f"| {lanes} | {number} | {epoch_samples:,} | {amplified:.2f} | {now_amplified:.2f} "
                    f"| {early:.1f} | {now_early:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

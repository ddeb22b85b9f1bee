"""Two billion samples over a thousand datasets: the blend of a long run, made whole, in pieces that fit into memory.

Claims: Megatron's greedy blend, bit for bit, in 3 minutes on two cores, within 12 GiB; and the plan that needs no arrays, ready
in 10 ms. Megatron's own helper is measured on a part and extrapolated, and that part is compared with ours. The CRC-32 sum of
the greedy blend's bytes is printed: it does not depend on the number of threads.

    python tools/bench/two_billion.py [--samples 2000000000] [--datasets 1000] [--threads 2] [--only plan greedy]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import zlib
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megablend.blend.allocate import largest_remainder
from megablend.blend.interleavings.base import StageRequest
from megablend.blend.interleavings.lanes import LanePlan
from megablend.megatron.exact.greedy import Greedy, greedy

PIECE = 1 << 25
BATCH = 1 << 16
KINDS = ("plan", "greedy")


def in_pieces(name: str, blend: Greedy, threads: int) -> int:
    """Draw a whole blend piece by piece; print time, memory and a checksum, which is returned."""
    processor = 0.0
    wall = 0.0
    checksum = 0
    while blend.step < blend.size:
        count = min(PIECE, blend.size - blend.step)
        before = time.process_time(), time.perf_counter()
        datasets, samples = blend.draw(count, threads=threads)
        processor = processor + time.process_time() - before[0]
        wall = wall + time.perf_counter() - before[1]
        checksum = zlib.crc32(samples.data, zlib.crc32(datasets.data, checksum))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rates = f"{1e9 * processor / blend.size:.1f} ns a sample"
    print(
        f"{name}: CPU {processor:.1f} s ({rates}), wall {wall:.1f} s, peak {memory:.1f} GiB, CRC-32 {checksum:08x}",
        flush=True,
    )
    return checksum


def extrapolate(weights: npt.NDArray[np.float64], part: int, samples: int) -> None:
    """Time Megatron's helper on the first `part` samples of `samples`; see that ours are the same."""
    from megatron.core.datasets import helpers_cpp

    theirs = np.empty(part, np.int16), np.empty(part, np.int64)
    start = time.process_time()
    helpers_cpp.build_blending_indices(*theirs, weights, len(weights), part, False)
    seconds = time.process_time() - start
    for one, other in zip(theirs, greedy(weights.tolist(), samples).draw(part), strict=True):
        np.testing.assert_array_equal(one, other)
    print(
        f"Megatron's greedy: CPU {seconds:.2f} s for {part:,} samples ({1e9 * seconds / part:.0f} ns a sample), so "
        f"{seconds * samples / part:,.0f} s for all, extrapolated; ours are the same there",
        flush=True,
    )


def plan(weights: npt.NDArray[np.float64], samples: int, rounds: int = 5) -> None:
    """Time the plan: until it is ready, and a sample by itself, in order and at random."""
    shares = [Fraction(weight) for weight in weights]

    def ready() -> LanePlan:
        totals = largest_remainder(shares, samples)
        zeros = np.zeros(len(totals), np.int64)
        return LanePlan(
            StageRequest(
                totals=np.array(totals),
                first_tokens=zeros,
                cycles=zeros + 1,
                seed=1,
                lanes=8,
                shuffle_window=64,
            )
        )

    def median(run: Callable[[], object]) -> float:
        run()  # loads the kernels
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    made = ready()
    size = min(BATCH, samples)
    middle = (samples - size) // 2
    alone = [k * (samples // 100) for k in range(100)]
    scattered = np.random.default_rng(0).integers(0, samples, size)
    initial = median(ready)
    ordered = median(lambda: made.locate_many(np.arange(middle, middle + size))) / size
    random = median(lambda: made.locate_many(scattered)) / size
    single = median(lambda: [made.locate(k) for k in alone]) / len(alone)
    print(
        f"plan: ready in {initial * 1e3:.1f} ms; {ordered * 1e9:.0f} ns a sample in order, {random * 1e9:.0f} at random, "
        f"in batches of {size:,}; {single * 1e6:.1f} us one at a time",
        flush=True,
    )


def main() -> None:
    """Print a line for each way to the blend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2_000_000_000)
    parser.add_argument("--datasets", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--part", type=int, default=2_000_000, help="samples that Megatron's helper is measured on"
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    weights = np.random.default_rng(0).random(options.datasets)
    weights /= weights.sum()
    print(
        f"{options.samples:,} samples over {options.datasets:,} datasets, {options.threads} threads"
    )
    if "plan" in options.only:
        plan(weights, options.samples)
    if "greedy" in options.only:
        extrapolate(weights, min(options.part, options.samples), options.samples)
        in_pieces("megablend's greedy", greedy(weights.tolist(), options.samples), options.threads)


if __name__ == "__main__":
    main()

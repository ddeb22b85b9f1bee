"""Mixers side by side: a thousand datasets blended by weight, in megablend's plan, Megatron's helper and what others install.

Columns: samples and datasets of the case; seconds until the first sample can be had; memory that this added; nanoseconds a
sample to learn in order where samples come from; and the worst prefix error, the most by which any dataset is ahead of or
behind its share after any number of samples: max over n and d of |count_d(n) - n * w_d|. Each mixer runs in a process of its
own, at a size that it bears; nothing here reads data. Time and memory of the others but Grain grow with the samples.

    python -m venv peers && peers/bin/pip install datasets grain mosaicml-streaming
    python tools/bench/mixers.py --peers peers/bin/python [--datasets 1000] [--scale 1]

A mixer that cannot be imported is named, with the reason. `--changes` measures runs whose blend changes twice: see
changing_mixers.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from changing_mixers import CHANGING_MIXERS, count_misread, split_stages

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.integer[Any]]
Mixer = Callable[[Doubles, int], tuple[Callable[[], Ids], int]]
"""Makes ready a blend of so many samples by weight; how to learn each sample's dataset, in order; samples that this tells."""


def worst_prefix_error(ids: Ids, weights: Doubles) -> float:
    """The most by which a dataset's count is off its share in any prefix of `ids` [n], the dataset of each sample."""
    order = np.argsort(ids, kind="stable")
    owners = ids[order]
    counts = np.bincount(ids, minlength=len(weights))
    # Of the same dataset
    before = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    shares = weights[owners]
    # a dataset is furthest behind just before a sample of its own or at the end, furthest ahead just after
    ends = np.abs(counts - len(ids) * weights)
    behind = order * shares - before
    ahead = before + 1 - (order + 1) * shares
    return float(max(ends.max(), behind.max(initial=0), ahead.max(initial=0)))


def megablend_plan(weights: Doubles, samples: int) -> tuple[Callable[[], Ids], int]:
    """Our plan: nothing a sample long; asked for batches of 4,096."""
    from fractions import Fraction

    from megablend.blend.allocate import largest_remainder
    from megablend.blend.interleavings.base import StageRequest
    from megablend.blend.interleavings.lanes import LanePlan

    totals = largest_remainder([Fraction(weight) for weight in weights], samples)
    zeros = np.zeros(len(totals), np.int64)
    plan = LanePlan(
        StageRequest(
            totals=np.array(totals),
            first_tokens=zeros,
            cycles=zeros + 1,
            seed=1,
            lanes=8,
            shuffle_window=64,
        )
    )
    evaluated = min(samples, 4_000_000)
    return lambda: np.concatenate(
        [
            plan.locate_many(np.arange(k, min(k + 4096, evaluated)))[0]
            for k in range(0, evaluated, 4096)
        ]
    ), evaluated


def megatron(weights: Doubles, samples: int) -> tuple[Callable[[], Ids], int]:
    """Megatron-core's helper: two arrays."""
    from megatron.core.datasets import helpers_cpp

    datasets = np.empty(samples, np.int16)
    numbers = np.empty(samples, np.int64)
    helpers_cpp.build_blending_indices(datasets, numbers, weights, len(weights), samples, False)
    return lambda: datasets.copy(), samples


def hugging_face(weights: Doubles, samples: int) -> tuple[Callable[[], Ids], int]:
    """datasets.interleave_datasets of map-style datasets: drawn at random."""
    import datasets

    sizes = np.ceil(1.5 * samples * weights).astype(int) + 50
    parts = [
        datasets.Dataset.from_dict({"dataset": np.full(size, d)}) for d, size in enumerate(sizes)
    ]
    mixed = datasets.interleave_datasets(parts, probabilities=weights.tolist(), seed=1)
    evaluated = min(samples, len(mixed))
    mixed = mixed.with_format("numpy")
    return lambda: np.concatenate(
        [mixed[k : k + 4096]["dataset"] for k in range(0, evaluated, 4096)]
    )[:evaluated], evaluated


def grain(weights: Doubles, samples: int) -> tuple[Callable[[], Ids], int]:
    """grain.MapDataset.mix: computed again for each sample."""
    from grain import MapDataset

    sizes = np.ceil(1.5 * samples * weights).astype(int) + 50
    edges = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    parts = [MapDataset.range(low, high) for low, high in pairwise(edges)]
    mixed = MapDataset.mix(parts, weights=weights.tolist())
    evaluated = min(samples, 10_000, len(mixed))
    return (
        lambda: np.searchsorted(edges, [mixed[k] for k in range(evaluated)], side="right") - 1,
        evaluated,
    )


def mosaicml(weights: Doubles, samples: int) -> tuple[Callable[[], Ids], int]:
    """StreamingDataset with a stream a dataset, shuffled: the whole order of an epoch, made by its rank 0."""
    found = importlib.util.find_spec("streaming")
    if found is None:
        raise ModuleNotFoundError("No module named 'streaming'")
    # The package's own __init__ wants torchvision and more, for its image and text datasets; the mixer does not.
    sys.modules["streaming"] = importlib.util.module_from_spec(found)
    from streaming.base import MDSWriter, Stream, StreamingDataset
    from streaming.base.batching import generate_work
    from streaming.base.world import World

    folder = tempfile.mkdtemp()
    streams = []
    for d, size in enumerate(np.ceil(samples * weights).astype(int)):
        with MDSWriter(out=f"{folder}/{d}", columns={"dataset": "int"}) as out:
            for _ in range(size):
                out.write({"dataset": d})
        streams.append(Stream(local=f"{folder}/{d}", proportion=float(weights[d])))
    MADE.append(time.perf_counter())  # data are there before a run begins
    mixed = StreamingDataset(
        streams=streams,
        epoch_size=samples,
        shuffle=True,
        batch_size=8,
        num_canonical_nodes=1,
        shuffle_block_size=1 << 18,
    )
    work = generate_work(mixed.batching_method, mixed, World.detect(), 0, 0).ravel()
    starts = np.asarray(mixed.sample_offset_per_stream)
    evaluated = work[work >= 0]
    return lambda: np.searchsorted(starts, evaluated, side="right") - 1, len(evaluated)


MADE: list[float] = []
"""When a mixer had made the data that it mixes, where that is no part of mixing."""
MIXERS: dict[str, tuple[Mixer, int, bool]] = {
    "megablend, plan": (megablend_plan, 2_000_000_000, False),
    "Megatron-core": (megatron, 4_000_000, False),
    "Hugging Face": (hugging_face, 1_000_000, True),
    "Grain": (grain, 1_000_000, True),
    "MosaicML Streaming": (mosaicml, 200_000, True),
}
"""By name: the mixer, samples that it can handle in a few seconds, whether it is one of the peers."""


def measure(name: str, num_datasets: int, scale: float) -> dict[str, float]:
    """Run a mixer in this process: twice, the first time small, for imports and kernels."""
    mixer, most, _ = MIXERS[name]
    weights = np.random.default_rng(0).random(num_datasets)
    weights /= weights.sum()
    mixer(weights[:2] / weights[:2].sum(), 100)[0]()
    samples = max(100, int(most * scale))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    MADE.clear()
    evaluate, evaluated = mixer(weights, samples)
    ready = time.perf_counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    ids = evaluate()
    done = time.perf_counter()
    return {
        "samples": samples,
        "ready s": ready - max([start, *MADE]),
        "memory MiB": memory / 1024,
        "ns a sample": (done - ready) / evaluated * 1e9,
        "evaluated": evaluated,
        "worst error": worst_prefix_error(ids, weights),
    }


def measure_changes(name: str, num_datasets: int, scale: float) -> dict[str, float]:
    """Run a mixer of a blend that changes twice in this process: twice, the first time small."""
    mixer, most, _ = CHANGING_MIXERS[name]
    rng = np.random.default_rng(0)
    weights = [each / each.sum() for each in rng.random((3, num_datasets))]
    mixer(weights, 64)
    samples = max(64, int(most * scale))
    run = mixer(weights, samples)
    parts = zip(split_stages(run.datasets, len(weights)), weights, strict=True)
    again, left_out = count_misread(run)
    return {
        "samples": samples * len(weights),
        "init s": run.init,
        "restart s": run.restart,
        "worst error": max(worst_prefix_error(ids, blend) for ids, blend in parts),
        "again": again,
        "left out": left_out,
    }


def format_changes(found: dict[str, float]) -> str:
    """The columns of a mixer of a blend that changes."""
    times = f"{found['init s']:10.4f}{found['restart s']:11.4f}"
    return f"{found['samples']:15,}{times}{found['worst error']:13.2f}{found['again']:12,}{found['left out']:10,}"


def main() -> None:
    """Print a table; or be one of its mixers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", default=sys.executable, help="a Python that has some of the other mixers"
    )
    parser.add_argument("--datasets", type=int, default=1000)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of samples")
    parser.add_argument("--limit", type=float, default=100, help="seconds for each mixer")
    parser.add_argument("--mixer", help=argparse.SUPPRESS)
    parser.add_argument("--changes", action="store_true", help="a blend that changes twice")
    options = parser.parse_args()
    if options.mixer:
        run = measure_changes if options.changes else measure
        print(json.dumps(run(options.mixer, options.datasets, options.scale)))
        return
    columns = f"{'samples':>15}{'ready s':>10}{'MiB':>8}{'ns/sample':>11}  worst error"
    if options.changes:
        columns = f"{'samples':>15}{'init s':>10}{'restart s':>11}{'worst error':>13}{'read again':>12}{'left out':>10}"
    print(f"{options.datasets:,} datasets\n{'':20}{columns}")
    for name, (_, _, is_peer) in (CHANGING_MIXERS if options.changes else MIXERS).items():
        own = ["--mixer", name, "--datasets", str(options.datasets), "--scale", str(options.scale)]
        own += ["--changes"] if options.changes else []
        command = [
            options.peers if is_peer else sys.executable,
            str(Path(__file__).absolute()),
            *own,
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.limit, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{name:20}not done after {options.limit:.0f} s", flush=True)
            continue
        if done.returncode:
            print(f"{name:20}does not run: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        if options.changes:
            print(f"{name:20}{format_changes(found)}", flush=True)
            continue
        columns = f"{found['samples']:15,}{found['ready s']:10.3f}{found['memory MiB']:8.0f}{found['ns a sample']:11.0f}"
        print(
            f"{name:20}{columns}  {found['worst error']:.2f} in {found['evaluated']:,}", flush=True
        )


if __name__ == "__main__":
    main()

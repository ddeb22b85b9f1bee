"""Mixers of a run whose blend changes twice: three stages of as many samples, each with weights of its own.

Columns: samples of the run; seconds until its first sample can be had; seconds until the sample in the middle of the last stage
can be had after a restart; the worst prefix error within a stage; and how many samples were read again before their dataset was
exhausted, or were left out below others that were read. Each mixer does what its users can: Megatron starts a new run of the new
blend at `consumed_samples`; datasets and Grain mix again what the stages before have not read, for which the caller keeps the
counts. MosaicML Streaming cannot change proportions within an epoch, and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.integer[Any]]


class Run(NamedTuple):
    """What a mixer gave."""

    datasets: Ids
    numbers: Ids
    """The dataset of each sample, and which of its samples it is: [n] each, some samples of each stage from its start."""
    init: float
    restart: float
    """Seconds."""


ChangingMixer = Callable[[list[Doubles], int], Run]
"""Makes a run of stages of so many samples, by their weights."""


def megablend_plan(weights: list[Doubles], samples: int) -> Run:
    """Our plan, from its stages."""
    from fractions import Fraction

    from megablend.run.plan_stages import plan_stages
    from megablend.run.stage import Blend, SourceShare, Stage

    def stage(number: int) -> Stage:
        parts = [Fraction(weight) for weight in weights[number]]
        total = sum(parts)
        shares = [
            SourceShare(name=str(d), append_eod=None, share=part / total, cycles=1)
            for d, part in enumerate(parts)
        ]
        blend = Blend(
            split="train",
            sequence_length=1,
            add_extra_token_to_sequence=False,
            sources=tuple(shares),
            interleaving="lanes",
            plan_version=2,
            seed=1,
            lanes=8,
            shuffle_window=64,
        )
        return Stage(end=(number + 1) * samples, index="", blend=blend)

    stages = [stage(number) for number in range(len(weights))]
    tokens = [samples * len(weights)] * len(weights[0])
    started = time.perf_counter()
    plan = plan_stages(stages, tokens)
    plan.locate(0)
    init = time.perf_counter() - started
    started = time.perf_counter()
    plan_stages(stages, tokens).locate(int(2.5 * samples))
    restart = time.perf_counter() - started
    ks = np.concatenate([np.arange(i * samples, (i + 1) * samples) for i in range(len(weights))])
    found = [plan.locate_many(part) for part in np.array_split(ks, max(1, len(ks) // 4096))]
    return Run(
        np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found]), init, restart
    )


def megatron(weights: list[Doubles], samples: int) -> Run:
    """Megatron-core: a new run of the whole length for each blend, entered where the one before stopped."""
    from megatron.core.datasets import helpers_cpp

    total = samples * len(weights)
    parts = list[tuple[Ids, Ids]]()

    def build(blend: Doubles) -> tuple[Ids, Ids]:
        datasets = np.empty(total, np.int16)
        numbers = np.empty(total, np.int64)
        helpers_cpp.build_blending_indices(datasets, numbers, blend, len(blend), total, False)
        return datasets, numbers

    times = []
    for i, blend in enumerate(weights):
        started = time.perf_counter()
        datasets, numbers = build(blend)
        times.append(time.perf_counter() - started)
        parts.append(
            (datasets[i * samples : (i + 1) * samples], numbers[i * samples : (i + 1) * samples])
        )
    return Run(
        np.concatenate([a for a, _ in parts]),
        np.concatenate([b for _, b in parts]),
        times[0],
        times[-1],
    )


def hugging_face(weights: list[Doubles], samples: int) -> Run:
    """datasets.interleave_datasets of what is left of each dataset."""
    import datasets

    size = 3 * samples * len(weights) // len(weights[0]) + 100  # more than any dataset gives
    whole = [
        datasets.Dataset.from_dict({"dataset": np.full(size, d), "number": np.arange(size)})
        for d in range(len(weights[0]))
    ]

    def stage(i: int, used: list[int]) -> tuple[Ids, Ids]:
        left = [each.select(range(n, size)) for each, n in zip(whole, used, strict=True)]
        mixed = datasets.interleave_datasets(
            left, probabilities=weights[i].tolist(), seed=i
        ).with_format("numpy")
        rows = mixed[:samples]
        return rows["dataset"], rows["number"]

    return _remix(weights, stage)


def grain(weights: list[Doubles], samples: int) -> Run:
    """grain.MapDataset.mix of what is left of each dataset."""
    from grain import MapDataset

    size = 3 * samples * len(weights) // len(weights[0]) + 100  # more than any dataset gives
    edges = [d * size for d in range(len(weights[0]) + 1)]

    def stage(i: int, used: list[int]) -> tuple[Ids, Ids]:
        left = [
            MapDataset.range(low + n, high)
            for (low, high), n in zip(pairwise(edges), used, strict=True)
        ]
        mixed = MapDataset.mix(left, weights=weights[i].tolist())
        rows = np.array([mixed[k] for k in range(samples)])
        return rows // size, rows % size

    return _remix(weights, stage)


def _remix(weights: list[Doubles], stage: Callable[[int, list[int]], tuple[Ids, Ids]]) -> Run:
    """The stages of a mixer that mixes again what is left; a restart needs the counts of the stages before."""
    used = np.zeros(len(weights[0]), np.int64)
    times = list[float]()
    parts = list[tuple[Ids, Ids]]()
    for i in range(len(weights)):
        started = time.perf_counter()
        parts.append(stage(i, used.tolist()))
        times.append(time.perf_counter() - started)
        used += np.bincount(parts[-1][0], minlength=len(used))
    return Run(
        np.concatenate([a for a, _ in parts]),
        np.concatenate([b for _, b in parts]),
        times[0],
        sum(times),
    )


def split_stages(ids: Ids, num_stages: int) -> Iterator[Ids]:
    """The part of each stage."""
    yield from np.split(ids, num_stages)


def count_misread(run: Run) -> tuple[int, int]:
    """Samples that were read more than once; samples that were left out below the highest number read of their dataset."""
    pairs = run.datasets.astype(np.int64) << 40 | run.numbers
    distinct = np.unique(pairs)
    highest = np.zeros(int(run.datasets.max()) + 1, np.int64)
    np.maximum.at(highest, run.datasets, run.numbers + 1)
    return len(pairs) - len(distinct), int(highest.sum()) - len(distinct)


CHANGING_MIXERS: dict[str, tuple[ChangingMixer, int, bool]] = {
    "megablend, plan": (megablend_plan, 1_000_000, False),
    "Megatron-core": (megatron, 300_000, False),
    "Hugging Face": (hugging_face, 20_000, True),
    "Grain": (grain, 2_000, True),
}
"""By name: the mixer, samples of a stage that it can do in some seconds, whether it is one of the peers."""

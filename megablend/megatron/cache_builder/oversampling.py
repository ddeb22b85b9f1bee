"""Blends that ask a dataset for more samples than it was built with. Megatron notices this after building; megablend, before.

At step i >= 1 the errors w[d] * i - count[d] sum to 0, so the greatest is not negative, and the dataset d that is taken then has
count[d] <= w[d] * i. Of a blend of n samples d therefore gives at most w[d] * (n - 1) + 1. Only a dataset for which that is not
enough has its samples counted. Largest remainders are counted at once, by arithmetic.
"""

from __future__ import annotations

import math
import os
import sys
from fractions import Fraction

import numpy as np

from megablend.errors import PlanError
from megablend.megatron.cache_builder.work_plan import BlendJob, SplitPlan
from megablend.megatron.exact.blend import greedy
from megablend.megatron.request.request import GREEDY, LARGEST_REMAINDER
from megablend.plan.allocate import largest_remainder

_DRAWN = 1 << 22


def refuse_oversampling(split: SplitPlan, *, surplus: float) -> None:
    """Check a split's blend, if it has one with a size.

    Raises: PlanError, which names a dataset and the surplus that suffices.
    Source: BlendedDataset._build_indices, its IndexError.
    """
    job = split.blend
    if job is None or job.size is None or _bound_holds(job):
        return
    counts = _counts(job)
    over = [d for d, (count, length) in enumerate(zip(counts, job.lengths, strict=True)) if count > length]
    if not over:
        return
    remedy = ""  # a blend by length takes at most what there is, but for rounding
    if targets := job.layout.targets:
        needed = max(counts[d] / targets[d] - 1 for d in over)
        remedy = f": --mid-level-dataset-surplus (now {surplus}) of {math.ceil(needed * 1e4 + 1e-6) / 1e4} suffices"
    worst = max(over, key=lambda d: counts[d] / job.lengths[d])
    raise PlanError(
        f"{split.datasets[worst].name}: the blend takes {counts[worst]:,} samples, but only {job.lengths[worst]:,} are built "
        f"(likewise for {len(over):,} datasets){remedy}"
    )


def _bound_holds(job: BlendJob) -> bool:
    """Whether a bound shows, without counting, that there are enough samples."""
    if job.interleaving != GREEDY:
        return False
    rounding = 4 * sys.float_info.epsilon * job.num_samples * len(job.weights)
    most = [weight * (job.num_samples - 1) + 1 + rounding for weight in job.weights]
    return all(samples < length + 1 for samples, length in zip(most, job.lengths, strict=True))


def _counts(job: BlendJob) -> list[int]:
    """Number of samples that the blend takes from each dataset."""
    if job.interleaving == LARGEST_REMAINDER:
        return largest_remainder([Fraction(share) for share in job.shares], job.num_samples)
    blend, counts = greedy(job.weights, job.num_samples), np.zeros(len(job.weights), np.int64)
    while blend.step < blend.size:
        datasets, _ = blend.draw(min(_DRAWN, blend.size - blend.step), threads=len(os.sched_getaffinity(0)))
        counts += np.bincount(datasets, minlength=len(counts))
    result: list[int] = counts.tolist()
    return result

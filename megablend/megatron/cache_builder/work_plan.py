"""Plan all the work of a request. The numbers of epochs and samples are computed before anything is
built, and requests on which Megatron would fail are refused.

Source: GPTDataset._build_document_sample_shuffle_indices, BlendedDataset.__init__.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megablend.errors import PlanError
from megablend.megatron.cache_builder.artefacts import ArraySpec, Artefact
from megablend.megatron.cache_builder.lengths import PartSize
from megablend.megatron.exact.epochs import (
    num_epochs,
    num_samples,
    sample_dtype,
    samples_before_final_epoch,
    shuffle_dtype,
)
from megablend.megatron.exact.greedy import greedy
from megablend.megatron.request.description import (
    BLEND_CLASS,
    base_name,
    blend_description,
    dataset_description,
    shared_members,
)
from megablend.megatron.request.layout import DatasetPart, SplitLayout, layouts, normalized
from megablend.megatron.request.request import SPLITS, CacheRequest
from megablend.system import count_cpus

PartKey = tuple[str, tuple[float, float]]
"""The key of a part of a dataset: the prefix, and the part's span (begin, end)."""
_INT32_MAX = (1 << 31) - 1
_DRAWN = 1 << 22
"""Number of samples of a blend that are drawn at a time to count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetJob:
    """The job of building the indices of a dataset."""

    artefact: Artefact
    part: DatasetPart
    size: PartSize
    num_epochs: int
    num_samples: int
    """The number of samples that the dataset will have: at least as many as requested."""
    samples_before_final: int | None
    """The number of samples of all epochs but the last, if the last epoch is shuffled separately;
    otherwise None."""
    keep_tail: bool
    """Whether a partial last sample is kept."""
    extra_token: bool
    """Whether samples have one token more than the sequence length."""

    @property
    def name(self) -> str:
        """The name of the job in messages."""
        return _name(self.part)

    @property
    def made_of(self) -> list[int]:
        """The numbers that the arrays depend on, in addition to the description."""
        return [
            self.size.begin,
            self.size.end,
            self.size.checksum,
            int(self.keep_tail),
            int(self.extra_token),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendJob:
    """The job of building the indices of a blend."""

    artefact: Artefact
    layout: SplitLayout
    weights: tuple[float, ...]
    """The weights in the description. If no size is requested, they are the lengths of the
    datasets, as integers."""
    size: int | None
    """Requested number of samples; None for all samples of all datasets."""
    lengths: tuple[int, ...]
    """The number of samples of each dataset."""

    @property
    def name(self) -> str:
        """The name of the job in messages."""
        return f"blend ({self.layout.name})"

    @property
    def made_of(self) -> list[int]:
        """The numbers that the arrays depend on, in addition to the description."""
        return list(self.lengths)

    @property
    def num_samples(self) -> int:
        """The number of samples of the blend."""
        return sum(self.lengths) if self.size is None else self.size


Job = DatasetJob | BlendJob


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """A split: its datasets and its blend, if it has one."""

    name: str
    datasets: tuple[DatasetJob, ...]
    blend: BlendJob | None

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs, the blend last."""
        return self.datasets if self.blend is None else (*self.datasets, self.blend)

    @property
    def num_samples(self) -> int:
        """The number of samples that training can draw."""
        if self.blend is not None:
            return self.blend.num_samples
        return sum(job.num_samples for job in self.datasets)


def plan_cache(request: CacheRequest, sizes: Mapping[PartKey, PartSize]) -> list[SplitPlan]:
    """Plan everything that a request's cache will contain.

    Args:
        sizes: the sizes of all parts of datasets in the request.

    Raises: PlanError if a split has no tokens, if a dataset cannot have as many samples as
        requested, or if a dataset in a blend without weights has no samples.
    """
    plans = []
    for layout in layouts(request):
        shared = shared_members(request, layout.split)
        datasets = tuple(
            _dataset_job(request, part, sizes[part.prefix, part.span], shared)
            for part in layout.parts
        )
        blend = _blend_job(request, layout, datasets) if layout.blended else None
        plans.append(SplitPlan(name=layout.name, datasets=datasets, blend=blend))
    return plans


def _dataset_job(
    request: CacheRequest, part: DatasetPart, size: PartSize, shared: str
) -> DatasetJob:
    extra = int(request.add_extra_token_to_sequence)
    length = request.sequence_length
    if not size.tokens:
        _refuse_no_tokens(request, part, size)
    epochs = num_epochs(size.tokens, part.num_samples, length, extra)
    if epochs > _INT32_MAX:
        raise PlanError(
            f"{_name(part)}: {part.num_samples:,} samples of {length:,} tokens read its {size.tokens:,} tokens {epochs:,} times, "
            f"but Megatron supports at most {_INT32_MAX:,} epochs; request fewer samples, or add data"
        )
    keep_tail = SPLITS[part.split] == "valid" and not request.drop_last_partial_validation_sequence
    samples = num_samples(size.tokens, epochs, length, extra, keep_tail)
    if part.num_samples is not None and samples < part.num_samples:
        raise PlanError(
            f"{_name(part)}: Megatron computes in single precision, which gives {samples:,} samples of {epochs * size.tokens:,} "
            f"tokens, but {part.num_samples:,} are requested; drop the last partial sequence, or request fewer samples"
        )
    text = dataset_description(request, part, shared)
    documents = epochs * (size.end - size.begin)
    arrays = (
        ArraySpec(name="document_index", shape=(documents,), dtype="int32"),
        ArraySpec(name="sample_index", shape=(samples + 1, 2), dtype=sample_dtype(documents)),
        ArraySpec(name="shuffle_index", shape=(samples,), dtype=shuffle_dtype(samples)),
    )
    return DatasetJob(
        artefact=Artefact(
            base=base_name(text, request.dataset_class, part.split), description=text, arrays=arrays
        ),
        part=part,
        size=size,
        num_epochs=epochs,
        num_samples=samples,
        samples_before_final=samples_before_final_epoch(
            size.tokens, epochs, part.num_samples, length, extra
        ),
        keep_tail=keep_tail,
        extra_token=bool(extra),
    )


def _name(part: DatasetPart) -> str:
    """Return the name of a dataset for messages."""
    return f"{part.prefix} ({SPLITS[part.split]})"


def _refuse_no_tokens(request: CacheRequest, part: DatasetPart, size: PartSize) -> None:
    """Refuse a part without tokens if Megatron would fail on it. Otherwise the part becomes a
    dataset without samples.

    Raises: PlanError if samples are requested, or if the number of samples would be negative
        because of a sample's extra token.
    """
    extra = int(request.add_extra_token_to_sequence)
    length = request.sequence_length
    if part.num_samples is not None and part.num_samples * length + extra > 0:
        consequence = "Megatron would loop forever"
    elif not size.num_sequences or num_samples(0, 1, length, extra, keep_tail=False) < 0:
        consequence = "Megatron would fail"
    else:
        return
    raise PlanError(
        f"{_name(part)}: its sequences {size.begin:,} to {size.end:,} of {size.num_sequences:,} contain "
        f"no tokens, and {consequence}; give the split a larger part of the data, or none (0 in --split)"
    )


def _blend_job(
    request: CacheRequest, layout: SplitLayout, datasets: tuple[DatasetJob, ...]
) -> BlendJob:
    lengths = tuple(job.num_samples for job in datasets)
    if layout.weights is None:
        for job in datasets:
            if not job.num_samples:
                raise PlanError(
                    f"{job.name}: has {job.size.tokens:,} tokens, fewer than one sample of "
                    f"{request.sequence_length:,}, so Megatron cannot blend it; leave the dataset out, or give "
                    "this split a larger share of the dataset"
                )
    size = _blend_size(layout, lengths)
    weights: list[float] | list[int] = list(lengths if layout.weights is None else layout.weights)
    if size is not None:
        weights = normalized(weights)
    described = [job.artefact.description for job in datasets]
    text = blend_description(request, layout.split, described, weights, size)
    name = base_name(text, BLEND_CLASS, layout.split)
    entries = sum(lengths) if size is None else size
    arrays = (
        ArraySpec(name="dataset_index", shape=(entries,), dtype="int16"),
        ArraySpec(name="dataset_sample_index", shape=(entries,), dtype="int64"),
    )
    return BlendJob(
        artefact=Artefact(base=name, description=text, arrays=arrays),
        layout=layout,
        weights=tuple(weights),
        size=size,
        lengths=lengths,
    )


def _blend_size(layout: SplitLayout, lengths: tuple[int, ...]) -> int | None:
    if layout.size is None:
        return None
    if layout.targets is None:
        return min(layout.size, sum(lengths))
    return sum(layout.targets)


def refuse_oversampling(split: SplitPlan, *, surplus: float) -> None:
    """Check that the blend of a split does not take more samples from a dataset than it has.

    Raises: PlanError if it does. The message names one such dataset and a sufficient surplus.
    Source: BlendedDataset._build_indices, its IndexError.
    """
    job = split.blend
    if job is None or job.size is None or _bound_holds(job):
        return
    counts = _counts(job)
    oversampled = [
        dataset
        for dataset, (count, length) in enumerate(zip(counts, job.lengths, strict=True))
        if count > length
    ]
    if not oversampled:
        return
    # A blend by length has no targets: it takes too many samples only because of rounding
    remedy = ""
    targets = job.layout.targets
    if targets:
        needed = max(counts[dataset] / targets[dataset] - 1 for dataset in oversampled)
        remedy = f"; set --mid-level-dataset-surplus (now {surplus}) to {math.ceil(needed * 1e4 + 1e-6) / 1e4} or more"
    worst = max(oversampled, key=lambda dataset: counts[dataset] / job.lengths[dataset])
    raise PlanError(
        f"{split.datasets[worst].name}: the blend takes {counts[worst]:,} samples, but only {job.lengths[worst]:,} are built "
        f"(datasets with too few: {len(oversampled):,}){remedy}"
    )


def _bound_holds(job: BlendJob) -> bool:
    """Return whether upper bounds of the counts show that every dataset has enough samples. The
    samples of the blend then need not be counted."""
    rounding = 4 * sys.float_info.epsilon * job.num_samples * len(job.weights)
    bounds = [weight * (job.num_samples - 1) + 1 + rounding for weight in job.weights]
    return all(bound < length + 1 for bound, length in zip(bounds, job.lengths, strict=True))


def _counts(job: BlendJob) -> list[int]:
    """Return the number of samples that the blend takes from each dataset."""
    blend = greedy(job.weights, job.num_samples)
    counts = np.zeros(len(job.weights), np.int64)
    while blend.step < blend.size:
        datasets, _ = blend.draw(min(_DRAWN, blend.size - blend.step), threads=count_cpus())
        counts += np.bincount(datasets, minlength=len(counts))
    result: list[int] = counts.tolist()
    return result

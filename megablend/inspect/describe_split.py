"""Describe the sources of one split: what they contain, what the config requests of them, and what
the run reads."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np

from megablend.blend.progress import (
    NONE,
    SCANNED,
    Presence,
    find_epoch_ends,
    find_presence,
)
from megablend.blend.shares import cap_of, find_most_tokens
from megablend.inspect.description import (
    FirstRepeat,
    SourceDescription,
    SplitDescription,
    StageDescription,
    StageSource,
)
from megablend.operations.drains import describe_drain
from megablend.run.compile import Compiled
from megablend.run.run import Run

EPOCHS = 32
"""The maximum number of epochs of a source whose ends are reported."""
SAMPLED_BLOCKS = 256
"""The maximum number of blocks of a source whose sizes are looked up."""


def describe_split(compiled: Compiled, steps: int | None = None) -> SplitDescription:
    """Describe the sources of one split.

    Args:
        steps: see `SplitDescription`.
    """
    run = compiled.run
    edges = [0, *run.ledger.ends]
    # The stages share the samples that are scanned, so that a run of many stages takes no longer;
    # each stage gets enough of them for its worst errors, which occur early
    scanned = max(1 << 10, SCANNED // (len(edges) - 1))
    of_stages = [
        find_presence(run.plan, start, stop, scanned=scanned) for start, stop in pairwise(edges)
    ]
    of_run = _join_presences(of_stages)
    counts = of_run.counts.tolist()
    tokens_read = run.plan.count_tokens(run.num_samples).tolist()
    epoch_ends = find_epoch_ends(run.plan, limit=EPOCHS)
    most_tokens = find_most_tokens(compiled.sources, run.plan.epochs)
    stored_bytes = _estimate_stored_bytes(run)
    return SplitDescription(
        samples=run.num_samples,
        tokens=sum(tokens_read),
        blended=run.is_blended,
        first_repeated_source=_find_first_repeat(run),
        sources=tuple(
            _describe_source(
                compiled,
                number,
                samples,
                tokens_read[number],
                of_run,
                epoch_ends[number],
                most_tokens[number],
                stored_bytes[number],
            )
            for number, samples in enumerate(counts)
        ),
        steps=steps,
        stages=None
        if len(of_stages) == 1
        else tuple(
            _describe_stage(run, number, start, presence)
            for number, (start, presence) in enumerate(zip(edges[:-1], of_stages, strict=True))
        ),
    )


def _join_presences(of_stages: list[Presence]) -> Presence:
    """Return the combined presence of each source in consecutive stages."""
    firsts = np.array([presence.first for presence in of_stages])
    lasts = np.array([presence.last for presence in of_stages])
    is_absent = firsts == NONE
    # A stage without the source does not decide its first sample; NONE is below all last samples
    first = np.where(is_absent, np.iinfo(np.int64).max, firsts).min(axis=0)
    return Presence(
        counts=np.sum([presence.counts for presence in of_stages], axis=0),
        first=np.where(is_absent.all(axis=0), NONE, first),
        last=lasts.max(axis=0),
        worst_error=np.max([presence.worst_error for presence in of_stages], axis=0),
    )


def _describe_stage(run: Run, number: int, start: int, presence: Presence) -> StageDescription:
    """Describe a stage, given its number in the ledger, its first sample, and the presence of
    sources in it."""
    stage = run.ledger.stages[number]
    samples = int(presence.counts.sum())
    shares = stage.blend.shares
    # Samples of a stage that begins with a drain may have two lengths
    tokens = run.plan.count_tokens(start + samples) - run.plan.count_tokens(start)
    return StageDescription(
        start=start,
        stop=start + samples,
        sequence_length=stage.blend.sequence_length,
        lanes=stage.blend.lanes,
        sources=tuple(
            StageSource(
                name=source.name,
                share=float(shares[i]) if i < len(shares) else presence.counts[i] / samples,
                actual_share=float(presence.counts[i]) / samples,
                samples=int(presence.counts[i]),
                tokens=int(tokens[i]),
                first_sample=_as_result(presence.first[i]),
                last_sample=_as_result(presence.last[i]),
                worst_prefix_error=round(float(presence.worst_error[i]), 3),
            )
            for i, source in enumerate(run.sources)
        ),
        drain=describe_drain(run, number),
    )


def _as_result(sample: np.int64) -> int | None:
    """Convert a sample number for descriptions: NONE becomes None, other numbers become int."""
    return None if sample == NONE else int(sample)


def _find_first_repeat(run: Run) -> FirstRepeat | None:
    """Return the first source that begins a second epoch, by the number of its samples; None if
    there is none, or the split is not blended."""
    if not run.is_blended:
        return None
    extra = run.extra_token
    firsts = list[tuple[int, int]]()
    for number in range(len(run.sources)):
        ordinal = run.plan.count_within(number, run.plan.epochs.start(number, 1), extra)
        sample = run.plan.sample_of_count(number, ordinal)
        if sample is not None:
            firsts.append((sample, number))
    if not firsts:
        return None
    sample, source = min(firsts)
    return FirstRepeat(source=run.sources[source].name, sample=sample)


def _describe_source(
    compiled: Compiled,
    number: int,
    samples: int,
    tokens_read: int,
    presence: Presence,
    epoch_ends: list[int],
    most_tokens: int | None,
    stored_bytes: int,
) -> SourceDescription:
    """Describe source number `number` of a run.

    Args:
        samples, tokens_read: numbers of samples and tokens that the run reads from the source.
        most_tokens: number of tokens in `max_epochs` epochs of the source; None if it has no
            `max_epochs`.
    """
    run = compiled.run
    source = compiled.sources[number]
    part = run.data.parts[number]
    length = compiled.config.sequence_length
    extra = run.extra_token
    tokens = int(part["tokens"])
    end = tokens_read + extra if samples else 0  # the position after the last token that is read
    epochs = run.plan.epochs.count(number, end)
    requested = compiled.requested[number] if run.is_blended else Fraction(samples, run.num_samples)
    return SourceDescription(
        name=source.name,
        blocks=int(part["stop_block"] - part["first_block"]),
        documents=int(part["documents"]),
        tokens=tokens,
        requested_share=float(requested),
        actual_share=samples / run.num_samples,
        samples=samples,
        epochs=float(epochs),
        max_epochs=None if source.max_epochs is None else float(source.max_epochs),
        tokens_left_in_epoch=max(0, run.plan.epochs.start(number, math.ceil(epochs)) - end),
        tokens_read=tokens_read,
        stored_bytes=stored_bytes,
        max_tokens=source.max_tokens,
        most_samples=cap_of(source, tokens, length, extra, most=most_tokens),
        first_sample=_as_result(presence.first[number]),
        last_sample=_as_result(presence.last[number]),
        epoch_ends=tuple(epoch_ends),
        worst_prefix_error=round(float(presence.worst_error[number]), 3),
        withdrawn_tokens=run.plan.epochs.count_withdrawn(number) or None,
    )


def _estimate_stored_bytes(run: Run) -> list[int]:
    """Return the stored size of each source's blocks in this split, in bytes: [num_sources]. If a
    source has many blocks, the size is estimated from evenly spaced blocks."""
    parts = run.data.parts
    ranges = list(zip(parts["first_block"].tolist(), parts["stop_block"].tolist(), strict=True))
    sampled = [
        np.unique(np.linspace(first, stop - 1, min(SAMPLED_BLOCKS, stop - first)).astype(np.int64))
        for first, stop in ranges
    ]
    stored = run.store.snapshot.blocks(np.concatenate(sampled))["stored_bytes"].astype(np.int64)
    by_source = np.split(stored, np.cumsum([len(ids) for ids in sampled])[:-1])
    return [
        int(sizes.sum()) * (stop - first) // max(1, len(sizes))
        for sizes, (first, stop) in zip(by_source, ranges, strict=True)
    ]

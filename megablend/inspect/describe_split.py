"""The sources of one split as `describe` reports them: what they hold, what is requested of them,
what the run reads."""

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
    find_first_from,
    find_presence,
)
from megablend.blend.shares import cap_of, find_most_tokens
from megablend.index.read.document_table import open_table, table_bytes
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
"""Epochs of a source whose ends are reported."""
COUNTED = 1 << 20
"""Documents that are counted; of more, evenly spaced ones."""
SAMPLED_BLOCKS = 256
"""Blocks of a source whose sizes are looked up."""


def describe_split(
    compiled: Compiled, steps: int | None = None, *, document_lengths: bool = False
) -> SplitDescription:
    """The sources of one split: what they hold, what is requested of them, what the run reads."""
    run = compiled.run
    ends = [0, *run.ledger.ends]
    scanned = max(1 << 10, SCANNED // (len(ends) - 1))
    parts = [
        find_presence(run.plan, start, stop, scanned=scanned) for start, stop in pairwise(ends)
    ]
    whole = _join(parts)
    counts = whole.counts.tolist()
    read = run.plan.count_tokens(run.num_samples).tolist()
    ends_of = find_epoch_ends(run.plan, limit=EPOCHS)
    stored = _estimate_stored_bytes(run)
    return SplitDescription(
        samples=run.num_samples,
        tokens=sum(read),
        blended=run.is_blended,
        first_repeated_source=_find_first_repeat(run),
        sources=tuple(
            _describe_source(
                compiled,
                number,
                samples,
                read[number],
                whole,
                ends_of[number],
                stored[number],
                document_lengths=document_lengths,
            )
            for number, samples in enumerate(counts)
        ),
        steps=steps,
        stages=None
        if len(parts) == 1
        else tuple(
            _describe_stage(run, number, start, part)
            for number, (start, part) in enumerate(zip(ends[:-1], parts, strict=True))
        ),
    )


def _join(parts: list[Presence]) -> Presence:
    """Where each source occurs in several stages, one after the other."""
    counts = np.sum([part.counts for part in parts], axis=0)
    firsts, lasts = (
        np.array([getattr(part, name) for part in parts]) for name in ("first", "last")
    )
    never = (firsts == NONE).all(axis=0)
    first = np.where(firsts == NONE, np.iinfo(np.int64).max, firsts).min(axis=0)
    worst = np.max([part.worst_error for part in parts], axis=0)
    return Presence(counts, np.where(never, NONE, first), lasts.max(axis=0), worst)


def _describe_stage(run: Run, number: int, start: int, part: Presence) -> StageDescription:
    stage = run.ledger.stages[number]
    samples = int(part.counts.sum())
    shares = stage.blend.shares
    # not of one length where the stage begins with a drain
    tokens = run.plan.count_tokens(start + samples) - run.plan.count_tokens(start)
    return StageDescription(
        start=start,
        stop=start + samples,
        sequence_length=stage.blend.sequence_length,
        lanes=stage.blend.lanes,
        sources=tuple(
            StageSource(
                name=source.name,
                share=float(shares[i]) if i < len(shares) else part.counts[i] / samples,
                actual_share=float(part.counts[i]) / samples,
                samples=int(part.counts[i]),
                tokens=int(tokens[i]),
                first_sample=_sample(part.first[i]),
                last_sample=_sample(part.last[i]),
                worst_prefix_error=round(float(part.worst_error[i]), 3),
            )
            for i, source in enumerate(run.sources)
        ),
        drain=describe_drain(run, number),
    )


def _sample(number: np.int64) -> int | None:
    return None if number == NONE else int(number)


def _find_first_repeat(run: Run) -> FirstRepeat | None:
    if not run.is_blended:
        return None
    extra = run.extra_token
    # Where epochs overlap, the sample after one pass may come before some of these.
    passes = [
        run.plan.count_within(number, run.plan.epochs.start(number, 1), extra)
        for number in range(len(run.sources))
    ]
    first = find_first_from(run.plan, np.array(passes, np.int64))
    return (
        None if first is None else FirstRepeat(source=run.sources[first[1]].name, sample=first[0])
    )


def _describe_source(
    compiled: Compiled,
    number: int,
    samples: int,
    read: int,
    presence: Presence,
    epoch_ends: list[int],
    stored_bytes: int,
    *,
    document_lengths: bool,
) -> SourceDescription:
    run = compiled.run
    source = compiled.sources[number]
    part = run.data.parts[number]
    length = compiled.config.sequence_length
    extra = run.extra_token
    tokens = int(part["tokens"])
    used = read + extra if samples else 0
    epochs = run.plan.epochs.count(number, used)
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
        tokens_left_in_epoch=max(0, run.plan.epochs.start(number, math.ceil(epochs)) - used),
        tokens_read=read,
        stored_bytes=stored_bytes,
        max_tokens=source.max_tokens,
        most_samples=cap_of(
            source,
            tokens,
            length,
            extra,
            most=find_most_tokens(compiled.sources, run.plan.epochs)[number],
        ),
        first_sample=_sample(presence.first[number]),
        last_sample=_sample(presence.last[number]),
        epoch_ends=tuple(epoch_ends),
        worst_prefix_error=round(float(presence.worst_error[number]), 3),
        document_lengths=count_lengths(run, number) if document_lengths else None,
        withdrawn_tokens=run.plan.epochs.count_withdrawn(number) or None,
    )


def _estimate_stored_bytes(run: Run) -> list[int]:
    """Stored bytes of each source's blocks in this split, from evenly spaced ones if it has
    many: [num_sources]."""
    ranges = list(
        zip(
            run.data.parts["first_block"].tolist(),
            run.data.parts["stop_block"].tolist(),
            strict=True,
        )
    )
    chosen = [
        np.unique(np.linspace(first, stop - 1, min(SAMPLED_BLOCKS, stop - first)).astype(np.int64))
        for first, stop in ranges
    ]
    stored = run.store.snapshot.blocks(np.concatenate(chosen))["stored_bytes"].astype(np.int64)
    sums = [
        int(part.sum()) for part in np.split(stored, np.cumsum([len(ids) for ids in chosen])[:-1])
    ]
    return [
        total * (stop - first) // max(1, len(ids))
        for total, ids, (first, stop) in zip(sums, chosen, ranges, strict=True)
    ]


def count_lengths(run: Run, source: int) -> tuple[int, ...] | None:
    """Documents of a source in the split by length:
    [0] those of no token, [i] those of 2^(i-1) to 2^i - 1 tokens.

    Returns: None if the index has no table of the source's documents. With more than COUNTED
        documents the numbers are estimates.

    Raises: CacheError if the table is damaged.
    """
    part = run.data.parts[source]
    if part["documents"] == 0:
        return None
    blocks = run.locator.readings(source)[-1].blocks
    name = run.data.index_names[source]
    number = next(i for i, entry in enumerate(blocks.snapshot.sources) if entry.name == name)
    documents = int(part["documents"])
    if table_bytes(blocks.snapshot, number) is None:
        return None
    counted = min(COUNTED, documents)
    which = blocks.documents.index_blocks(np.arange(counted) * documents // counted)
    lengths = open_table(blocks.snapshot, number).lengths(
        which, has_eod=run.sources[source].append_eod is not None
    )
    bins = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    return tuple((bins * documents // counted).tolist())

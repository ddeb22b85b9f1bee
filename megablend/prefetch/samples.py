"""Gather the tokens of samples from their blocks, and find where documents begin in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.errors import CorruptFileError
from megablend.formats.base import STARTS_MID_DOCUMENT
from megablend.formats.decoded import DecodedBlocks
from megablend.index.blocks.damaged_blocks import find_masked, read_or_replace
from megablend.index.read.snapshot import Snapshot
from megablend.order.base import Spans
from megablend.prefetch.block_cache import BlockCache
from megablend.prefetch.block_table import BlockTable
from megablend.run.run import Run


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of a sample, and where they are stored."""

    source: int
    """Number of the sample's source in the split."""
    ordinal: int
    """The sample's number within the source, counted over all epochs."""
    spans: Spans
    """The spans of blocks that contain the tokens, in order; `blocks` are block numbers of the
    index."""
    tokens: npt.NDArray[np.int64]
    """int64 [sequence_length + 1], or [sequence_length] for samples without the extra token."""
    starts: npt.NDArray[np.int64]
    """int64 [num_pieces], positions in `tokens` at which a document, or its continuation in another
    block, begins; the first is 0."""
    extra: dict[str, npt.NDArray[Any]]
    """For each extra column, one value per token: [num_tokens]."""


class Samples(NamedTuple):
    """The tokens of several samples."""

    sources: npt.NDArray[np.int32]
    """int32 [n], numbers of the samples' sources in the split."""
    tokens: npt.NDArray[np.int64]
    """int64 [n, sequence_length]."""
    labels: npt.NDArray[np.int64]
    """int64 [n, sequence_length], for each of `tokens` the next token; 0 if the sample has none."""
    begins: npt.NDArray[np.bool_] | None
    """bool [n, tokens per sample], whether a document, or its continuation in another block, begins
    at each token; None if not requested."""
    extra: dict[str, npt.NDArray[Any]]
    """For each extra column, one value per token: [n, tokens per sample]."""
    masked: npt.NDArray[np.bool_] | None = None
    """bool [n], whether each sample contains tokens of a damaged block; None if no sample does."""


def read_each(run: Run, block_cache: BlockCache, ks: Sequence[int]) -> list[Sample]:
    """Locate the samples with the numbers `ks`, at least one, and read all their blocks together.

    Raises: IndexError for a sample outside the run; MissingFileError, ChangedFileError,
        CorruptFileError from the samples' files.
    """
    sources, ordinals = run.plan.locate_many(ks)
    spans = run.locate_spans(sources, ordinals)
    samples = _read(run, block_cache, sources, spans, with_begins=True)
    assert samples.begins is not None
    tokens = samples.tokens
    if run.extra_token:
        tokens = np.concatenate([tokens, samples.labels[:, -1:]], axis=1)
    span_offsets = np.searchsorted(spans.rows, np.arange(len(ks) + 1))
    provenances = list[Sample]()
    for i, (first, stop) in enumerate(pairwise(span_offsets.tolist())):
        own_spans = Spans(*(column[first:stop] for column in spans))
        provenances.append(
            Sample(
                source=int(sources[i]),
                ordinal=int(ordinals[i]),
                spans=own_spans._replace(rows=own_spans.rows - i),
                tokens=tokens[i],
                starts=np.flatnonzero(samples.begins[i]),
                extra={name: values[i] for name, values in samples.extra.items()},
            )
        )
    return provenances


def read_samples(run: Run, block_cache: BlockCache, ks: npt.ArrayLike) -> Samples:
    """Locate samples, and read their blocks. `ks` are the numbers of the samples, at least one. The
    result's `begins` is set only if the config needs it. Raises: see `read_each`."""
    sources, ordinals = run.plan.locate_many(ks)
    spans = run.locate_spans(sources, ordinals)
    with_begins = run.settings.masks.inter_document_masking
    return _read(run, block_cache, sources, spans, with_begins=with_begins)


def _read(
    run: Run,
    block_cache: BlockCache,
    sources: npt.NDArray[np.int32],
    spans: Spans,
    *,
    with_begins: bool,
) -> Samples:
    """Read the blocks of samples, and gather the samples from them.

    Args:
        sources: int32 [n], the samples' sources.
        spans: the samples' spans, [m].
        with_begins: whether to find where documents begin.
    """
    ids, slots = np.unique(spans.blocks, return_inverse=True)
    table = BlockTable(ids)
    try:
        blocks = DecodedBlocks.of(block_cache.get(ids.tolist()))
    except CorruptFileError:
        if run.runtime.on_bad_sample == "raise":
            raise
        blocks = read_or_replace(run.store, ids, pieces=True)
    table.put(np.arange(len(ids)), blocks, np.zeros(len(ids), np.int64))
    continued = find_continued(run.store.snapshot, ids) if with_begins else None
    return gather(run, table, slots, spans, sources, continued)


def gather(
    run: Run,
    table: BlockTable,
    slots: npt.NDArray[np.int64],
    spans: Spans,
    sources: npt.NDArray[np.int32],
    continued: npt.NDArray[np.bool_] | None,
) -> Samples:
    """Gather samples from blocks that are in a table.

    Args:
        slots: int64 [m], table slot of each span's block.
        spans: the samples' spans, [m].
        sources: int32 [n], the samples' sources.
        continued: bool [num_blocks], the result of `find_continued` for the table's blocks; None if
            `begins` is not needed.
    """
    settings = run.settings
    num_samples = len(sources)
    width = settings.sample_tokens
    tokens = np.empty((num_samples, settings.sequence_length), np.int64)
    labels = np.empty_like(tokens)
    table.gather(slots, spans, width, tokens, labels)
    if not settings.add_extra_token_to_sequence:
        labels[:, -1] = 0
    extra = dict[str, npt.NDArray[Any]]()
    for i, column in enumerate(run.extra_columns):
        shape = (num_samples, width)
        extra[column.column] = table.gather_extra(i, column.dtype, slots, spans, shape)
    begins = None
    if continued is not None:
        begins = table.begins(slots, spans, num_samples * width, width, continued)
        begins = begins.reshape(num_samples, width)
    masked = None
    if run.store.damaged:
        masked = find_masked(run.store, spans.rows - spans.rows[0], spans.blocks, num_samples)
    return Samples(sources, tokens, labels, begins, extra, masked)


def find_continued(snapshot: Snapshot, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return whether the first piece of each block continues the last document of the previous
    block (`ids`: int64 [n]; result: bool [n])."""
    continued: npt.NDArray[np.bool_] = (snapshot.blocks(ids)["flags"] & STARTS_MID_DOCUMENT) != 0
    return continued

"""find: at which samples of a run a file, or one of its documents, is read; the inverse of `show`.
No data is read but, for a document, the blocks in which it begins and ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.blend.plan import TokenRange
from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.formats.base import DecodedBlock
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.splits import SplitBlocks, find_document
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.file_table import FileEntry
from megablend.operations.results import Result
from megablend.operations.session import ConfigLike, Session, skips_of
from megablend.order.base import Placed
from megablend.run.locator import Reading
from megablend.run.run import Run
from megablend.run.skips import Skips
from megablend.storage.location import find_scheme
from megablend.system.failures import translating

_LISTED = 5
"""Files that a message names."""
_Hit = tuple[int, int, list[tuple[int, ...]]]
"""A sample, an epoch, and for each piece: its first token, the token after its last, the offset of
the first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FoundPiece(Result):
    """Tokens of a file that a sample has."""

    first_token: int
    stop_token: int
    """They are tokens [first_token, stop_token) of the sample."""
    offset: int
    """Of the first of them, within the tokens of the file (or row) in this split."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FoundSample(Result):
    """A sample that has tokens of a file."""

    sample: int
    epoch: int
    pieces: tuple[FoundPiece, ...]
    skipped: bool
    """Whether the run skips it."""
    step: int | None
    """The step that reads it; None if it is skipped, or no `batch_size` was given."""
    counts_steps: bool
    """Whether a `batch_size` was given."""

    def _has(self, name: str) -> bool:
        return self.counts_steps if name == "step" else name != "counts_steps"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FoundFile(Result):
    """A file, or one of its rows, as a source of the split reads it."""

    file: str
    source: str
    row: int | None
    tokens: int
    """Tokens that it has in the split."""
    samples: tuple[FoundSample, ...]
    complete: bool
    """Whether these are all samples; False where `limit` left some out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FindResult(Result):
    """At which samples a run reads a file, for each source that has it."""

    run: str
    split: str
    num_samples: int
    """Samples of the split."""
    found: tuple[FoundFile, ...]


class Hits(NamedTuple):
    """Where a source's stored tokens come in the samples of one epoch: int64 [m] each, by
    sample."""

    samples: Int64s
    ordinals: Int64s
    starts: Int64s
    """First of the sample's tokens that are meant."""
    stops: Int64s
    stored: Int64s
    """The first of them, counted from the start of what was looked for."""


@translating("find")
def find(
    what: ConfigLike,
    file: str,
    row: int | None = None,
    *,
    run: str | None = None,
    split: str = "train",
    batch_size: int | None = None,
    limit: int | None = None,
    cache: str | None = None,
) -> FindResult:
    """At which samples a run reads a file, or one row of it.

    Args:
        what: a config, or a cache's folder (then `run` is needed).
        file: path of a data file, however it is written, or the end of the path that was indexed.
        row: of the file, from 0; a document. All of the file if absent.
        batch_size: samples of a step, over all ranks: then steps are reported too.
        limit: samples to list at most; no more epochs are then looked at.

    Raises: ConfigError if no file, several files, or no such row is meant; CacheError; as
        BlockStore.read does.
    """
    batch_size = None if batch_size is None else whole_number("batch_size", batch_size, least=1)
    limit = None if limit is None else whole_number("limit", limit, least=1)
    opened = Session(what, cache=cache, run=run).open(split)
    skips = skips_of(opened)
    places: dict[tuple[str, int], list[int]] = {}
    for number in match_files(opened, file):
        source = _source_of(opened, number)
        if source is not None:
            places.setdefault(
                (opened.store.snapshot.path(number, opened.store.roots), source), []
            ).append(number)
    found = []
    for (path, source), numbers in places.items():
        which = None if row is None else whole_number("row", row)
        tokens, hits = _list_hits(opened, source, numbers, which)
        samples = tuple(
            _describe_sample(sample, epoch, pieces, skips, batch_size)
            for sample, epoch, pieces in islice(hits, limit)
        )
        found.append(
            FoundFile(
                file=path,
                source=opened.sources[source].name,
                row=row,
                tokens=tokens,
                samples=samples,
                complete=next(hits, None) is None,
            )
        )
    if not found:
        raise ConfigError(
            f"{file}: no source of {split} reads it; give the --split whose sources do"
        )
    return FindResult(
        run=opened.ledger.run, split=split, num_samples=opened.num_samples, found=tuple(found)
    )


def match_files(run: Run, file: str) -> list[int]:
    """Numbers of the files of the index that a path, or the end of one, means: several if
    sources share the file.

    Raises: ConfigError if it means none, or different ones.
    """
    if not file:
        raise ConfigError(
            "found an empty path, expected a data file of the index; `megablend describe` lists the sources"
        )
    snapshot = run.store.snapshot
    roots = run.store.roots
    names = snapshot.file_names()
    # Extra columns list their files again
    is_tokens = snapshot.files.columns < len(snapshot.sources)
    # A pair is named by its .bin, and often by its prefix
    meant = (file, f"{file.removesuffix('.idx')}.bin")
    tails = tuple(each.rpartition("/")[2] for each in meant)
    likely = [i for i, name in enumerate(names) if name.endswith(tails) and is_tokens[i]]
    paths = {i: snapshot.path(i, roots) for i in likely}
    wanted = [each if find_scheme(each) else str(Path(each).absolute()) for each in meant]
    if exact := [i for i, path in paths.items() if path in wanted]:
        return exact
    ends = [i for i, path in paths.items() if path.endswith(tuple(f"/{each}" for each in meant))]
    if not ends:  # perhaps written in another way, with `..` or through links
        real = {_resolve(each) for each in wanted}
        resolved = {i: _resolve(path) for i, path in paths.items()}
        if exact := [i for i, path in resolved.items() if path in real]:
            return exact
        endings = tuple(f"/{os.path.normpath(each)}" for each in meant)
        ends = [i for i, path in resolved.items() if path.endswith(endings)]
    distinct = sorted({paths[i] for i in ends})
    if not ends:
        raise ConfigError(
            f"{file}: the index {snapshot.digest} has no file with this path or ending; `megablend "
            "describe` lists the sources"
        )
    if len(distinct) > 1:
        more = f" and {len(distinct) - _LISTED} more" if len(distinct) > _LISTED else ""
        raise ConfigError(
            f"{file}: {len(distinct)} files have this ending ({', '.join(distinct[:_LISTED])}{more}); give more of the path"
        )
    return ends


def _resolve(location: str) -> str:
    """A path without `..` and links; a location with a scheme as it is."""
    return location if find_scheme(location) else os.path.realpath(location)


def stored_tokens(
    store: BlockStore,
    blocks: SplitBlocks,
    entry: FileEntry,
    row: int | None,
    read: Callable[[int], DecodedBlock] | None = None,
) -> tuple[int, int]:
    """The range of a source's stored tokens, counted in the split, that a file or one of its rows
    has; empty if none is in it.

    Args:
        store, blocks, entry: of one snapshot of the index.
        read: as for `find_document`.

    Raises: ConfigError if there is no such row, or the index does not know rows; as
        BlockStore.read does.
    """
    snapshot = store.snapshot
    if row is None:
        edges = np.array([entry.first_block, entry.first_block + entry.num_blocks])
        start, stop = blocks.before(blocks.local_blocks(edges)).tolist()
        return start, stop
    listed = snapshot.sources[entry.column]
    if not listed.documents:
        raise ConfigError(
            f"{entry.name}: the index has not counted the rows of source {listed.name!r} (it does "
            "so for append_eod, split, extra_columns and document orders); leave out the row to "
            "find the whole file"
        )
    if not 0 <= row < entry.rows:
        raise ConfigError(f"{entry.name}: found row {row:,}, expected 0 to {entry.rows - 1:,}")
    before = snapshot.running("rows_before", [listed.blocks.start, entry.first_block])
    document = int(before[1] - before[0]) + row
    edges = np.array(
        [
            blocks.stored_position(*find_document(store, entry.column, document + i, read))
            for i in (0, 1)
        ]
    )
    start, stop = np.clip(edges, 0, blocks.num_tokens).tolist()
    return start, stop


def find_tokens(run: Run, source: int, reading: Reading, epoch: int, start: int, stop: int) -> Hits:
    """The samples that have a source's stored tokens [start, stop) of an epoch of one reading, as
    far as the run goes."""
    placed = reading.find_tokens(epoch, start, stop)
    parts = [
        _find_placed(run, source, reading, placed, each) for each in run.plan.list_tokens(source)
    ]
    parts = parts or [Hits(*[np.zeros(0, np.int64)] * 5)]
    hits = Hits(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    order = np.lexsort((hits.starts, hits.samples))
    hits = Hits(*(column[order] for column in hits))
    return hits._replace(stored=hits.stored - start)


def _find_placed(
    run: Run, source: int, reading: Reading, placed: Placed, samples: TokenRange
) -> Hits:
    """The samples, among those of a source that have one length, that have placed tokens;
    `stored` as in `placed`."""
    extra = run.extra_token
    begins = placed.starts - samples.token
    ends = placed.stops - samples.token
    # from the first sample that ends behind a range's start, to the last that begins before its end
    first = np.maximum((begins - samples.step - extra) // samples.step + 1, 0)
    counts = np.maximum(
        np.minimum((ends - 1) // samples.step + 1, samples.stop - samples.first) - first, 0
    )
    which = np.repeat(np.arange(len(first)), counts)
    places = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort(places, kind="stable")
    which = which[order]
    places = places[order]
    ordinals = samples.first + places
    tokens = places * samples.step
    starts = np.maximum(begins[which], tokens)
    numbers = run.plan.find_samples(np.full(len(ordinals), source, np.int32), ordinals)
    hits = Hits(
        numbers,
        ordinals,
        starts - tokens,
        np.minimum(ends[which], tokens + samples.step + extra) - tokens,
        placed.stored[which] + starts - begins[which],
    )
    # Of the sample that ends where the files change, the extra token is read either before or after
    # the change.
    positions = samples.token + tokens
    is_read = (numbers >= 0) & (positions < reading.stop)
    if reading.extra_before:
        is_read &= positions >= reading.position
    return Hits(*(column[is_read] for column in hits))


def list_epochs(run: Run, source: int) -> list[tuple[Reading, range]]:
    """The epochs of a source that a run enters, by what they read."""
    ranges = run.plan.list_tokens(source)
    readings = run.locator.readings(source)
    if not ranges:
        return []
    tokens = ranges[-1].token + (ranges[-1].stop - ranges[-1].first) * ranges[-1].step
    end = tokens + run.extra_token
    return [(reading, reading.list_epochs(end)) for reading in readings]


def _source_of(run: Run, number: int) -> int | None:
    """The number in the split of the source that has a file; None if the split does not read it."""
    _, file, snapshot = _locate_file(run, number)
    name = snapshot.sources[snapshot.file(file).column].name
    names = run.data.index_names
    return names.index(name) if name in names else None


def _locate_file(run: Run, number: int) -> tuple[BlockStore, int, Snapshot]:
    """The blocks of the snapshot that has a file of the run's index,
    the file's number there, and the snapshot."""
    for store in run.store.stores:
        if number < store.snapshot.num_files:
            return store, number, store.snapshot
        number -= store.snapshot.num_files
    raise IndexError(f"file {number} is out of range")


def _list_hits(
    run: Run, source: int, files: Sequence[int], row: int | None
) -> tuple[int, Iterator[_Hit]]:
    """Stored tokens of a file, or of one of its rows, which several snapshots may have;
    the samples that have them."""
    entries = {
        store.snapshot.digest: (store, number)
        for store, number, _ in (_locate_file(run, i) for i in files)
    }
    tokens = 0
    ranges = dict[int, tuple[int, int]]()
    for i, reading in enumerate(run.locator.readings(source)):
        if (known := entries.get(reading.blocks.snapshot.digest)) is not None:
            store, number = known
            start, stop = stored_tokens(
                store,
                reading.blocks,
                store.snapshot.file(number),
                row,
                partial(_read_block, run, store),
            )
            ranges[i] = reading.count_remaining(start, stop)
            tokens = max(tokens, stop - start)
    return tokens, _iterate_hits(run, source, ranges)


def _iterate_hits(run: Run, source: int, ranges: dict[int, tuple[int, int]]) -> Iterator[_Hit]:
    """The samples that have stored tokens, given as a range by the number
    of the reading, epoch by epoch."""
    for i, (reading, epochs) in enumerate(list_epochs(run, source)):
        start, stop = ranges.get(i, (0, 0))
        for epoch in epochs if start < stop else ():
            samples, _, *columns = (
                column.tolist() for column in find_tokens(run, source, reading, epoch, start, stop)
            )
            rows = zip(samples, *columns, strict=True)
            for sample, pieces in groupby(rows, key=lambda row: int(row[0])):
                yield sample, epoch, [piece[1:] for piece in pieces]


def _read_block(run: Run, store: BlockStore, block: int) -> DecodedBlock:
    """Decode a block of one of the run's snapshots where its file is now,
    which may have been renamed since."""
    first = run.store.first_blocks[run.store.stores.index(store)]
    decoded: DecodedBlock = run.store.read([first + block])[0]
    return decoded


def _describe_sample(
    sample: int, epoch: int, pieces: list[tuple[int, ...]], skips: Skips, batch_size: int | None
) -> FoundSample:
    """A sample with its place in the training: whether it is skipped,
    and at which step it is read otherwise."""
    skipped = skips.next_sample(sample) != sample
    return FoundSample(
        sample=sample,
        epoch=epoch,
        pieces=tuple(
            FoundPiece(first_token=first, stop_token=stop, offset=offset)
            for first, stop, offset in pieces
        ),
        skipped=skipped,
        step=None if skipped or batch_size is None else skips.count_trained(sample) // batch_size,
        counts_steps=batch_size is not None,
    )

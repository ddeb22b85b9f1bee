"""Find the samples of a run that read a file, or one of its documents: the inverse of `show`. No
data is read for a file; for a document, the blocks in which it begins and ends are read.

`match_files` finds the requested files, `stored_tokens` finds the tokens of a source that belong to
them, and `sample_pieces` finds the samples in which an epoch reads these tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import Field, dataclass
from itertools import islice
from typing import Any

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.inspect.match_files import locate_file, match_files
from megablend.inspect.sample_pieces import FoundPiece, iterate_samples
from megablend.inspect.stored_tokens import list_stored_ranges
from megablend.inspect.text_places import TextPlaces
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.run.run import Run
from megablend.run.skips import Skips, skips_of
from megablend.system.failures import translating
from megablend.text.places import find_document


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FoundSample(Record):
    """A sample that contains tokens from a file."""

    sample: int
    epoch: int
    pieces: tuple[FoundPiece, ...]
    skipped: bool
    """Whether the run skips the sample."""
    step: int | None
    """The step that reads the sample; None if it is skipped, or no `batch_size` was given."""
    counts_steps: bool
    """Whether a `batch_size` was given. If it was, the result of `to_dict` has the key `step`."""

    def _has(self, field: Field[Any]) -> bool:
        return self.counts_steps if field.name == "step" else field.name != "counts_steps"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FoundFile(Record):
    """A file, or one of its rows, as a source of the split reads it."""

    file: str
    source: str
    row: int | None
    tokens: int
    """Number of tokens that the file (or row) has in the split."""
    samples: tuple[FoundSample, ...]
    complete: bool
    """Whether `samples` contains all samples with tokens of the file; False if `limit` left some
    out."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FindResult(Record):
    """The samples in which a run reads a file, for each source that has it."""

    run: str
    split: str
    num_samples: int
    """Number of samples of the split."""
    found: tuple[FoundFile, ...]


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
    line: int | None = None,
    byte: int | None = None,
    key: str | None = None,
) -> FindResult:
    """Find the samples in which a run reads a file, or one row of it, or a document of a text file.

    Args:
        what: a config, or a cache's folder; `run` is needed with the latter.
        file: path of a data file, spelled in any way, or the end of the path that was indexed.
        row: number of a row (a document) of the file, counted from 0; by default the whole file.
        batch_size: samples per step, over all ranks; if given, steps are also reported.
        limit: the maximum number of samples to list; epochs after the last of them are not
            examined.
        line, byte, key: location of a document if `file` is a text file; give at most one of these
            and `row`. See `megablend.text.places.find_document`.

    Raises: the errors of BlockStore.read; CacheError; ConfigError if no file or several files
        match, or there is no such row or document.
    """
    batch_size = None if batch_size is None else whole_number("batch_size", batch_size, least=1)
    if limit is not None:
        limit = min(whole_number("limit", limit, least=1), sys.maxsize)  # as islice requires
    num_given = sum(value is not None for value in (row, line, byte, key))
    if num_given > 1:
        raise ConfigError(f"found {num_given} of row, line, byte and key, expected at most one")
    opened = Session(what, cache=cache, run=run).open(split)
    skips = skips_of(opened)
    if num_given and row is None:
        texts = TextPlaces(opened)
        storage = opened.store.storage
        file, row = find_document(file, texts.paths, storage, line=line, byte=byte, key=key)
    row = None if row is None else whole_number("row", row)
    files = list[FoundFile]()
    for (path, source), numbers in _group_by_source(opened, match_files(opened, file)).items():
        ranges = list_stored_ranges(opened, source, numbers, row)
        samples = iterate_samples(opened, source, ranges)
        files.append(
            FoundFile(
                file=path,
                source=opened.sources[source].name,
                row=row,
                # The split may have less of the file in one snapshot than in another
                tokens=max((len(stored) for stored in ranges if stored is not None), default=0),
                samples=tuple(
                    _describe_sample(*sample, skips, batch_size)
                    for sample in islice(samples, limit)
                ),
                complete=next(samples, None) is None,
            )
        )
    if not files:
        raise ConfigError(
            f"{file}: is read by no source of {split}; give the split that reads the file (`--split`)"
        )
    return FindResult(
        run=opened.ledger.run, split=split, num_samples=opened.num_samples, found=tuple(files)
    )


def _group_by_source(run: Run, files: Sequence[int]) -> dict[tuple[str, int], list[int]]:
    """Group files, given by their numbers in the index, by path and by source of the split. Each
    group has one number for every snapshot that has the file. Files that the split does not read
    are left out."""
    names = run.data.index_names
    by_source: dict[tuple[str, int], list[int]] = {}
    for file in files:
        store, number = locate_file(run, file)
        snapshot = store.snapshot
        name = snapshot.sources[snapshot.files.entry(number).column].name
        if name in names:
            path = run.store.snapshot.path(file, run.store.roots)
            by_source.setdefault((path, names.index(name)), []).append(file)
    return by_source


def _describe_sample(
    sample: int,
    epoch: int,
    pieces: tuple[FoundPiece, ...],
    skips: Skips,
    batch_size: int | None,
) -> FoundSample:
    """Describe a sample with its place in the training: whether it is skipped, or the step that
    reads it."""
    skipped = skips.next_sample(sample) != sample
    step = None
    if batch_size is not None and not skipped:
        step = skips.count_trained(sample) // batch_size
    return FoundSample(
        sample=sample,
        epoch=epoch,
        pieces=pieces,
        skipped=skipped,
        step=step,
        counts_steps=batch_size is not None,
    )

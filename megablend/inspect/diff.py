"""Find the first sample in which two runs differ, and how the runs differ. The locations of samples
are compared, without reading data."""

from __future__ import annotations

from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.caches.base import RUNS, SNAPSHOTS
from megablend.caches.find import is_remote
from megablend.errors import ConfigError
from megablend.inspect.what_if import foresee_run
from megablend.operations.differences import Difference, links_of, list_differences
from megablend.operations.results import Record
from megablend.operations.session import Session
from megablend.run import links
from megablend.run.run import Run
from megablend.run.state import State
from megablend.system.failures import translating
from megablend.system.limited_json import parse_json

_FIRST_CHUNK = 1 << 10
"""Number of samples that are compared first."""
_LARGEST_CHUNK = 1 << 16
"""The maximum number of samples that are compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiffResult(Record):
    """The differences between two runs, and the first sample in which they differ."""

    a: str
    b: str
    samples: tuple[int, int]
    """Number of samples of each run."""
    agrees_up_to: int
    """The sample at which the common stages of both runs end, or at which one of these stages was
    cut."""
    differences: tuple[Difference, ...]
    parts_at: int | None
    """The first sample that is not the same in both runs; None if one run is a prefix of the other,
    or if samples were not compared."""
    is_by_samples: bool
    """Whether samples were compared. This is not possible with a checkpoint's state, which has only
    digests."""

    def _has(self, field: Field[Any]) -> bool:
        return self.is_by_samples if field.name == "parts_at" else field.name != "is_by_samples"


@translating("diff")
def diff(a: str | Path, b: str | Path) -> DiffResult:
    """Compare the train splits of two runs.

    Args:
        a, b: the path of a config (which is planned as `build` would plan it), or of a run's ledger
            or a checkpoint's state as JSON.

    Raises: the errors of `open`; ConfigError if a file is none of these, or the files of a config
        are not indexed.
    """
    first = _read(a)
    second = _read(b)
    ledgers = [side.ledger if isinstance(side, Run) else side for side in (first, second)]
    chains = [links_of(ledger) for ledger in ledgers]
    agreed = links.find_parting(*chains).sample
    parts_at = None
    if isinstance(first, Run) and isinstance(second, Run):
        parts_at = find_parting(first, second, start=agreed)
    return DiffResult(
        a=str(a),
        b=str(b),
        samples=(chains[0][-1].stop, chains[1][-1].stop),
        agrees_up_to=agreed,
        differences=tuple(list_differences(*ledgers)),
        parts_at=parts_at,
        is_by_samples=not isinstance(first, State) and not isinstance(second, State),
    )


def find_parting(a: Run, b: Run, *, start: int = 0) -> int | None:
    """Return the number of the first sample whose source or tokens differ between two runs. Samples
    before `start` are not compared. None if one run is a prefix of the other."""
    stop = min(a.num_samples, b.num_samples)
    if a.extra_token != b.extra_token:
        return start if start < stop else None
    comparison = _Comparison(a, b)
    chunk = _FIRST_CHUNK
    while start < stop:
        ks = np.arange(start, min(start + chunk, stop))
        sample = comparison.first_difference(ks)
        if sample is not None:
            return sample
        start = start + len(ks)
        chunk = min(2 * chunk, _LARGEST_CHUNK)
    return None


class _Pieces(NamedTuple):
    """The pieces of several samples, in order, as columns: arrays of int64 [m]."""

    rows: Int64s
    """The index of the sample that the piece belongs to."""
    contents: Int64s
    """The number of the content of the piece's file; see `_number_contents`."""
    offsets: Int64s
    """The offset in the file at which the piece's block begins."""
    starts: Int64s
    """The position of the piece's first token in the block."""
    stops: Int64s
    """The position after the piece's last token in the block."""


class _Comparison:
    """A comparison of the samples of two runs. Samples are compared by position if the source's
    order is the same in both runs, otherwise by the locations of their tokens."""

    def __init__(self, a: Run, b: Run) -> None:
        self._runs = a, b
        numbers = {source.name: i for i, source in enumerate(a.sources)}
        self._number_in_a = np.array(
            [numbers.get(source.name, -1) for source in b.sources], np.int32
        )
        """The number in run a of each source of run b; -1 for a source that run a does not have."""
        self._has_same_order = np.array(
            [_have_same_order(a, b, i, source.name) for i, source in enumerate(a.sources)], bool
        )
        """Whether each source of run a has the same order in run b."""
        ids: dict[tuple[str, int | None], int] = {}
        self._contents = [_number_contents(run, ids) for run in self._runs]
        """For each run, the number of the content of each of its files."""

    def first_difference(self, ks: Int64s) -> int | None:
        """Return the first of the samples `ks` (int64 [n], ascending) that differs between the
        runs; None if all are the same."""
        a, b = self._runs
        sources_a, ordinals_a = a.plan.locate_many(ks)
        sources_b, ordinals_b = b.plan.locate_many(ks)
        starts_a, steps_a = a.plan.token_ranges(sources_a, ordinals_a)
        starts_b, steps_b = b.plan.token_ranges(sources_b, ordinals_b)
        differs = (sources_a != self._number_in_a[sources_b]) | (steps_a != steps_b)
        has_same_order = self._has_same_order[sources_a]
        differs |= has_same_order & (starts_a != starts_b)
        first = int(np.argmax(differs)) if differs.any() else len(ks)
        # Earlier samples are the same, except perhaps those of sources with different orders, whose
        # positions show nothing: their pieces are compared
        unknown = np.flatnonzero(~has_same_order[:first])
        pieces_a = self._list_pieces(0, sources_a[unknown], ordinals_a[unknown])
        pieces_b = self._list_pieces(1, sources_b[unknown], ordinals_b[unknown])
        different_row = _find_different_row(pieces_a, pieces_b)
        if different_row is not None:
            first = int(unknown[different_row])
        return int(ks[first]) if first < len(ks) else None

    def _list_pieces(
        self, number: int, sources: npt.NDArray[np.int32], ordinals: Int64s
    ) -> _Pieces:
        """Return the pieces of samples of run `number`, given their sources and ordinals, [n]
        each."""
        run = self._runs[number]
        spans = run.locate_spans(sources, ordinals)
        snapshot = run.store.snapshot
        return _Pieces(
            rows=spans.rows,
            contents=self._contents[number][snapshot.file_of(spans.blocks)],
            offsets=snapshot.blocks(spans.blocks)["offset"].astype(np.int64),
            starts=spans.starts,
            stops=spans.stops,
        )


def _find_different_row(a: _Pieces, b: _Pieces) -> int | None:
    """Return the first row whose pieces differ between two runs; None if the pieces of all rows are
    the same."""
    num_common = min(len(a.rows), len(b.rows))
    differs = np.zeros(num_common, bool)
    for column_a, column_b in zip(a, b, strict=True):
        differs |= column_a[:num_common] != column_b[:num_common]
    if differs.any():
        piece = int(np.argmax(differs))
        return int(min(a.rows[piece], b.rows[piece]))
    if len(a.rows) == len(b.rows):
        return None
    longer = max(a.rows, b.rows, key=len)
    return int(longer[num_common])


def _have_same_order(a: Run, b: Run, source: int, name: str) -> bool:
    """Return whether the settings of two runs show that the samples of a source are the same,
    ordinal by ordinal. `source` is the number of the source in run a."""
    other = next((i for i, candidate in enumerate(b.sources) if candidate.name == name), None)
    if other is None or _list_snapshots(a) != _list_snapshots(b):
        return False
    return bool(
        a.split == b.split
        and a.ledger.blend.seed == b.ledger.blend.seed
        and a.plan.epochs.segments[source] == b.plan.epochs.segments[other]
        and a.sources[source].fixed == b.sources[other].fixed
        and a.data.parts[source] == b.data.parts[other]
    )


def _list_snapshots(run: Run) -> list[str]:
    """Return the digests of the snapshots that a run reads, in order."""
    return [store.snapshot.digest for store in run.store.stores]


def _number_contents(run: Run, ids: dict[tuple[str, int | None], int]) -> Int64s:
    """Return a number for each file of a run's index, int64 [num_files]; files with the same tokens
    have the same number.

    Args:
        ids: the numbers assigned so far, by content and end-of-document token; new numbers are
            added to it.
    """
    snapshot = run.store.snapshot
    numbers = np.empty(snapshot.num_files, np.int64)
    for source, eod in zip(snapshot.sources, run.store.append_eod, strict=False):
        keys = snapshot.files.keys(source)
        numbers[source.files.start : source.files.stop] = [
            ids.setdefault((key, eod), len(ids)) for key in keys
        ]
    return numbers


def _read(path: str | Path) -> Run | State:
    """Open the run of a config or a ledger, or parse a state."""
    if is_remote(path):
        raise ConfigError(f"{path}: is in an object store; give the run's config, or a state file")
    path = Path(path)
    if path.is_dir():
        raise ConfigError(
            f"{path}: is a folder; give a config, a run's ledger (runs/NAME.json of a cache) or a state"
        )
    record = _read_json(path)
    is_ledger = record is not None and (
        {"blend", "ends"} <= record.keys()
        or {"version", "run", "sources", "stages"} <= record.keys()
    )
    if is_ledger:
        return _open_ledger_file(path)
    if record is not None and {"consumed_samples", "stages"} <= record.keys():
        return State.from_dict(record)
    foreseen = foresee_run(Session(path))
    if isinstance(foreseen, str):
        raise ConfigError(f"{path}: {foreseen}")
    return foreseen.compiled.run


def _open_ledger_file(path: Path) -> Run:
    """Open the run of a ledger in its cache. Raises: ConfigError if the ledger is outside a cache,
    so that its index is not known."""
    path = path.absolute()
    cache = path.parent.parent
    if path.parent.name != RUNS or not (cache / SNAPSHOTS).is_dir():
        raise ConfigError(
            f"{path}: is a run's ledger, but outside its cache; give the one inside the cache that "
            f"holds its index (CACHE/{RUNS}/{path.name})"
        )
    session = Session(cache, run=path.stem)
    if session.ledger is None:
        raise ConfigError(
            f"{path}: is not a run's ledger; the cache has no run {path.stem!r} (`megablend runs list` shows its runs)"
        )
    return session.open()


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a file that has one JSON object; None for other files."""
    try:
        record = parse_json(path.read_text(encoding="utf-8")) if path.suffix == ".json" else None
    except (OSError, ValueError):
        return None  # it is read as a config then, and the error names the place
    return record if isinstance(record, dict) else None

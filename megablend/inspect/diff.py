"""diff: from which sample on two runs differ, and how. Samples are located, not read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from megablend.run.links import find_agreed_end
from megablend.run.run import Run
from megablend.run.state import State
from megablend.system.failures import translating
from megablend.system.limited_json import parse_json

_FIRST_CHUNK = 1 << 10
_LARGEST_CHUNK = 1 << 16
"""Samples that are compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiffResult(Record):
    """How two runs differ, and from which sample on."""

    a: str
    b: str
    samples: tuple[int, int]
    """Samples of each."""
    agrees_up_to: int
    """Where the stages end that both have, or where an amendment cut one of them."""
    differences: tuple[Difference, ...]
    parts_at: int | None
    """The first sample that is not the same in both; None if one is the beginning of the other, and
    with a state."""
    is_by_samples: bool
    """Whether samples were compared; with a state, which has only digests, `parts_at` is not
    known."""

    def _has(self, name: str) -> bool:
        return self.is_by_samples if name == "parts_at" else name != "is_by_samples"


@translating("diff")
def diff(a: str | Path, b: str | Path) -> DiffResult:
    """Compare two runs' train: each a config (planned as `build` would), a run's ledger or a
    checkpoint's state, as JSON.

    Raises: ConfigError if one of them is none of these, or a config has no index yet; as `open`
        does.
    """
    first = _read(a)
    second = _read(b)
    ledgers = [each.ledger if isinstance(each, Run) else each for each in (first, second)]
    chains = [links_of(each) for each in ledgers]
    agreed = find_agreed_end(*chains)
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
    """The first sample from `start` on that differs in source or tokens; None if one run is the
    beginning of the other."""
    stop = min(a.num_samples, b.num_samples)
    if a.extra_token != b.extra_token:
        return start if start < stop else None
    compare = _Comparison(a, b)
    start = max(start, _first_epoch_end(a, b))
    chunk = _FIRST_CHUNK
    while start < stop:
        ks = np.arange(start, min(start + chunk, stop))
        if (sample := compare.first_difference(ks)) is not None:
            return sample
        start = start + len(ks)
        chunk = min(2 * chunk, _LARGEST_CHUNK)
    return None


class _Comparison:
    """Compares samples of two runs: by position where a source's order is the same in both,
    elsewhere by their tokens' places."""

    def __init__(self, a: Run, b: Run) -> None:
        self._runs = a, b
        names = {source.name: i for i, source in enumerate(a.sources)}
        self._number = np.array([names.get(source.name, -1) for source in b.sources], np.int32)
        """[sources of b]: their numbers in a, -1 where it has none."""
        self._same_order = np.array(
            [_have_same_order(a, b, i, source.name) for i, source in enumerate(a.sources)], bool
        )
        ids: dict[tuple[str, int | None], int] = {}
        self._files = [_number_contents(run, ids) for run in self._runs]

    def first_difference(self, ks: Int64s) -> int | None:
        """The first of the samples ks, ascending, that differs."""
        a, b = self._runs
        (sources, ordinals) = a.plan.locate_many(ks)
        (others, other_ordinals) = b.plan.locate_many(ks)
        (starts, steps) = a.plan.token_ranges(sources, ordinals)
        (other_starts, other_steps) = b.plan.token_ranges(others, other_ordinals)
        differ = (sources != self._number[others]) | (steps != other_steps)
        same = self._same_order[sources]
        differ |= same & (starts != other_starts)
        first = int(np.argmax(differ)) if differ.any() else len(ks)
        unknown = np.flatnonzero(~same[:first])  # other samples before are the same
        places = [
            self._places(0, sources, ordinals, unknown),
            self._places(1, others, other_ordinals, unknown),
        ]
        length = min(len(each[0]) for each in places)
        wrong = np.zeros(length, bool)
        for x, y in zip(*places, strict=True):
            wrong |= x[:length] != y[:length]
        if wrong.any():
            at = int(np.argmax(wrong))
            first = int(unknown[min(each[0][at] for each in places)])
        elif len(places[0][0]) != len(places[1][0]):
            longer = max(places, key=lambda each: len(each[0]))
            first = int(unknown[longer[0][length]])
        return int(ks[first]) if first < len(ks) else None

    def _places(
        self, which: int, sources: npt.NDArray[np.int32], ordinals: Int64s, chosen: Int64s
    ) -> tuple[Int64s, ...]:
        """For each piece of the chosen samples: the sample's number, the file's content, the
        block's byte offset, start, stop."""
        run = self._runs[which]
        spans = run.locate_spans(sources[chosen], ordinals[chosen])
        snapshot = run.store.snapshot
        offsets = snapshot.blocks(spans.blocks)["offset"].astype(np.int64)
        return (
            spans.rows,
            self._files[which][snapshot.file_of(spans.blocks)],
            offsets,
            spans.starts,
            spans.stops,
        )


def _have_same_order(a: Run, b: Run, source: int, name: str) -> bool:
    """Whether a source's samples are the same ordinal for ordinal, as the settings show."""
    other = next((i for i, each in enumerate(b.sources) if each.name == name), None)
    if other is None or _list_snapshots(a) != _list_snapshots(b):
        return False
    same_epochs = (
        a.plan.epochs.segments[source] == b.plan.epochs.segments[other]
        and a.ledger.blend.seed == b.ledger.blend.seed
    )
    eods = a.sources[source].append_eod == b.sources[other].append_eod
    return bool(
        same_epochs and eods and a.split == b.split and a.data.parts[source] == b.data.parts[other]
    )


def _list_snapshots(run: Run) -> list[str]:
    """Digests of the snapshots that a run reads, in order."""
    return [each.snapshot.digest for each in run.store.stores]


def _number_contents(run: Run, ids: dict[tuple[str, int | None], int]) -> Int64s:
    """A number for the tokens that each file of a run's index gives, the same for the same content:
    int64 [num_files]."""
    snapshot = run.store.snapshot
    numbers = np.empty(snapshot.num_files, np.int64)
    for source, eod in zip(snapshot.sources, run.store.append_eod, strict=False):
        keys = snapshot.files.keys(source)
        numbers[source.files.start : source.files.stop] = [
            ids.setdefault((key, eod), len(ids)) for key in keys
        ]
    return numbers


def _first_epoch_end(a: Run, b: Run) -> int:
    """A sample up to which two runs are the same if they differ only in the version of the plan; 0
    if they differ in more.

    Both versions order a source's samples the same way until the period in
    which its first epoch ends.
    """
    if len(a.blends) > 1 or len(b.blends) > 1:
        return 0
    short, long = sorted((a.ledger, b.ledger), key=lambda ledger: len(ledger.ends))
    same = a.ledger.indices == b.ledger.indices and short.ends == long.ends[: len(short.ends)]
    if not same or a.ledger.in_version(b.ledger.plan_version).blend != b.ledger.blend:
        return 0
    first = short.ends[-1]
    for source, tokens in enumerate(a.data.tokens):
        sample = a.plan.first_sample_from(source, tokens // a.sequence_length)
        if sample is not None:
            blend = a.ledger.blend
            period = (blend.sources[source].cycles or 1) * blend.lanes * blend.shuffle_window
            first = min(first, max(0, sample - 2 * period))
    return first


def _read(path: str | Path) -> Run | State:
    """A run that a config, a ledger or a state describes."""
    if is_remote(path):
        raise ConfigError(f"{path}: is in an object store; give the run's config, or a state file")
    path = Path(path)
    if path.is_dir():
        raise ConfigError(
            f"{path}: is a folder; give a config, a run's ledger (runs/NAME.json of a cache) or a state"
        )
    record = _json_of(path)
    if record is not None and (
        {"blend", "ends"} <= record.keys()
        or {"version", "run", "sources", "stages"} <= record.keys()
    ):
        return _open_ledger_file(path)
    if record is not None and {"consumed_samples", "stages"} <= record.keys():
        return State.from_dict(record)
    foreseen = foresee_run(Session(path))
    if isinstance(foreseen, str):
        raise ConfigError(f"{path}: {foreseen}")
    return foreseen.compiled.run


def _open_ledger_file(path: Path) -> Run:
    """The run of a ledger in its cache. Raises: ConfigError for one outside a cache,
    whose index is not known."""
    path = path.absolute()
    cache = path.parent.parent
    if path.parent.name != RUNS or not (cache / SNAPSHOTS).is_dir():
        raise ConfigError(
            f"{path}: is a run's ledger, but outside its cache; give the one inside the cache that "
            f"holds its index (CACHE/{RUNS}/{path.name})"
        )
    session = Session(cache, run=path.stem)
    if session.ledger is None:
        raise ConfigError(f"{path}: is not a run's ledger; the cache has no run {path.stem!r}")
    return session.open()


def _json_of(path: Path) -> dict[str, Any] | None:
    """What a file of one JSON object holds; None for other files."""
    try:
        record = parse_json(path.read_text(encoding="utf-8")) if path.suffix == ".json" else None
    except (OSError, ValueError):
        return None  # as a config it is refused with its place
    return record if isinstance(record, dict) else None

"""The companion of a run's ledger: a file that stores what the config requested, and the plan, so
that opening the run has to compute neither.

A companion is named after the ledger's digest and the config's request, and stored with the splits
of the run's last snapshot. It contains nothing that cannot be computed from these: if the file is
missing or damaged, or belongs to another ledger, the config is compiled, and the file is written
again. The trees of sources, and the rest of periods after cuts, are not stored, but computed when a
stage is needed.

The file consists of int64 numbers (`ComputedNumbers`): the length of the head, the head (JSON), the
rows (arrays of the plan, [num_rows, num_sources]), and the table of epochs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any

import numpy as np

from megablend.arrays import Int64s
from megablend.blend.epochs import Epochs, Segment
from megablend.blend.interleavings.base import StageRequest
from megablend.blend.plan import PlannedStage, StagesPlan
from megablend.caches.base import CacheStore
from megablend.index.tables.sealed_numbers import ComputedNumbers
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import parse_blend
from megablend.run.ledger_format import blend_record
from megablend.run.stage import Stage
from megablend.system.limited_json import fits

_LAYOUT = "companion 2"
"""Version of the file's layout; part of the digest that names the file."""
_INT64 = np.dtype(np.int64)
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError)
"""Errors that parsing may raise if another program wrote the file, although its checksum is
right."""
_COLUMNS = 7
"""Number of columns of the table of epochs; see `_list_epochs`."""
_ROW = (int, NoneType)
"""The number of a row, or None for an array that is None."""
_REQUEST = {
    **dict.fromkeys(("first_sample", "seed", "lanes", "shuffle_window", "sample_tokens"), int),
    **dict.fromkeys(("totals", "first_tokens", "cycles"), int),
    "epoch_tokens": _ROW,
}
"""The fields of a StageRequest; arrays are given by the numbers of their rows."""
_STAGE = {
    "request": _REQUEST,
    "cursor": int,
    "interleaving": str,
    "number": int,
    "length": int,
    "cut_edges": ([int], NoneType),
    "dropped": _ROW,
}
"""The stored fields of a PlannedStage; see `_REQUEST`."""
_ARRAYS = frozenset(
    ("totals", "first_tokens", "cycles", "epoch_tokens", "cursor", "cut_edges", "dropped")
)
"""The fields of both that are arrays."""
_HEAD = {
    "starts": [int],
    "others": {str: {"end": int, "index": str, "blend": dict}},
    "num_sources": int,
    "num_rows": int,
    "stages": [_STAGE],
    "names": [[str]],
    "withdrawn": [[str]],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """The results of compiling a config that are needed to open its run."""

    starts: tuple[int, ...]
    """The first sample of each stage that the config lists."""
    others: Mapping[str, Ledger] = field(default_factory=dict)
    """The ledgers of valid and test, if they have sources, by split."""
    plan: StagesPlan
    """The plan of train."""


def load_companion(cache: CacheStore, ledger: Ledger, request: str | None) -> Companion | None:
    """Load the companion of a ledger and a config's request.

    Args:
        request: see `Ledger.request`. If it is None (not known), no companion is found.

    Returns: None if the file is missing, damaged or unreadable, or belongs to another ledger.
    """
    if request is None:
        return None
    cache.fetch_files("splits", [ledger.index])
    numbers = _file_of(cache, ledger, request).find(_INT64)
    if numbers is None:
        return None
    with contextlib.suppress(*_MALFORMED):
        stop = 1 + int(numbers[0])
        head = json.loads(numbers[1:stop].tobytes())
        if not fits(head, _HEAD):
            return None
        rest = numbers[stop:]
        stop = head["num_rows"] * head["num_sources"]
        rows = rest[:stop].reshape(head["num_rows"], head["num_sources"])
        stages = []
        for stage_record in head["stages"]:
            requested = StageRequest(**_with_arrays(stage_record["request"], rows))
            stages.append(PlannedStage(**_with_arrays(stage_record | {"request": requested}, rows)))
        table = rest[stop:].reshape(-1, _COLUMNS)
        epochs = partial(_parse_epochs, table, head["names"], head["withdrawn"])
        plan = StagesPlan(stages, epochs)
        if (plan.num_samples, plan.num_sources) != (ledger.num_samples, len(ledger.blend.sources)):
            return None
        others = dict[str, Ledger]()
        for split, record in head["others"].items():  # each has one stage
            if record["index"] not in ledger.indices:
                return None
            blend = parse_blend(record["blend"], may_be_unblended=True)
            stage = Stage(end=record["end"], index=record["index"], blend=blend)
            others[split] = Ledger(run=ledger.run, stages=(stage,))
        return Companion(starts=tuple(head["starts"]), others=others, plan=plan)
    return None


def save_companion(cache: CacheStore, ledger: Ledger, request: str, companion: Companion) -> None:
    """Write the companion of a ledger and a config's request, if it is missing or damaged.

    Raises: CacheError if it cannot be written.
    """
    if load_companion(cache, ledger, request) is not None:
        return
    plan = companion.plan
    rows = _Rows()
    stages = list[dict[str, Any]]()
    for stage in plan.stages:
        stages.append(rows.list_fields(stage, _STAGE))
        stages[-1]["request"] = rows.list_fields(stage.request, _REQUEST)
    others = dict[str, dict[str, Any]]()
    for split, other in companion.others.items():
        (only,) = other.stages
        blend = blend_record(only.blend)
        others[split] = {"end": only.end, "index": only.index, "blend": blend}
    names, withdrawn, epochs = _list_epochs(plan.epochs)
    head = {
        "starts": companion.starts,
        "others": others,
        "num_sources": plan.num_sources,
        "num_rows": len(rows.rows),
        "stages": stages,
        "names": names,
        "withdrawn": withdrawn,
    }
    record = json.dumps(head, separators=(",", ":")).encode()
    words = np.frombuffer(record + b" " * (-len(record) % 8), "<i8")
    numbers = np.concatenate([[len(words)], words, *rows.rows, epochs.ravel()])
    _file_of(cache, ledger, request).keep(numbers)


def _file_of(cache: CacheStore, ledger: Ledger, request: str) -> ComputedNumbers:
    # The digest does not say whether an amendment has cut the last stage
    key = [_LAYOUT, ledger.digest, ledger.num_samples, request]
    return ComputedNumbers(cache.folder, ledger.index, key)


class _Rows:
    """Collects the arrays of a plan; equal rows are stored once."""

    def __init__(self) -> None:
        self.rows = list[Int64s]()
        self._numbers = dict[bytes, int]()

    def list_fields(
        self, record: StageRequest | PlannedStage, shape: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the fields that `shape` names as JSON, with the numbers of rows in place of
        arrays."""
        values = dict[str, Any]()
        for name in shape:
            value = getattr(record, name)
            values[name] = self._add(value) if isinstance(value, np.ndarray) else value
        return values

    def _add(self, array: Int64s) -> int | list[Any]:
        """Store an array, int64 [num_sources] or [n, num_sources], and return the numbers of its
        rows."""
        if array.ndim > 1:
            return list(map(self._add, array))
        number = self._numbers.setdefault(array.tobytes(), len(self.rows))
        if number == len(self.rows):
            self.rows.append(array)
        return number


def _with_arrays(record: Mapping[str, Any], rows: Int64s) -> dict[str, Any]:
    """Return the fields of a record, with arrays in place of the numbers of their rows."""
    values = dict(record)
    for name in _ARRAYS.intersection(record):
        if record[name] is not None:
            values[name] = rows[record[name]]
    return values


def _list_epochs(
    epochs: Epochs,
) -> tuple[list[tuple[str, str]], list[tuple[str, ...]], Int64s]:
    """List the segments of all sources.

    Returns: the distinct pairs of snapshot and order of segments; the distinct values of
        `withdrawn`; and a table with a row for each segment, int64 [num_segments, 7]: source,
        position, epoch, tokens, offset, and its numbers in these two lists.
    Raises: OverflowError if a number has more than 64 bits.
    """
    pairs = dict[tuple[str, str], int]()
    withdrawn = dict[tuple[str, ...], int]()
    table = list[tuple[int, ...]]()
    for source, segments in enumerate(epochs.segments):
        for segment in segments:
            pair = pairs.setdefault((segment.snapshot, segment.order), len(pairs))
            gone = withdrawn.setdefault(segment.withdrawn, len(withdrawn))
            row = (
                source,
                segment.position,
                segment.epoch,
                segment.tokens,
                segment.offset,
                pair,
                gone,
            )
            table.append(row)
    return list(pairs), list(withdrawn), np.array(table, np.int64)


def _parse_epochs(
    table: Int64s, names: Sequence[Sequence[str]], withdrawn: Sequence[Sequence[str]]
) -> Epochs:
    segments: list[list[Segment]] = []
    for source, position, epoch, tokens, offset, pair_number, withdrawn_number in table.tolist():
        if source == len(segments):
            segments.append([])
        snapshot, order = names[pair_number]
        segments[source].append(
            Segment(
                position, epoch, snapshot, order, tokens, offset, tuple(withdrawn[withdrawn_number])
            )
        )
    return Epochs(tuple(map(tuple, segments)))

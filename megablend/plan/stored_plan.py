"""A plan of stages in JSON and arrays: totals and cursors at the start of each stage, so that opening need not plan it again.

Trees, and what cuts leave of periods, are not stored: they are made when a stage is first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.plan.epochs import Epochs, Segment
from megablend.plan.interleavings.base import StageRequest
from megablend.plan.planned_stage import PlannedStage
from megablend.plan.stages_plan import StagesPlan

_NUMBERS = ("first_sample", "seed", "lanes", "shuffle_window", "sample_tokens")
_ARRAYS = ("totals", "first_tokens", "cycles", "epoch_tokens")
"""Fields of a StageRequest."""
_COLUMNS = 7
"""Of the table of epochs; see `_dump_epochs`."""


class StoredPlan(NamedTuple):
    """A plan as it is stored."""

    record: dict[str, Any]
    """JSON-serializable; refers to the arrays by number."""
    arrays: list[Int64s]
    """int64 [size] each."""


class _Pool:
    """The arrays of a plan, each different one once."""

    def __init__(self) -> None:
        self.arrays, self._numbers = list[Int64s](), dict[bytes, int]()

    def add(self, array: Int64s | None) -> int | None:
        """The number of an array; None for None."""
        if array is None:
            return None
        data = array.tobytes()
        if data not in self._numbers:
            self._numbers[data] = len(self.arrays)
            self.arrays.append(array.ravel())
        return self._numbers[data]


def dump_plan(plan: StagesPlan) -> StoredPlan:
    """A plan as it is stored. Raises: OverflowError where a number has more than 64 bits."""
    pool = _Pool()
    stages = []
    for stage in plan.stages:
        request = stage.request
        stages.append(
            {
                **{name: getattr(request, name) for name in _NUMBERS},
                **{name: pool.add(getattr(request, name)) for name in _ARRAYS},
                "cursor": pool.add(stage.cursor),
                "cut_edges": pool.add(stage.cut_edges),
                "dropped": pool.add(stage.dropped),
                "interleaving": stage.interleaving,
                "number": stage.number,
                "length": stage.length,
            }
        )
    epochs = _dump_epochs(plan.epochs, pool)
    return StoredPlan({"num_sources": plan.num_sources, "stages": stages, "epochs": epochs}, pool.arrays)


def parse_plan(stored: StoredPlan) -> StagesPlan:
    """The inverse of `dump_plan`. Raises: ValueError, LookupError, TypeError or AttributeError for what it did not make."""
    record, arrays = stored
    size = record["num_sources"]

    def take(number: int | None, *shape: int) -> Int64s | None:
        return None if number is None else arrays[number].reshape(shape)

    def need(number: int) -> Int64s:
        array: Int64s = arrays[number].reshape(size)
        return array

    stages = []
    for each in record["stages"]:
        if not all(type(each[name]) is int for name in (*_NUMBERS, "number", "length")):
            raise ValueError("a setting of a stage is not a whole number")
        totals, first_tokens, cycles = (need(each[name]) for name in _ARRAYS[:3])
        request = StageRequest(
            **{name: each[name] for name in _NUMBERS},
            totals=totals,
            first_tokens=first_tokens,
            cycles=cycles,
            epoch_tokens=take(each["epoch_tokens"], size),
        )
        stages.append(
            PlannedStage(
                request=request,
                cursor=need(each["cursor"]),
                interleaving=each["interleaving"],
                number=each["number"],
                length=each["length"],
                cut_edges=take(each["cut_edges"], 3, size),
                dropped=take(each["dropped"], size),
            )
        )
    table = arrays[record["epochs"]["segments"]].reshape(-1, _COLUMNS)
    return StagesPlan(stages, partial(_parse_epochs, table, record["epochs"]["names"], record["epochs"]["withdrawn"]))


def _dump_epochs(epochs: Epochs, pool: _Pool) -> dict[str, Any]:
    """The segments of all sources: a table of the source and a Segment's fields, whose texts are numbers of listed ones."""
    pairs, withdrawn = dict[tuple[str, str], int](), dict[tuple[str, ...], int]()
    rows = [
        (
            source,
            each.position,
            each.epoch,
            each.tokens,
            each.offset,
            pairs.setdefault((each.snapshot, each.order), len(pairs)),
            withdrawn.setdefault(each.withdrawn, len(withdrawn)),
        )
        for source, segments in enumerate(epochs.segments)
        for each in segments
    ]
    return {"names": list(pairs), "withdrawn": list(withdrawn), "segments": pool.add(np.array(rows, np.int64))}


def _parse_epochs(table: Int64s, names: Sequence[Sequence[str]], withdrawn: Sequence[Sequence[str]]) -> Epochs:
    segments: list[list[Segment]] = []
    for source, position, epoch, tokens, offset, pair, gone in table.tolist():
        if source == len(segments):
            segments.append([])
        snapshot, order = names[pair]
        segments[source].append(Segment(position, epoch, snapshot, order, tokens, offset, tuple(withdrawn[gone])))
    return Epochs(tuple(map(tuple, segments)))

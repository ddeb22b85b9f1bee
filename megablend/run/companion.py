"""The companion of a run's ledger: a file that stores what the config requested, and the plan, so
that opening the run has to compute neither.

A companion is named after the ledger's chain and the config's request, and stored with the splits
of the run's last snapshot. It contains nothing that cannot be computed from these: if the file is
missing or damaged, or belongs to another ledger, the config is compiled, and the file is written
again. The trees of sources, and the rest of periods after cuts, are not stored, but computed when a
stage is needed.

The file: checksum (16 bytes), size of the head in bytes (8), head (JSON), arrays (int64).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from megablend.arrays import Int64s
from megablend.blend.epochs import Epochs, Segment
from megablend.blend.interleavings.base import StageRequest
from megablend.blend.plan import PlannedStage, StagesPlan
from megablend.index.tables.cache_folders import splits
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import parse_blend
from megablend.run.ledger_format import blend_record
from megablend.run.stage import Stage
from megablend.system.atomic_write import keep_computed
from megablend.system.digest import digest_json
from megablend.system.limited_json import fits
from megablend.system.safe_open import read_regular

_LAYOUT = "companion 1"
"""Version of the file's layout; part of the digest that names the file."""
_DIGEST = 16
"""Size of the checksum in bytes."""
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, ZeroDivisionError)
"""Errors that parsing may raise if another program wrote the file, although its checksum is
right."""
_NUMBERS = ("first_sample", "seed", "lanes", "shuffle_window", "sample_tokens")
"""Fields of a StageRequest that are integers."""
_ARRAYS = ("totals", "first_tokens", "cycles", "epoch_tokens")
"""Fields of a StageRequest that are arrays; the last one may be None."""
_COLUMNS = 7
"""Number of columns of the table of epochs; see `_dump_epochs`."""
_STAGE = {
    **dict.fromkeys((*_NUMBERS, "number", "length", *_ARRAYS[:3], "cursor"), int),
    **dict.fromkeys((_ARRAYS[3], "cut_edges", "dropped"), (int, NoneType)),
    "interleaving": str,
}
_HEAD = {
    "starts": [int],
    "others": {str: {"end": int, "index": str, "blend": dict}},
    "plan": {"num_sources": int, "stages": [_STAGE], "epochs": dict},
    "sizes": [int],
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


def load_companion(cache: Path, ledger: Ledger, request: str) -> Companion | None:
    """Load the companion of a ledger and a config's request.

    Args:
        cache: folder of the cache.
        request: see `Ledger.request`.

    Returns: None if the file is missing, damaged or unreadable, or belongs to another ledger.
    """
    path = _path(cache, ledger, request)
    with contextlib.suppress(OSError, *_MALFORMED):
        whole = read_regular(path)
        checksum = whole[:_DIGEST]
        data = memoryview(whole)[_DIGEST:]
        if checksum != _checksum(data, path.name):
            return None
        size = int.from_bytes(data[:8], "little")
        head = json.loads(bytes(data[8 : 8 + size]))
        if not fits(head, _HEAD):
            return None
        numbers = np.frombuffer(data[8 + size :], "<i8")
        plan = _parse_plan(head["plan"], np.split(numbers, np.cumsum(head["sizes"])[:-1]))
        others = {
            split: _parse_other(ledger.run, record) for split, record in head["others"].items()
        }
        has_all = (
            plan.num_samples == ledger.num_samples
            and plan.num_sources == len(ledger.blend.sources)
            and {other.index for other in others.values()} <= set(ledger.indices)
        )
        if has_all:
            return Companion(starts=tuple(head["starts"]), others=others, plan=plan)
    return None


def save_companion(cache: Path, ledger: Ledger, request: str, companion: Companion) -> None:
    """Write the companion of a ledger and a config's request, if it is missing or damaged.

    Raises: CacheError if it cannot be written.
    """
    if load_companion(cache, ledger, request) is not None:
        return
    pool = _Pool()
    head = {
        "starts": companion.starts,
        "others": {split: _dump_other(other) for split, other in companion.others.items()},
        "plan": _dump_plan(companion.plan, pool),
        "sizes": [len(array) for array in pool.arrays],
    }
    record = json.dumps(head, separators=(",", ":")).encode()
    record += b" " * (-len(record) % 8)  # so that arrays are aligned
    parts = [
        len(record).to_bytes(8, "little"),
        record,
        *(array.astype("<i8").tobytes() for array in pool.arrays),
    ]
    contents = b"".join(parts)
    path = _path(cache, ledger, request)
    keep_computed(path, _checksum(contents, path.name) + contents)


def _path(cache: Path, ledger: Ledger, request: str) -> Path:
    chain = [link.to_list() for link in ledger.links]
    return splits(cache) / f"{ledger.index}-{digest_json([_LAYOUT, chain, request])}"


def _checksum(data: bytes | memoryview, name: str) -> bytes:
    """Return a checksum of the data and of the file's name, so that a renamed file is not
    accepted."""
    key = hashlib.blake2b(name.encode(), digest_size=64).digest()
    return hashlib.blake2b(data, key=key, digest_size=_DIGEST).digest()


def _dump_other(ledger: Ledger) -> dict[str, Any]:
    """Return the ledger of valid or test, which has one stage, as JSON."""
    (stage,) = ledger.stages
    return {"end": stage.end, "index": stage.index, "blend": blend_record(stage.blend)}


def _parse_other(run: str, record: dict[str, Any]) -> Ledger:
    """Parse the result of `_dump_other`. Raises: one of `_MALFORMED`."""
    blend = parse_blend(record["blend"], may_be_unblended=True)
    return Ledger(run=run, stages=(Stage(end=record["end"], index=record["index"], blend=blend),))


class _Pool:
    """Collects the arrays of a plan; equal arrays are stored once."""

    def __init__(self) -> None:
        self.arrays = list[Int64s]()
        self._numbers = dict[bytes, int]()

    def add(self, array: Int64s | None) -> int | None:
        """Store an array, unless an equal one is stored already, and return its number; return None
        for None."""
        if array is None:
            return None
        data = array.tobytes()
        if data not in self._numbers:
            self._numbers[data] = len(self.arrays)
            self.arrays.append(array.ravel())
        return self._numbers[data]


def _dump_plan(plan: StagesPlan, pool: _Pool) -> dict[str, Any]:
    """Return a plan as JSON, which refers to arrays by number. Raises: OverflowError if a number
    has more than 64 bits."""
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
    return {
        "num_sources": plan.num_sources,
        "stages": stages,
        "epochs": _dump_epochs(plan.epochs, pool),
    }


def _parse_plan(record: dict[str, Any], arrays: Sequence[Int64s]) -> StagesPlan:
    """Parse the result of `_dump_plan`. Raises: one of `_MALFORMED`."""
    size = record["num_sources"]

    def take(number: int | None, *shape: int) -> Int64s | None:
        return None if number is None else arrays[number].reshape(shape)

    stages = []
    for each in record["stages"]:
        values = {name: each[name] for name in _NUMBERS}
        values |= {name: take(each[name], size) for name in _ARRAYS}
        stages.append(
            PlannedStage(
                request=StageRequest(**values),
                cursor=arrays[each["cursor"]].reshape(size),
                interleaving=each["interleaving"],
                number=each["number"],
                length=each["length"],
                cut_edges=take(each["cut_edges"], 3, size),
                dropped=take(each["dropped"], size),
            )
        )
    epochs = record["epochs"]
    table = arrays[epochs["segments"]].reshape(-1, _COLUMNS)
    return StagesPlan(stages, partial(_parse_epochs, table, epochs["names"], epochs["withdrawn"]))


def _dump_epochs(epochs: Epochs, pool: _Pool) -> dict[str, Any]:
    """Return the segments of all sources as a table with a row for each segment: source, position,
    epoch, tokens, offset, the number of its (snapshot, order) in `names`, and the number of its
    `withdrawn` in a list of these."""
    pairs = dict[tuple[str, str], int]()
    withdrawn = dict[tuple[str, ...], int]()
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
    return {
        "names": list(pairs),
        "withdrawn": list(withdrawn),
        "segments": pool.add(np.array(rows, np.int64)),
    }


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

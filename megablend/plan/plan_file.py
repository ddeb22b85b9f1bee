"""What is kept beside a run's ledger so that it opens quickly: its stages without their sources, their plan, and checked configs.

The files are named by what they were made from, and stored with the splits of the run's last snapshot. They hold nothing that
the ledger, the index and the config do not imply: where one is missing or damaged, or of another ledger, it is made again by the
next build, and until then computed when the run is opened.

    plan file    checksum, bytes of the head, head (JSON), arrays (int64)
    approval     checksum: a config requests what the ledger has, so opening need not compute the request
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megablend.arrays import Int64s
from megablend.fs.atomic_write import keep_computed
from megablend.fs.safe_open import read_regular
from megablend.index.cache_folders import splits
from megablend.lazy import LazyTuple, cached_property
from megablend.plan.ledger_format import chain_digests, digest_of, parse_ledger
from megablend.plan.schedule import Schedule
from megablend.plan.stage import SETTINGS, Blend, SourceShare, Stage
from megablend.plan.stages_plan import StagesPlan
from megablend.plan.stored_plan import StoredPlan, dump_plan, parse_plan
from megablend.system.limited_json import parse_json

VERSION = 1
"""To be raised with every change of what is stored, of how a ledger is planned, and of what a config requests."""
RELEASE = "0.1.0"
"""The release of megablend, whose approvals others do not use: what a config requests may change with a new default."""
_DIGEST = 16
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What parsing raises for a file that another program wrote, though its checksum is right."""
_INDEX = re.compile(r'"index": ?"([0-9a-f]+)"')
_NUMBERS = ("end", "sources", "sequence_length", "plan_version", "seed", "lanes", "shuffle_window")


class LedgerText:
    """The text of a ledger, parsed when something of its stages' sources is first needed. Picklable."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[type[LedgerText], tuple[str]]:
        return LedgerText, (self.text,)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages. Raises: ValueError where the text is not a ledger."""
        return parse_ledger(parse_json(self.text))[1]

    def sources(self, number: int) -> Sequence[SourceShare]:
        """The sources of a stage's blend."""
        return self.stages[number].blend.sources

    def schedule_start(self, number: int) -> Sequence[Any]:
        """The shares at which a stage's schedule begins."""
        schedule = self.stages[number].blend.schedule
        assert schedule is not None
        return schedule.start


class PlanFile:
    """A plan file that was read and checked. Pickled as None, since what it holds is then in the plan already."""

    def __init__(self, cache: Path, text: str, head: dict[str, Any], arrays: list[Int64s]) -> None:
        self.cache, self.text, self._head, self._arrays = cache, text, head, arrays
        self.run: str = head["run"]
        self.digests: tuple[str, ...] = tuple(each["digest"] for each in head["stages"])
        """The plan's digest after each stage."""
        ledger = LedgerText(text)
        self.stages = tuple(_parse_stage(ledger, number, each) for number, each in enumerate(head["stages"]))
        """The ledger's stages, whose sources are parsed when one of them is first needed."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def make_plan(self, data: str) -> StagesPlan | None:
        """The run's plan; None where it was made for other data, see `Specification.data_digest`, or cannot be parsed."""
        if data == self._head.get("data"):
            with contextlib.suppress(*_MALFORMED):
                return parse_plan(StoredPlan(self._head["plan"], self._arrays))
        return None


def load_plan_file(cache: Path, text: str) -> PlanFile | None:
    """The plan file of a ledger's text; None where it is missing, damaged, or not readable."""
    path = _path(cache, text, "plan")
    with contextlib.suppress(OSError, *_MALFORMED):
        whole = read_regular(path)
        checksum, data = whole[:_DIGEST], memoryview(whole)[_DIGEST:]
        if checksum != _checksum(data, path.name):
            return None
        size = int.from_bytes(data[:8], "little")
        head = json.loads(bytes(data[8 : 8 + size]))
        edges = np.cumsum([0, *head["sizes"]]).tolist()
        numbers = np.frombuffer(data[8 + size :], "<i8")
        return PlanFile(cache, text, head, [numbers[start:stop] for start, stop in pairwise(edges)])
    return None


def save_plan_file(cache: Path, text: str, stages: Sequence[Stage], plan: StagesPlan, data: str) -> None:
    """Write the plan file of a ledger, where it is missing or damaged.

    Args:
        text: of the ledger.
        data: see `Specification.data_digest`.

    Raises: CacheError where it cannot be written.
    """
    if load_plan_file(cache, text) is not None:
        return
    stored = dump_plan(plan)
    head = {
        "run": parse_json(text)["run"],
        "stages": [_dump_stage(stage, digest) for stage, digest in zip(stages, chain_digests(stages), strict=True)],
        "data": data,
        "plan": stored.record,
        "sizes": [len(array) for array in stored.arrays],
    }
    record = json.dumps(head, separators=(",", ":")).encode()
    record += b" " * (-len(record) % 8)  # so that arrays are aligned
    parts = [len(record).to_bytes(8, "little"), record, *(array.astype("<i8").tobytes() for array in stored.arrays)]
    contents = b"".join(parts)
    path = _path(cache, text, "plan")
    keep_computed(path, _checksum(contents, path.name) + contents)


def is_approved(cache: Path, text: str, data: str, request: str | None) -> bool:
    """Whether a config was found to request exactly what a ledger's text has.

    Args:
        request: see `Config.request_digest`.
    """
    if request is None:
        return False
    path = _path(cache, text, "approval", data, request)
    with contextlib.suppress(OSError):
        return read_regular(path) == _checksum(b"", path.name)
    return False


def save_approval(cache: Path, text: str, data: str, request: str) -> None:
    """Record that a config requests exactly what a ledger's text has. Raises: CacheError where it cannot be written."""
    if not is_approved(cache, text, data, request):
        path = _path(cache, text, "approval", data, request)
        keep_computed(path, _checksum(b"", path.name))


def _path(cache: Path, text: str, *what: str) -> Path:
    """The path of a file made from a ledger's text, among the splits of the run's last snapshot."""
    owner = _INDEX.findall(text)[-1:] or [""]  # read from the text, which is not parsed here
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST).hexdigest()
    return splits(cache) / f"{owner[0]}-{digest_of([VERSION, RELEASE, digest, *what])}"


def _checksum(data: bytes | memoryview, what: str) -> bytes:
    return hashlib.blake2b(
        data, key=hashlib.blake2b(what.encode(), digest_size=64).digest(), digest_size=_DIGEST
    ).digest()


def _dump_stage(stage: Stage, digest: str) -> dict[str, Any]:
    blend = stage.blend
    record: dict[str, Any] = {name: getattr(blend, name) for name in SETTINGS}
    record |= {
        "end": stage.end,
        "cut": stage.cut,
        "index": stage.index,
        "digest": digest,
        "sources": len(blend.sources),
    }
    if (schedule := blend.schedule) is not None:
        record["schedule"] = [schedule.kind, schedule.samples, schedule.cycle, [str(done) for done in schedule.done]]
    if stage.drain is not None:
        record["drain"] = stage.drain
    if stage.whole_epochs:
        record["whole_epochs"] = True
    return record


def _parse_stage(text: LedgerText, number: int, record: dict[str, Any]) -> Stage:
    """Raises: as `_MALFORMED` says."""
    if not all(type(record[name]) is int for name in _NUMBERS):
        raise ValueError("a setting of a stage is not a whole number")
    schedule, size = None, record["sources"]
    if "schedule" in record:
        kind, samples, cycle, done = record["schedule"]
        start = LazyTuple(size, partial(text.schedule_start, number))
        schedule = Schedule(kind=kind, start=start, samples=samples, cycle=cycle, done=tuple(map(Fraction, done)))
    blend = Blend(
        **{name: record[name] for name in SETTINGS},
        sources=LazyTuple(size, partial(text.sources, number)),
        schedule=schedule,
    )
    return Stage(
        end=record["end"],
        index=record["index"],
        blend=blend,
        cut=record["cut"],
        drain=record.get("drain"),
        whole_epochs=record.get("whole_epochs", False),
    )

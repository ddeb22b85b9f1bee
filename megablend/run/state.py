"""The state of a loader that a checkpoint stores: a position in the run as one integer, and the
digests of the index and of the plan that the position belongs to.

It takes less than 1 KB of JSON, and at most 60 bytes more for each further stage. It does not
depend on world size, workers and micro batch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megablend.errors import StateError
from megablend.run.links import Link, find_parting

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A position in a run."""

    run: str
    split: str
    indices: tuple[str, ...]
    """Digests of the index snapshots that the stages read, in order; at least one."""
    stages: tuple[Link, ...]
    """The chain of the run's stages."""
    consumed_samples: int

    @property
    def index(self) -> str:
        """Digest of the index snapshot that the last stage reads."""
        return self.indices[-1]

    @property
    def plan(self) -> str:
        """Digest of the plan when the state was saved."""
        return self.stages[-1].digest

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a JSON-serializable dict."""
        return {
            "version": VERSION,
            "run": self.run,
            "split": self.split,
            "index": self.index,
            "plan": self.plan,
            "consumed_samples": self.consumed_samples,
            "stages": [link.to_list() for link in self.stages],
            **({"indices": list(self.indices)} if len(self.indices) > 1 else {}),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> State:
        """Check and convert a dict made by `to_dict`. Raises: StateError if it is damaged or has
        another version."""
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError(
                f"not a megablend state: found {str(state)[:80]!r}, expected a dict returned by state_dict()"
            )
        if state["version"] != VERSION:
            raise StateError(
                f"found state version {state['version']!r}, expected {VERSION}; use the version of megablend that wrote it"
            )
        try:
            parsed = cls(
                run=str(state["run"]),
                split=str(state["split"]),
                indices=tuple(map(str, state.get("indices", [state["index"]]))),
                stages=tuple(_parse_link(*link) for link in state["stages"]),
                consumed_samples=operator.index(state["consumed_samples"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"incomplete or damaged megablend state: {type(error).__name__} {error}; load another checkpoint"
            ) from None
        if not parsed.indices or parsed.index != state["index"]:
            raise StateError(
                "incomplete or damaged megablend state: `index` is not the last one in `indices`; "
                "load another checkpoint"
            )
        if not parsed.stages or parsed.plan != state.get("plan") or parsed.consumed_samples < 0:
            raise StateError(
                "incomplete or damaged megablend state: `plan`, `stages` and `consumed_samples` do not "
                "fit together; load another checkpoint"
            )
        return parsed

    def reads_other(self, indices: Sequence[str]) -> bool:
        """Return whether one of the state's snapshots differs from the snapshot at the same index
        in `indices`."""
        return any(x != y for x, y in zip(self.indices, indices, strict=False))

    def check(self, *, split: str, indices: Sequence[str], stages: Sequence[Link]) -> None:
        """Check that a run can resume from the state: the split is the same, and the plans and
        their indices do not differ before the state's position.

        What comes after the position may differ: stages may have been appended or amended since,
        and read another index.

        Raises: StateError with both digests, the sample from which the plans differ, and the
            remedy.
        """
        if self.split != split:
            raise StateError(
                f"the state belongs to split {self.split!r}, but this dataset is split {split!r}; open that split"
            )
        parting = find_parting(self.stages, stages)
        consumed = self.consumed_samples
        if parting.by_cut and consumed > parting.sample:
            if any(link.cut == parting.sample for link in self.stages):
                raise StateError(
                    f"the state is at sample {consumed:,} of a plan that was amended from sample {parting.sample:,} on, as run "
                    f"{self.run!r} no longer is: resume from a state saved at sample {parting.sample:,} or earlier, or, if the "
                    "run was reset, restore its ledger from `runs/reset/` in the cache"
                )
            raise StateError(
                f"run {self.run!r} was amended from sample {parting.sample:,} on, but this state "
                f"is at sample {consumed:,} of the earlier plan: resume from a state saved at sample "
                f"{parting.sample:,} or earlier, or amend the run from this state on (`megablend "
                "amend CONFIG --state FILE`)"
            )
        reads_other = self.reads_other(indices)
        is_past_end = consumed > stages[-1].stop
        if is_past_end and self.plan == stages[-1].digest and not reads_other:
            raise StateError(
                f"the state is at sample {consumed:,}, but run {self.run!r} ends at sample {stages[-1].stop:,}: "
                "consumed_samples was edited; load another checkpoint"
            )
        if is_past_end or (parting.is_end and reads_other) or not parting.agrees_before(consumed):
            remedy = "open the dataset with megablend.open(config, state=state) and the config that the run was built with"
            where = ""
            if parting.sample and not parting.is_end:
                where = f" from sample {parting.sample:,} on"
                if reads_other:
                    remedy = f"resume from a state saved at sample {parting.sample:,} or earlier"
            raise StateError(
                f"the plan differs{where}: the state was saved with plan {self.plan} of index {', '.join(self.indices)}, but "
                f"this dataset has plan {stages[-1].digest} of index {', '.join(indices)}; {remedy}"
            )


def _parse_link(
    end: Any, digest: object, cut: Any = None, drain: Any = None, whole_epochs: object = False
) -> Link:
    """Parse the result of `Link.to_list`. Raises: TypeError if a number is not an integer."""
    return Link(
        end=operator.index(end),
        digest=str(digest),
        cut=None if cut is None else operator.index(cut),
        drain=None if drain is None else operator.index(drain),
        whole_epochs=bool(whole_epochs),
    )

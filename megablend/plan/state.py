"""The state that goes into a checkpoint: one integer, and the digests that say what it counts.

Under 1 KB of JSON, and some 40 bytes for each further stage; independent of world size, workers and micro batch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megablend.errors import StateError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands."""

    run: str
    split: str
    index: str
    """Digest of the generation of the index."""
    stages: tuple[tuple[int, str], ...]
    """End of each stage, and the plan's digest after it."""
    consumed_samples: int

    @property
    def plan(self) -> str:
        """Digest of the plan as it was when the state was taken."""
        return self.stages[-1][1]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able dict."""
        return {
            "version": VERSION,
            "run": self.run,
            "split": self.split,
            "index": self.index,
            "plan": self.plan,
            "consumed_samples": self.consumed_samples,
            "stages": [[end, digest] for end, digest in self.stages],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> State:
        """Check and take over a dict made by `to_dict`. Raises StateError."""
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError(f"not a megablend state: found {str(state)[:80]!r}, expected what state_dict() gave")
        if state["version"] != VERSION:
            raise StateError(
                f"found state version {state['version']!r}, expected {VERSION}; use the megablend that wrote it"
            )
        try:
            taken = cls(
                run=str(state["run"]),
                split=str(state["split"]),
                index=str(state["index"]),
                stages=tuple((operator.index(end), str(digest)) for end, digest in state["stages"]),
                consumed_samples=operator.index(state["consumed_samples"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a whole megablend state: {type(error).__name__} {error}") from None
        if not taken.stages or taken.plan != state.get("plan") or taken.consumed_samples < 0:
            raise StateError(
                "not a whole megablend state: its stages do not end with its plan, or it consumed less than 0"
            )
        return taken

    def check(self, *, split: str, index: str, stages: Sequence[tuple[int, str]]) -> None:
        """Refuse to go on with another index, plan or split than the state's; stages appended since are fine.

        Raises: StateError with both digests and the remedy.
        """
        if self.split != split:
            raise StateError(f"the state is of split {self.split!r}, this dataset is of {split!r}; open that split")
        if self.index != index:
            raise StateError(
                f"the index is another: the state was taken with {self.index}, this dataset reads {index}; "
                "open the state's own with megablend.open(config, state=state)"
            )
        if tuple(stages[: len(self.stages)]) != self.stages:
            raise StateError(
                f"the plan is another: the state was taken with {self.plan}, this dataset has {stages[-1][1]}; open the "
                "state's own with megablend.open(config, state=state) and the config that the run was built with"
            )

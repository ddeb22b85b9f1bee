"""The state stored in a checkpoint: one integer, and the digests of the index and plan that it refers to.

Less than 1 KB of JSON plus about 40 bytes per further stage; independent of world size, workers and micro batch.
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
    """The position of a run."""

    run: str
    split: str
    index: str
    """Digest of the index snapshot."""
    stages: tuple[tuple[int, str], ...]
    """(end of the stage, the plan's digest after it) of each stage."""
    consumed_samples: int

    @property
    def plan(self) -> str:
        """Digest of the plan when the state was saved."""
        return self.stages[-1][1]

    def to_dict(self) -> dict[str, Any]:
        """A plain JSON-serializable dict."""
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
        """Check and convert a dict made by `to_dict`. Raises StateError."""
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
                index=str(state["index"]),
                stages=tuple((operator.index(end), str(digest)) for end, digest in state["stages"]),
                consumed_samples=operator.index(state["consumed_samples"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"incomplete or damaged megablend state: {type(error).__name__} {error}; load another checkpoint"
            ) from None
        if not parsed.stages or parsed.plan != state.get("plan") or parsed.consumed_samples < 0:
            raise StateError(
                "incomplete or damaged megablend state: its last stage is not its plan, or consumed_samples is negative; load "
                "another checkpoint"
            )
        return parsed

    def check(self, *, split: str, index: str, stages: Sequence[tuple[int, str]]) -> None:
        """Refuse to resume with an index, plan or split other than the state's; stages may have been appended since.

        Raises: StateError with both digests and the remedy.
        """
        if self.split != split:
            raise StateError(
                f"the state belongs to split {self.split!r}, this dataset is split {split!r}; open that split"
            )
        if self.index != index:
            raise StateError(
                f"the index differs: the state was saved with {self.index}, this dataset reads {index}; "
                "open the state's index with megablend.open(config, state=state)"
            )
        if tuple(stages[: len(self.stages)]) != self.stages:
            raise StateError(
                f"the plan differs: the state was saved with {self.plan}, this dataset has {stages[-1][1]}; open the "
                "state's plan with megablend.open(config, state=state) and the config that the run was built with"
            )

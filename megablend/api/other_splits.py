"""The splits beside train that have sources, planned as `open` plans them."""

from __future__ import annotations

from collections.abc import Iterator

from megablend.config import SPLITS, Config
from megablend.errors import PlanError
from megablend.plan.run import Run, as_promised, check_run, plan_run


def plan_other_splits(config: Config, run: Run) -> Iterator[tuple[str, Run | PlanError]]:
    """For each other split of a run of train that has sources: its name, and its run, or why `open` refuses it."""
    for number, split in enumerate(SPLITS[1:], 1):
        is_used = split in config.sources if config.listed_by_split else config.shares[number] > 0
        if not is_used:
            continue
        try:
            other = as_promised(plan_run(config, split, run.store), run.ledger)
            check_run(other)
        except PlanError as error:
            yield split, error
        else:
            yield split, other

"""Compute the data that are committed with a run's ledger: what its config requests of valid and
test, and what opening the run would otherwise have to compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megablend.config import SPLITS
from megablend.errors import PlanError
from megablend.index.blocks.growing_splits import find_split_ranges
from megablend.index.blocks.splits import SplitBlocks
from megablend.order.registry import find_order
from megablend.run.check_totals import check_limits
from megablend.run.companion import Companion, save_companion
from megablend.run.compile import Compiled, compile_split
from megablend.run.ledger import Ledger


def compile_others(train: Compiled) -> Iterator[tuple[str, Compiled | PlanError]]:
    """Compile valid and test if they have sources. Yields the name of each split, and either the
    compiled split or the error that prevents opening it."""
    config = train.config
    for split in SPLITS[1:]:
        if not config.has_split(split) and split not in config.sources:
            continue
        try:
            compiled = compile_split(config, split, train.store, committed=train.ledger)
            check_limits(compiled)
        except PlanError as error:
            yield split, error
        else:
            yield split, compiled


def keep_companion(compiled: Compiled, others: Iterable[tuple[str, Compiled | PlanError]]) -> None:
    """Store the companion of a ledger for the config that requests it. The ledger is committed, or
    is about to be.

    Args:
        others: what `compile_others` yields.

    Raises: CacheError if it cannot be written.
    """
    run = compiled.run
    ledgers = dict[str, Ledger]()
    for split, other in others:
        if isinstance(other, Compiled):
            ledgers[split] = other.ledger
    companion = Companion(starts=run.starts, others=ledgers, plan=run.plan)
    save_companion(run.runtime.cache, compiled.ledger, compiled.config.request_digest, companion)


def precompute_orders(compiled: Compiled) -> None:
    """Store in the cache the totals that the orders of blended splits would otherwise compute when
    they are opened. Raises: CacheError if they cannot be written.

    Train may read each snapshot of the index in a different order. Only the orders that a snapshot
    is read in are computed for it, since it may lack the document table that another order needs.
    """
    config = compiled.config
    run = compiled.run
    store = compiled.store
    by_store = find_split_ranges(store.stores, config.shares)
    for number, split in enumerate(SPLITS):
        if not config.is_blended(split):
            continue
        for name, source in config.sources_of(split).items():
            for block_store, ranges in zip(store.stores, by_store, strict=True):
                if name not in ranges.numbers:
                    continue
                part = ranges.ranges(ranges.numbers[name], 0 if config.listed_by_split else number)
                blocks = SplitBlocks(
                    block_store.snapshot, part, has_eod=source.append_eod is not None
                )
                if blocks.num_tokens == 0:
                    continue  # opening the split raises the error
                orders = {config.order}
                if split == compiled.split:
                    segments = run.plan.epochs.segments[run.data.index_names.index(name)]
                    digest = block_store.snapshot.digest
                    orders = {part.order for part in segments if part.snapshot == digest}
                for order in sorted(orders):
                    find_order(order).make(blocks, 0).precompute()

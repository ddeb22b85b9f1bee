"""A run with the stages of its committed ledger; and what is kept beside the ledger, so that this takes little time.

A config is compared with the ledger by computing what it requests: shares, totals and cycles of every source in every stage. A
build stores that the config which it committed requests exactly the ledger; `open_committed` then does not compute it again.
"""

from __future__ import annotations

import dataclasses

from megablend.blocks.block_store import BlockStore
from megablend.config import Config
from megablend.errors import CacheError, MegablendError
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_format import dump_ledger
from megablend.plan.plan_file import is_approved, save_approval, save_plan_file
from megablend.plan.run import Run, as_promised, check_run, make_run
from megablend.plan.specification import prepare


def open_committed(config: Config, ledger: Ledger, store: BlockStore) -> Run:
    """The train split of a committed run. Its limits are checked.

    Raises: PlanError where the config requests another order than the ledger's; CacheError where it requests more samples.
    """
    asked, file = prepare(config, "train", store, links=ledger.links, promised=ledger), ledger.plan_file
    if file is not None and is_approved(file.cache, file.text, asked.data_digest, config.request_digest):
        return Run(asked=asked, store=store, ledger=ledger)
    run = apply_ledger(as_promised(make_run(asked, store), ledger), ledger)
    check_run(run)
    return run


def apply_ledger(run: Run, ledger: Ledger) -> Run:
    """The run with the stages of its ledger; refused where the config asks for another blend or length.

    A job whose config did not change while the run was lengthened keeps the order that it was promised.
    """
    ledger = ledger.until(run.num_samples)
    if ledger.extend(run.ledger) != ledger:
        raise CacheError(
            f"run {ledger.run!r} was built for {ledger.num_samples:,} samples, the config now asks for {run.num_samples:,}; "
            "run `megablend build CONFIG` to lengthen it"
        )
    return dataclasses.replace(run, ledger=ledger)


def keep_plan(run: Run) -> None:
    """Store the plan of a run that is about to be committed, or was, and that its config requests it, where that is so.

    Raises: CacheError where they cannot be written.
    """
    ledger, config, asked = run.ledger, run.asked.config, run.asked
    cache, text = config.cache_store.folder, dump_ledger(ledger.run, ledger.stages)
    save_plan_file(cache, text, ledger.stages, run.plan, asked.data_digest)
    if config.request_digest is not None and _requests(config, ledger, run.store):
        save_approval(cache, text, asked.data_digest, config.request_digest)


def _requests(config: Config, ledger: Ledger, store: BlockStore) -> bool:
    """Whether `open_committed` would accept the config, and read the ledger to its end."""
    try:
        run = make_run(prepare(config, "train", store, links=ledger.links, promised=ledger), store)
        found = apply_ledger(as_promised(run, ledger), ledger)
        check_run(found)
    except MegablendError:
        return False
    return found.ledger == ledger

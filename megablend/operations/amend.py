"""amend: change the blend of a run from a given sample on, without losing or repeating a token, and
describe the changes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megablend.blend.plan import StagesPlan
from megablend.config import Config
from megablend.config.numbers import whole_number
from megablend.errors import CacheError, ConfigError
from megablend.index.read.snapshot import open_snapshot
from megablend.operations.commit_run import publish_splits
from megablend.operations.differences import list_differences
from megablend.operations.drains import Drain, describe_drain
from megablend.operations.results import Record
from megablend.operations.runs import compile_committed
from megablend.operations.session import ConfigLike, Session
from megablend.operations.token_documents import refuse_token_documents
from megablend.operations.unindexed import INDEX_REMEDY, find_unindexed
from megablend.run.amend_ledger import amend_ledger, cut_ledger, list_left_out, rewind_to
from megablend.run.check_totals import check_limits
from megablend.run.commit import compile_others, keep_companion, precompute_orders
from megablend.run.compile import Compiled
from megablend.run.fitting_steps import fitting_unit
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import save_ledger
from megablend.run.plan_stages import plan_stages
from megablend.run.run import Run
from megablend.run.skips import load_skips
from megablend.run.state import State
from megablend.storage.base import Storage
from megablend.system.failures import translating


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outlook(Record):
    """A forecast of how a source is read in the rest of a run, from an amendment on."""

    share: float
    """Fraction of the samples that come from the source."""
    tokens: int
    """Number of tokens of the source that are read."""
    epochs: float
    """Number of epochs of the source that will have been read when the run ends."""
    first_repeat: int | None
    """The sample, at the amendment or later, with which the source begins to have more samples than
    the epochs before have; None if it never does. Samples of two epochs may be mixed about there."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AmendedSource(Record):
    """The forecasts for a source in the rest of a run, before and after an amendment."""

    name: str
    before: Outlook
    after: Outlook


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Amendment(Record):
    """The changes that an amendment makes, or would make."""

    run: str
    committed: bool
    """Whether the amendment was made; False with `dry_run`."""
    requested: int
    """The sample at which the amendment was requested."""
    at: int
    """The first sample that may differ: `requested`, rounded up to the end of a cycle."""
    drain: int
    """Number of samples, starting at `at`, that are still read with the old settings. There are
    such samples if the length of samples changes or files are withdrawn."""
    drained: Drain | None
    """The samples that `drain` counts, by source; None if there are none."""
    drain_settings: tuple[dict[str, int], ...]
    """A dict with `from` and `drain` for each drain (samples that are still read with the old
    settings) that starts at `at` or later. A config whose stages have these settings results in the
    same run without amendments."""
    fitting_unit: int | None
    """The number of samples per step (micro batch x ranks) must be a divisor of this number,
    because the length or the masks of samples can only change between steps. None if they do not
    change."""
    plan_before: str
    """Digest of the plan without the amendment."""
    plan: str
    """Digest of the amended plan."""
    samples_before: int
    """Number of samples of the run without the amendment."""
    samples: int
    changes: tuple[dict[str, Any], ...]
    """The settings that change at `at`, each as a dict with `what`, `before` and `after`."""
    sources: tuple[AmendedSource, ...]
    note: str | None
    """A note about files that match the config's paths but are not in the run's index, and about
    stages and skipped ranges that the amended run no longer has; None if there is nothing to
    note."""


@translating("amend")
def amend(
    config: ConfigLike,
    *,
    at: int | None = None,
    state: Mapping[str, Any] | None = None,
    after: int = 0,
    batch: int | None = None,
    cache: str | None = None,
    dry_run: bool = False,
) -> Amendment:
    """Amend a run, so that it continues at a given sample with the next stage of its edited config.

    States saved before that sample stay valid, and resume on the amended plan. A state that was
    saved later, on the old plan, is refused unless the run is amended again with that `state`.

    Args:
        at: number of the sample. It is rounded up to the end of a cycle (lanes x shuffle_window
            samples).
        state: a state from `state_dict()`, given instead of `at`. The run is amended `after`
            samples after the state's position.
        batch: number of samples that all ranks together read in a step (micro batch x ranks). The
            length of samples then changes only at a sample number that is a multiple of `batch` and
            of the number of lanes before and after. By default, only the lanes matter.
        cache: cache folder, instead of the config's.
        dry_run: only return what would change.

    Raises: ConfigError if the config lists no stage that begins at the sample; PlanError if it
        changes earlier samples, or cannot be planned; StateError if the state is of another run;
        CacheError if the run was not built, if it cannot be written, or if a stage with `new_data`
        would read a newest index that differs from the config in files or options.
    """
    session = Session(config, cache=cache)
    checked_config = session.config
    if (at is None) == (state is None):
        raise ConfigError("give exactly one of `at` (a sample number) and `state` (a saved state)")
    if after and state is None:
        raise ConfigError(
            "`after` is counted from the position of a `state`, but none is given; give a `state`, or `at` alone"
        )
    ledger = session.require_ledger()
    if state is None:
        resumed = ledger
        sample = whole_number("at", at)
    else:
        parsed = State.from_dict(state)
        resumed = rewind_to(ledger, parsed)
        sample = parsed.consumed_samples + whole_number("after", after, least=0)
    before = session.open_by_ledger()
    plan = before.plan
    if resumed != ledger:
        plan = plan_stages(resumed.stages, before.data.tokens_by_index, before.data.blocks)
    cut = cut_ledger(resumed, plan, sample)
    # A gc, a build or a skip in between would change what the amendment is planned on
    with contextlib.nullcontext() if dry_run else session.cache.hold():
        _check_cut(checked_config, resumed, cut)
        step = 1 if batch is None else whole_number("batch", batch)
        compiled, note = _compile_amended(session, cut, step, keep=not dry_run)
        amended = dataclasses.replace(compiled.ledger, request=checked_config.request_digest)
        if not dry_run:
            save_ledger(session.cache, amended, replaces=ledger)
    notes = [] if note is None else [note]
    notes += _describe_left_out(checked_config, cut, amended, ledger)
    return _describe(
        compiled.run,
        before,
        cut.num_samples,
        sample,
        committed=not dry_run,
        note="; ".join(notes) or None,
    )


def _compile_amended(
    session: Session, cut: Ledger, batch: int, *, keep: bool
) -> tuple[Compiled, str | None]:
    """Compile the amended run.

    Args:
        cut: the run's ledger up to the amendment.
        keep: store in the cache what opening the run will need.

    Returns: the compiled run, and a note on files; see `_compare_files`.
    Raises: see `amend`.
    """
    config = session.config
    storage = session.run_storage
    committed = session.require_ledger()
    replaced = committed.indices[len(cut.indices) :]
    if not session.snapshots:
        raise CacheError(
            f"{config.cache}: lists no index, although run {committed.run!r} reads one; try again, or {INDEX_REMEDY}"
        )
    newest = session.snapshots[-1]
    requested = compile_committed(
        config, "train", cut, storage, newest, replaced=replaced, keep=keep, batch=batch
    )
    compiled = dataclasses.replace(requested, ledger=amend_ledger(cut, requested.ledger, committed))
    check_limits(compiled)
    refuse_token_documents(config, compiled.store.snapshot, committed)
    note = _compare_files(compiled, cut, storage)
    precompute_orders(compiled)
    if keep:
        keep_companion(compiled, compile_others(compiled))
        publish_splits(config, compiled.store)
    return compiled, note


def _compare_files(compiled: Compiled, cut: Ledger, storage: Storage) -> str | None:
    """Compare the index that a new stage reads with the files that the config's paths match now.

    Returns: a note on files that the index lacks; None if it lacks no files, or if no new stage
        reads another index.
    Raises: CacheError if the index was made for another config.
    """
    if not compiled.ledger.indices[len(cut.indices) :]:
        return None
    newest = open_snapshot(compiled.config.cache_store, compiled.ledger.indices[-1])
    unindexed = find_unindexed(compiled.config, newest, storage)
    if unindexed is None:
        return None
    if not unindexed.only_lacks_files:
        raise CacheError(f"{unindexed.text}; {INDEX_REMEDY}")
    return f"{unindexed.text}; to read them, index again (`megablend index CONFIG`) and amend the run again"


def _describe_left_out(
    config: Config, cut: Ledger, amended: Ledger, committed: Ledger
) -> list[str]:
    """Return notes about stages and skipped samples that the run no longer has after its
    amendment."""
    notes = []
    starts = list_left_out(cut, amended, committed)
    if starts:
        are = "stages that began at samples" if len(starts) > 1 else "stage that began at sample"
        listed = ", ".join(f"{start:,}" for start in starts)
        notes.append(
            f"the run no longer has the {are} {listed}, whose settings the config does not list"
        )
    kept = load_skips(config.cache_store, amended).ranges
    gone = sorted(set(load_skips(config.cache_store, committed).ranges).difference(kept))
    if gone:
        listed = ", ".join(f"{start:,} to {stop:,}" for start, stop in gone)
        notes.append(f"samples {listed} of the previous plan are no longer skipped")
    return notes


def _check_cut(config: Config, ledger: Ledger, cut: Ledger) -> None:
    """Check that a ledger is not cut within a skipped range, and that the config has stages.
    Raises: ConfigError, which lists the run's stages as they would be written in a config."""
    stop = cut.num_samples
    skipped = load_skips(config.cache_store, ledger).containing(stop)
    if skipped is not None:
        raise ConfigError(
            f"sample {stop:,} is within samples {skipped[0]:,} to {skipped[1]:,}, which run {ledger.run!r} skips; amend "
            f"the run at sample {skipped[1]:,} or later"
        )
    if not config.stages and stop < cut.stages[-1].end:
        if any(stage.blend != cut.blend or stage.cut is not None for stage in cut.stages[:-1]):
            # A ledger does not record how the config described such stages
            raise ConfigError(
                f"the config has no `stages`, but run {cut.run!r} has {len(cut.stages)} before sample {stop:,}: list these "
                f"stages (`megablend runs show` prints them), then add one with `from: {stop}` and the settings to change"
            )
        listed = ", ".join(f"{{samples: {stage.end}}}" for stage in cut.stages)
        raise ConfigError(
            f"the config has no `stages`: add `stages: [{listed}, {{from: {stop}, ...}}]`, replacing `...` with the "
            f"settings that change from sample {stop:,} on"
        )


def _describe(
    run: Run, before: Run, at: int, requested: int, *, committed: bool, note: str | None
) -> Amendment:
    """Describe what an amendment changes.

    Args:
        run: the amended run.
        before: the run before the amendment.
    """
    ledger = before.ledger
    number = run.ledger.starts.index(at)
    drain = describe_drain(run, number)
    outlooks_before = _look_ahead(before.plan, at, run)
    outlooks_now = _look_ahead(run.plan, at, run)
    # Ledgers of one stage each, which differ in the settings that apply from the sample on
    stage_before = dataclasses.replace(ledger.stage_at(at), cut=None)
    stage_now = dataclasses.replace(run.ledger.stage_at(at), cut=None)
    differences = list_differences(
        dataclasses.replace(ledger, stages=(stage_before,)),
        dataclasses.replace(ledger, stages=(stage_now,)),
    )
    return Amendment(
        run=run.ledger.run,
        committed=committed,
        requested=requested,
        at=at,
        drain=0 if drain is None else drain.stop - at,
        drained=drain,
        drain_settings=tuple(
            {"from": start, "drain": stage.drain}
            for stage, start in zip(run.ledger.stages, run.ledger.starts, strict=True)
            if start >= at and stage.drain is not None
        ),
        fitting_unit=fitting_unit(run),
        plan_before=ledger.digest,
        plan=run.ledger.digest,
        samples_before=ledger.num_samples,
        samples=run.num_samples,
        changes=tuple(
            {"what": difference.what, "before": difference.a, "after": difference.b}
            for difference in differences
            if difference.what != "stage ends"
        ),
        sources=tuple(
            AmendedSource(name=source.name, before=old, after=now)
            for source, old, now in zip(run.sources, outlooks_before, outlooks_now, strict=True)
        ),
        note=note,
    )


def _look_ahead(plan: StagesPlan, at: int, run: Run) -> list[Outlook]:
    """Return the forecast of each source of the amended run, from sample `at` on.

    Args:
        plan: the plan before or after the amendment.
    """
    start = min(at, plan.num_samples)
    end = plan.num_samples
    counts_before = plan.counts(start)
    samples = (plan.counts(end) - counts_before).tolist()
    read = plan.count_tokens(start).tolist()
    total = plan.count_tokens(end).tolist()
    extra = run.extra_token
    outlooks = []
    for source in range(plan.num_sources):
        epoch_tokens = plan.epochs.start(source, 1)
        repeat = None
        if epoch_tokens:
            ordinal = plan.count_within(source, epoch_tokens, extra)
            repeat = plan.sample_of_count(source, ordinal)
        if repeat is not None and repeat < start:  # then its next sample, if there is one
            repeat = (
                plan.sample_of_count(source, int(counts_before[source]))
                if samples[source]
                else None
            )
        outlooks.append(
            Outlook(
                share=samples[source] / max(1, end - start),
                tokens=total[source] - read[source],
                epochs=float(plan.epochs.count(source, total[source])),
                first_repeat=repeat,
            )
        )
    # The plan before the amendment may lack the last sources
    unread = Outlook(share=0.0, tokens=0, epochs=0.0, first_repeat=None)
    return outlooks + [unread] * (len(run.sources) - len(outlooks))

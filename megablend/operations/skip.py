"""skip: leave out a range of a run's samples, for instance after a loss spike. The order of the
other samples does not change."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.run.run import Run
from megablend.run.skips import Skips, remove_skips, save_skip, skips_of
from megablend.system.failures import translating


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SkippedSamples(Record):
    """A range of samples that a run skips: [start, stop)."""

    start: int
    stop: int
    samples: int
    """Number of samples."""
    tokens: int
    """Number of skipped tokens."""
    by_source: dict[str, int]
    """Number of skipped tokens of each source, by name. Sources without skipped tokens are left
    out."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SkipsResult(Record):
    """The ranges that a run skips, in ascending order."""

    run: str
    skips: tuple[SkippedSamples, ...]


@translating("skip")
def skip(
    what: ConfigLike,
    start: int,
    stop: int,
    *,
    batch_size: int,
    run: str | None = None,
    cache: str | None = None,
    dry_run: bool = False,
) -> SkipsResult:
    """Skip samples `start` to `stop` of train in all Loaders and PretrainingSamplers that are
    created from now on.

    The range is extended to multiples of the lanes and of the step, so that lanes and batches stay
    as they are. Sample numbers, digests and states stay valid, except for states within the range,
    which are refused.

    Args:
        what: a config, or the folder of a cache; with a cache, `run` is required.
        batch_size: samples per step, over all ranks.
        dry_run: store nothing, only return what would be skipped.

    Returns: the ranges that the run skips, including this one.
    Raises: ConfigError if the range is not within the run, or if no sample of the run would be
        left; CacheError if the range cannot be stored.
    """
    opened = Session(what, cache=cache, run=run).open()
    unit = math.lcm(
        *(blend.lanes for blend in opened.blends), whole_number("batch_size", batch_size, least=1)
    )
    start = whole_number("start", start, least=0)
    stop = whole_number("stop", stop)
    if not start < stop <= opened.num_samples:
        raise ConfigError(
            f"found samples {start:,} to {stop:,}, expected a range within the {opened.num_samples:,} samples of the run"
        )
    first = start // unit * unit
    last = min(-(-stop // unit) * unit, opened.num_samples)
    planned = skips_of(opened).add(first, last)
    if planned.ranges == ((0, opened.num_samples),):
        is_whole_run = (first, last) == planned.ranges[0]
        with_others = "" if is_whole_run else ", with the ranges that are skipped already,"
        raise ConfigError(
            f"samples {start:,} to {stop:,}, rounded outwards to multiples of {unit:,} (lanes and samples per step), "
            f"cover{with_others} the whole run of {opened.num_samples:,} samples; choose a smaller range, or a smaller batch"
        )
    if dry_run:
        return SkipsResult(run=opened.ledger.run, skips=describe_skips(opened, planned))
    with opened.runtime.cache.hold():
        save_skip(opened.runtime.cache, opened.ledger, first, last)
    return SkipsResult(run=opened.ledger.run, skips=describe_skips(opened))


@translating("list_skips")
def list_skips(
    what: ConfigLike, *, run: str | None = None, cache: str | None = None
) -> SkipsResult:
    """List the ranges that a run skips. Arguments and errors are as for `skip`."""
    opened = Session(what, cache=cache, run=run).open()
    return SkipsResult(run=opened.ledger.run, skips=describe_skips(opened))


@translating("unskip")
def unskip(what: ConfigLike, *, run: str | None = None, cache: str | None = None) -> None:
    """Remove all skipped ranges of a run. This applies to loaders that are created from now on.
    Arguments and errors are as for `skip`."""
    opened = Session(what, cache=cache, run=run).open()
    with opened.runtime.cache.hold():
        remove_skips(opened.runtime.cache, opened.ledger)


def describe_skips(run: Run, skips: Skips | None = None) -> tuple[SkippedSamples, ...]:
    """Describe each range in `skips`; by default, each range that the run skips."""
    skips = skips_of(run) if skips is None else skips
    listed = []
    for start, stop in skips.ranges:
        tokens = (run.plan.count_tokens(stop) - run.plan.count_tokens(start)).tolist()
        by_source = {source.name: n for source, n in zip(run.sources, tokens, strict=True) if n}
        listed.append(
            SkippedSamples(
                start=start,
                stop=stop,
                samples=stop - start,
                tokens=sum(tokens),
                by_source=by_source,
            )
        )
    return tuple(listed)

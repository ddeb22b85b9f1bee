"""Warnings about properties of a plan that are valid, but probably not intended. The thresholds are
set by the config's `warnings`."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from megablend.arrays import Int64s
from megablend.blend.epochs import Segment
from megablend.blend.shares import samples_in
from megablend.config import Config
from megablend.config.settings import EOD_MASKS
from megablend.run.compile import Compiled
from megablend.run.run import Run
from megablend.run.run_files import list_late

_MAX_FILES = 200_000
"""Maximum number of files for which the warning about shared files is computed. More files would
take longer than a few tenths of a second."""


def find_warnings(compiled: Compiled) -> list[str]:
    """Return warnings about the sources of a blended split: one line for each kind of problem,
    which names the worst source. There are no warnings for an unblended split."""
    run = compiled.run
    if not run.is_blended:
        return []
    samples = run.plan.counts(run.num_samples)
    tokens = np.array(run.data.tokens, dtype=np.int64)
    return [
        *_warn_of_unread(compiled, samples),
        *_warn_of_small(compiled, samples, tokens),
        *_warn_of_repeated(compiled, samples, tokens),
    ]


def warn_of_run(compiled: Compiled) -> list[str]:
    """Return warnings about the train split as a whole, rather than about single sources."""
    return [
        *_warn_of_masks(compiled.config),
        *_warn_of_last_share(compiled),
        *_warn_of_ends(compiled),
        *warn_of_epochs(compiled.run),
        *_warn_of_shared_files(compiled),
    ]


def _warn_of_unread(compiled: Compiled, samples: Int64s) -> list[str]:
    """Return a warning if sources have a share, but give no sample, since their caps are smaller
    than one. For the arguments, see `_warn_of_small`."""
    shared = np.array([share > 0 for share in compiled.requested])
    unread = np.flatnonzero(shared & (samples == 0))
    if not len(unread):
        return []
    return [
        f"{compiled.split}: {_count(len(unread), 'has', 'have')} a share, but caps that allow no sample of it: "
        f"{compiled.sources[unread[0]].name!r}; raise the caps, or give a share of 0"
    ]


def _warn_of_small(compiled: Compiled, samples: Int64s, tokens: Int64s) -> list[str]:
    """Return a warning if sources in use contain too few samples; an empty list if there is none.

    Args:
        samples: int64 [num_sources], number of samples that the run reads of each source.
        tokens: int64 [num_sources], number of tokens in an epoch of each source.
    """
    run = compiled.run
    limit = compiled.config.warnings.min_source_samples
    if limit is None:
        return []
    length = max(section.sequence_length for section in run.sections)
    contained = [samples_in(n, length, run.extra_token) for n in run.data.tokens]
    small = np.flatnonzero((np.array(contained, dtype=np.int64) < limit) & (samples > 0))
    if not len(small):
        return []
    worst = small[tokens[small].argmin()]
    return [
        f"{run.split}: {_count(len(small))} fewer than {_samples(limit)} of {length:,} tokens; the "
        f"smallest is {run.sources[worst].name!r} with {tokens[worst]:,} tokens (warnings.min_source_samples)"
    ]


def _warn_of_repeated(compiled: Compiled, samples: Int64s, tokens: Int64s) -> list[str]:
    """Return a warning if sources are read too often. For the arguments, see `_warn_of_small`."""
    run = compiled.run
    limit = compiled.config.warnings.max_epochs
    if limit is None:
        return []
    read = run.plan.count_tokens(run.num_samples)
    epochs = np.array(
        [
            float(run.plan.epochs.count(source, n + run.extra_token))
            for source, n in enumerate(read.tolist())
        ]
    )
    # Sources with a cap repeat as often as their config requests
    capped = np.array([source.is_capped for source in compiled.sources])
    epochs[capped | (samples == 0)] = 0
    often = np.flatnonzero(epochs > float(limit))
    if not len(often):
        return []
    worst = often[epochs[often].argmax()]
    return [
        f"{run.split}: {_count(len(often), 'is', 'are')} read more than {float(limit):g} times; most often "
        f"{run.sources[worst].name!r}, {epochs[worst]:,.1f} times ({tokens[worst]:,} tokens, {samples[worst]:,} samples) "
        "(warnings.max_epochs; a source's own max_epochs overrides it)"
    ]


def _warn_of_shared_files(compiled: Compiled) -> list[str]:
    """Return a warning if several sources of the config, in any splits, read the same file. This is
    not checked if there are more than _MAX_FILES files."""
    snapshot = compiled.store.snapshot
    configured = compiled.config.all_sources
    numbers = snapshot.sources.numbers
    requested = {number for name, number in numbers.items() if name in configured}
    columns = snapshot.files.columns
    if len(columns) > _MAX_FILES or len(requested) < 2:
        return []
    owners: dict[str, int] = {}
    shared: dict[tuple[int, int], list[str]] = {}
    for file, column in enumerate(columns.tolist()):
        if column not in requested:
            continue
        path = snapshot.path(file, compiled.store.roots)
        first = owners.setdefault(path, column)
        if first != column:
            shared.setdefault((first, column), []).append(path)
    if not shared:
        return []
    (first, second), paths = max(shared.items(), key=lambda pair: len(pair[1]))
    others = len(shared) - 1
    more = f"; and {others:,} more pair{'s' * (others > 1)} of sources" if others else ""
    files = f"{paths[0]}" if len(paths) == 1 else f"{len(paths):,} files, such as {paths[0]}"
    return [
        f"sources {snapshot.sources[first].name!r} and {snapshot.sources[second].name!r} both read "
        f"{files}: the documents are read for both sources, and count towards the epochs of both{more}"
    ]


def _warn_of_masks(config: Config) -> list[str]:
    """Return a warning for each mask setting that has no effect. It names the first stage with this
    setting."""
    appended = config.appended_eods
    prefixes = dict[str, str]()
    stages = config.stage_configs_ignoring_sources
    if config.eod_token is not None and not any(stage.masks.needs_eod for stage in stages):
        prefixes[
            f"eod_token: has no effect without one of {', '.join(EOD_MASKS)}; to put a token after each document, set "
            "`append_eod` for the sources"
        ] = ""
    for number, settings in enumerate(stages):
        masks = settings.masks
        warnings = []
        if masks.reset_attention_mask and not masks.create_attention_mask:
            warnings.append(
                "reset_attention_mask: has no effect without `create_attention_mask: true`"
            )
        if masks.reset_position_ids and masks.inter_document_masking:
            warnings.append(
                "reset_position_ids: has no effect with inter_document_masking, where they restart at each document; leave it out"
            )
        acting = [name for name in EOD_MASKS if getattr(masks, name)]
        if acting and None not in appended and masks.eod not in appended:
            tokens = ", ".join(sorted(map(str, appended)))
            warnings.append(
                f"eod_token: {', '.join(acting)} act on token {masks.eod}, but the sources append another one to documents "
                f"(append_eod {tokens}); leave out eod_token, or set it to the same"
            )
        for text in warnings:
            prefixes.setdefault(text, f"stages[{number}]: " if config.stages else "")
    return [prefix + text for text, prefix in prefixes.items()]


def _warn_of_last_share(compiled: Compiled) -> list[str]:
    """Return a warning if the last stage ends before the length that the config gives. This happens
    if a user mistakes the `share` of a stage, which is its end, for its length."""
    stages = compiled.config.stages
    share = stages[-1].share if stages else None
    if share is None or share == 1:
        return []
    return [
        f"stages[{len(stages) - 1}]: `share: {float(share):g}` ends the last stage before the end of the run (shares are "
        f"counted from the run's start), so train has only {_samples(compiled.run.num_samples)}; leave out `share` in the last "
        "stage to read all"
    ]


def _warn_of_ends(compiled: Compiled) -> list[str]:
    """Return a warning for each stage but the last one, and for each drain, whose lanes do not all
    end at the same sample."""
    lines = []
    for number, (stage, after) in enumerate(pairwise(compiled.stages)):
        lanes = stage.config.lanes
        unit = math.lcm(lanes, after.config.lanes)
        beyond = after.first % unit
        if after.drain is not None and beyond:
            lines.append(
                f"stages[{number + 1}]: drain: found {after.drain:,}, expected {after.drain - beyond:,} or "
                f"{after.drain - beyond + unit:,}, so that the new length of samples begins at a multiple of {unit} (all lanes); "
                "`megablend amend --dry-run` prints the number to write"
            )
        rest = (stage.end - stage.first) % lanes
        if stage.cut is not None or not compiled.run.has_lanes or rest == 0:
            continue
        remedy = f"end the stage at sample {stage.end - rest:,} or {stage.end - rest + lanes:,}"
        if compiled.config.stages[number].samples is None:
            remedy = f"write the stage's end as `samples: {stage.end}`, so that the config alone reproduces this run"
        lines.append(
            f"stages[{number}]: ends at sample {stage.end:,}, with {stage.end - stage.first:,} samples, which is not a multiple "
            f"of its {lanes} lanes, so loaders read more data than they need; {remedy}"
        )
    return lines


def warn_of_epochs(run: Run) -> list[str]:
    """Return a warning for each epoch that is not read to its end, and for each epoch that is read
    from files that no longer exist. Only runs that were planned before `Stage.whole_epochs` existed
    have such epochs."""
    lines = [
        f"source {run.sources[source].name!r}: files that stage {stage} no longer has are still read after sample "
        f"{run.ledger.starts[stage]:,}, as an earlier release planned; keep the files, or run "
        f"`megablend amend CONFIG --at {run.ledger.starts[stage]}` before training reaches that sample"
        for source, stage in list_late(run)
    ]
    for number, source in enumerate(run.sources):
        for segment, tokens in run.plan.epochs.list_unread(number):
            stage = _find_first_stage(run, number, segment)
            start = run.ledger.starts[stage]
            lines.append(
                f"source {source.name!r}: the last {tokens:,} tokens of an epoch are not read, since stage {stage} begins within "
                f"it, as an earlier release planned; to read them, run `megablend amend CONFIG --at {start}` before training "
                "reaches that sample"
            )
    return lines


def _find_first_stage(run: Run, source: int, segment: Segment) -> int:
    """Return the number of the stage of the ledger at which a segment of a source begins."""
    settings = [(stage.index, stage.blend.order) for stage in run.ledger.stages]
    return max(
        number
        for number, start in enumerate(run.ledger.starts)
        if number
        and settings[number] == (segment.snapshot, segment.order) != settings[number - 1]
        and run.plan.count_tokens(start)[source] < segment.position
    )


def warn_of_steps(run: Run, step_samples: int) -> list[str]:
    """Return a warning if a split has fewer samples than a step."""
    if run.num_samples >= step_samples:
        return []
    return [
        f"{run.split}: {run.num_samples:,} samples are fewer than a step needs ({step_samples:,}): a loader yields no batch, "
        "except with drop_last=False"
    ]


def warn_of_amplification(config: Config, amplification: float) -> list[str]:
    """Return a warning if read amplification is above its threshold."""
    limit = config.warnings.max_read_amplification
    if limit is None or amplification <= limit:
        return []
    return [
        f"loaders read {amplification:.1f} times the bytes that they use, more than {float(limit):g} times "
        "(warnings.max_read_amplification)"
    ]


def _samples(n: int) -> str:
    """Return a number of samples as text."""
    return f"{n:,} sample{'s' if n != 1 else ''}"


def _count(n: int, one: str = "holds", several: str = "hold") -> str:
    """Return a number of sources as text, with the verb for one or several."""
    return f"1 source {one}" if n == 1 else f"{n:,} sources {several}"

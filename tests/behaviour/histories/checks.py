"""Whether a run followed its config: tokens, shares, caps, validation, and what the commands say of it."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import megablend
from megablend.blend.plan import PlannedStage
from megablend.config.stages import MASKS
from megablend.run.stage import Stage
from tests.behaviour.histories import twin
from tests.behaviour.histories.job import Job
from tests.behaviour.histories.twin import EOD, Change, SourceSample
from tests.runs import read_fields, read_samples


def check_job(job: Job) -> None:
    """All checks of a job that has trained to the end of its run."""
    dataset = megablend.open(job.config)
    settings = list_settings(dataset, job)
    lengths = [each["sequence_length"] for each in settings]
    samples = [
        twin.list_samples(dataset, source, lengths) for source in range(job.files.num_sources)
    ]
    assert sum(map(len, samples)) == len(dataset)
    known = job.files.list_tokens()
    read = read_fields(dataset)
    for source, listed in enumerate(samples):
        for sample in listed:
            is_skipped = any(start <= sample.k < stop for start, stop in job.skips)
            tokens = [*sample.tokens, *([] if sample.extra is None else [sample.extra])]
            expected = twin.make_fields(
                settings[sample.k], tokens, mark_documents(tokens, known, source), source
            )
            assert read[sample.k] == expected
            trained = job.trained.get(sample.k)
            # What was skipped when training came by may be skipped no more
            was_skipped = trained is None and sample.k in job.skipped
            assert is_skipped or was_skipped or trained == expected
    for k in job.rng.sample(range(len(dataset)), 20):
        assert {
            name: field.tolist() if hasattr(field, "tolist") else field
            for name, field in dataset[k].items()
        } == read[k]
    epochs = [check_tokens(job, source, samples[source]) for source in range(job.files.num_sources)]
    check_stages(job, samples)
    check_other_splits(job)
    check_commands(job, dataset, samples, epochs)


def list_settings(dataset: megablend.Dataset, job: Job) -> list[dict[str, Any]]:
    """The settings of each sample, as the config says; of a drain, those of the stage before, but masks of the stage after."""
    found = list[dict[str, Any]]()
    starts = dataset.run.ledger.starts
    for stretch in dataset.run.plan.stages:
        masks = job.settings_of(bisect.bisect(starts, stretch.start) - 1)
        settings = job.settings_of(stretch.number) | {key: masks[key] for key in MASKS}
        found += [settings] * (stretch.stop - stretch.start)
    return found


def mark_documents(
    tokens: Sequence[int], known: dict[int, tuple[int, int, int]], source: int
) -> list[bool]:
    """Whether each token is not the next one of the document of the token before. Checks that all are of the source."""
    places = [(source, -1, -1) if token == EOD else known[token] for token in tokens]
    assert {place[0] for place in places} <= {source}
    begins = [True]
    for (_, document, left), (_, other, others_left) in pairwise(places):
        begins.append(left != 0 if other == -1 else (other, others_left) != (document, left - 1))
    return begins


def find_first(stretches: Sequence[PlannedStage], stage: int) -> int:
    """The first sample of a stage in its own settings."""
    return next(each.start for each in stretches if each.number == stage)


def check_files(job: Job, source: int, samples: list[SourceSample]) -> None:
    """From a stage's first sample in its own settings on, only files that its snapshot has are read."""
    stretches = job.dataset.run.plan.stages
    firsts = [find_first(stretches, number) for number in range(len(job.requested))]
    tokens_of = twin.tokens_of_source(job.files, source)
    for sample in samples:
        number = max(i for i, first in enumerate(firsts) if first <= sample.k)
        gone = set(sample.tokens) - {twin.EOD} - tokens_of(job.requested[number].snapshot)
        assert not gone, f"sample {sample.k} of source {source}: reads files that are gone"


def check_tokens(job: Job, source: int, samples: list[SourceSample]) -> list[int]:
    """No token of a source is lost, and each is read once an epoch. Returns: where its epochs begin."""
    run = job.dataset.run
    changes = list[Change]()
    stretches = run.plan.stages
    longest = max(
        (stage.blend.sources[source].cycles or 1)
        * stage.blend.lanes
        * stage.blend.shuffle_window
        * stage.blend.sequence_length
        for stage in run.ledger.stages
        if source < len(stage.blend.sources)
    )
    for number, requested in enumerate(job.requested):
        if number and requested.snapshot != job.requested[number - 1].snapshot:
            first = find_first(stretches, number)
            begun = max(
                (each.position + len(each.tokens) for each in samples if each.k < first), default=0
            )
            changes.append(Change(requested.snapshot, begun, longest))
    check_files(job, source, samples)
    tokens = twin.join_tokens(samples, changes=len(changes))
    epochs = twin.divide_epochs(tokens, changes, twin.tokens_of_source(job.files, source))
    assert epochs is not None, f"source {source}: its tokens are not epochs of its snapshots"
    return epochs


def group_stages(stages: Sequence[Stage]) -> list[list[int]]:
    """The numbers of neighbouring stages whose settings and data are equal, which are divided as one stage, up to where they
    are cut."""
    groups = list[list[int]]()
    for number, stage in enumerate(stages):
        before = stages[number - 1] if number else None
        if (
            before is None
            or before.cut is not None
            or stage.blend.schedule is not None
            or (stage.index, stage.blend) != (before.index, before.blend)
        ):
            groups.append([])
        groups[-1].append(number)
    return groups


def check_stages(job: Job, samples: list[list[SourceSample]]) -> None:
    """Shares and schedules of stages, those of equal ones together; and caps of each."""
    ledger = job.dataset.run.ledger
    stretches = job.dataset.run.plan.stages
    owners = {sample.k: source for source, listed in enumerate(samples) for sample in listed}
    for number, stage in enumerate(ledger.stages):
        for source, limit in _limits_of(job, number).items():
            _check_limit(limit, samples[source], find_first(stretches, number), stage.stop)
    for group in group_stages(ledger.stages):
        number = group[-1]
        requested = job.requested[number]
        settings = job.settings_of(number) | {"schedule": job.stages[number].get("schedule")}
        stage = ledger.stages[number]
        first = find_first(stretches, group[0])
        ranges = [
            range(each.start, each.stop)
            for each in stretches
            if each.number in group and each.start < stage.stop
        ]
        weights = requested.weights
        steps = [
            [sum(owners[k] == source for k in each) for source in range(len(weights))]
            for each in ranges
        ]
        counts = np.sum(steps, axis=0).tolist()
        is_cut = stage.cut is not None
        limits = _limits_of(job, number)
        if settings.get("schedule"):
            before = (*job.requested[number - 1].weights, *[type(weights[0])(0)] * len(weights))[
                : len(weights)
            ]
            assert stage.blend.schedule is not None
            # It begins at the shares that this gave
            if job.settings_of(number - 1).get("on_exhausted") == "redistribute":
                before = (*stage.blend.schedule.start, *[Fraction(0)] * len(weights))[
                    : len(weights)
                ]
            twin.check_steps(
                steps if not is_cut else steps[:-1],
                len(stage.blend.schedule.done),
                before,
                weights,
                is_cosine=settings["schedule"] == "cosine",
            )
        else:
            is_redistributed = settings.get("on_exhausted") == "redistribute"
            twin.check_shares(
                counts,
                weights,
                is_cut=is_cut,
                caps=[
                    _cap_of(limits.get(s, {}), samples[s], first, stage)
                    for s in range(len(weights))
                ]
                if is_redistributed
                else None,
            )


def _limits_of(job: Job, number: int) -> dict[int, dict[str, Any]]:
    """What a stage says of the sources, by their numbers."""
    sources = job.settings_of(number).get("sources", {})
    return {int(name[1:]): limit for name, limit in sources.items()}


def _cap_of(
    limit: dict[str, Any], samples: list[SourceSample], first: int, stage: Stage
) -> int | None:
    """How many samples a source may give in a stage, if it has a cap that is a number of tokens."""
    if limit.get("max_epochs") is not None:  # as it turned out: checked by itself
        return sum(first <= each.k < stage.stop for each in samples)
    if limit.get("max_tokens") is None:
        return None
    read = sum(len(each.tokens) for each in samples if each.k < first)
    return max(0, (int(limit["max_tokens"]) - read) // stage.blend.sequence_length)


def _check_limit(limit: dict[str, Any], samples: list[SourceSample], first: int, stop: int) -> None:
    if not any(first <= each.k < stop for each in samples):
        return
    if limit.get("max_epochs") is not None:
        # Tokens count: where stages without the cap were cut, lanes had read parts of later epochs before the rest of this one.
        before = twin.count_reads(samples, first)
        assert twin.count_reads(samples, stop) <= max(1, math.ceil(limit["max_epochs"]), before)
    if limit.get("max_tokens") is not None:
        assert sum(len(each.tokens) for each in samples if each.k < stop) <= limit["max_tokens"]


def check_other_splits(job: Job) -> None:
    """Validation does not change, and each document stays in its split."""
    if job.valid is None:
        return
    assert job.read_valid() == job.valid
    for number, requested in enumerate(job.requested):
        valid = megablend.open(job.config, "valid", stage=number)
        seen = defaultdict[str, set[int]](set)
        for sample in read_samples(valid):
            seen[valid.sources[sample.source]] |= set(sample.tokens.tolist()) - {EOD}
        for name, tokens in seen.items():
            assert tokens <= job.files.tokens(requested.snapshot, int(name[1:]), "valid")


def check_commands(
    job: Job, dataset: megablend.Dataset, samples: list[list[SourceSample]], epochs: list[list[int]]
) -> None:
    """What `describe`, `export`, `find`, `show`, `verify` and `check` say of the run is what its samples have."""
    described = megablend.describe(job.config).to_dict()["splits"]["train"]
    for source, each in enumerate(described["sources"]):
        assert each["samples"] == len(samples[source])
        assert each["tokens_read"] == sum(len(sample.tokens) for sample in samples[source])
        assert each["first_sample"] == min((sample.k for sample in samples[source]), default=None)
        assert each["last_sample"] == max((sample.k for sample in samples[source]), default=None)
        versions = {job.files.tokens(i, source) for i in range(len(job.files.snapshots))}
        if len(versions) == 1:  # tokens of others can be divided into epochs in several ways
            assert abs(math.ceil(each["epochs"]) - len(epochs[source])) <= 1
    stages = described["stages"] or [described]
    for source, each in enumerate(described["sources"]):
        assert sum(stage["sources"][source]["samples"] for stage in stages) == each["samples"]
        if described["stages"]:
            assert (
                sum(stage["sources"][source]["tokens"] for stage in stages) == each["tokens_read"]
            )
    assert not megablend.verify(job.config["cache"], data=True).problems
    checked = megablend.check(job.config)
    assert checked.problems == checked.older_problems == ()
    assert job.with_files(lambda: megablend.check(job.config, state=job.state)).problems == ()
    check_export(job, dataset)
    check_find(job, dataset)
    check_rebuilt(job, dataset)
    ledger = megablend.open(job.config).run.ledger
    megablend.gc(job.config["cache"], older_than_days=0)
    for k in (0, len(dataset) // 2, len(dataset) - 1):
        assert (
            list(megablend.show(job.config["cache"], k, run=job.settings["run"]).tokens)
            == dataset.sample(k).tokens.tolist()
        )
    assert megablend.open(job.config).run.ledger == ledger


def check_rebuilt(job: Job, dataset: megablend.Dataset) -> None:
    """With what the commands print of cuts and drains, the config alone makes a run of one snapshot again."""
    ledger = dataset.run.ledger
    stages = list[dict[str, Any]]()
    if len(ledger.indices) > 1:
        return
    for before, stage, listed in zip(
        [None, *ledger.stages], ledger.stages, job.stages, strict=False
    ):
        cut = {} if before is None or before.cut is None else {"from": before.cut}
        stages.append({**listed, **cut, **({} if stage.drain is None else {"drain": stage.drain})})
    again = job.config | {"cache": str(job.folder / "again"), "stages": stages}
    assert megablend.build(again).ledger.stages == ledger.stages


def check_export(job: Job, dataset: megablend.Dataset) -> None:
    """The pieces of `export` are those of the samples, in files that are there."""
    target = job.folder / "order.parquet"
    megablend.export(job.config, target)
    rows = pq.read_table(target).to_pylist()
    known = {
        str(file.path.with_suffix(".bin") if file.path.suffix == ".idx" else file.path): file
        for file in job.files.files
    }
    for row, sample in zip(
        rows, read_samples(dataset, [row["sample"] for row in rows]), strict=True
    ):
        tokens = sample.tokens.tolist()
        at = 0
        for piece in row["pieces"]:
            part = tokens[at : at + piece["stop"] - piece["start"]]
            at += len(part)
            listed = {
                token for document in known[piece["file"]].documents for token in document or ()
            }
            assert set(part) - {EOD} <= listed
            if piece["row"] is not None and part[0] != EOD:
                assert part[0] in (known[piece["file"]].documents[piece["row"]] or ())
        assert at == len(tokens)


def check_find(job: Job, dataset: megablend.Dataset) -> None:
    """`find` of a file that was indexed gives the samples that have one of its tokens."""
    file = job.rng.choice(job.files.snapshots[job.rng.choice(job.requested).snapshot])
    listed = {token for document in file.documents for token in document or ()}
    read = [set(sample.tokens.tolist()) for sample in read_samples(dataset)]
    holding = {k for k, tokens in enumerate(read) if listed & tokens}
    hits = megablend.find(job.config, str(file.path)).to_dict()["found"]
    found = {each["sample"] for each in hits[0]["samples"]}
    assert holding <= found
    assert all(EOD in read[k] for k in found - holding)

"""Stages that read other data than those before: sources that grow, come, and go. Expected tokens are listed by hand."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from fractions import Fraction
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import megablend
from megablend.errors import (
    CacheError,
    ConfigError,
    DataError,
    MegablendError,
    PlanError,
    StateError,
)
from megablend.inspect.description import CacheDescription, IndexDescription, RunDescription
from megablend.run.ledger_file import load_ledger
from tests.cases import each_pair
from tests.cli.commands import run
from tests.formats.writers import KINDS
from tests.runs import STEP, ReadSample, documents, make_config, read_samples

pytestmark = pytest.mark.long
PARQUET = KINDS["parquet"]
Listed = list[list[int] | None]


def write_file(folder: Path, source: int, name: str, listed: Listed) -> None:
    here = folder / "data" / f"source{source}"
    here.mkdir(parents=True, exist_ok=True)
    PARQUET.write(here / f"{name}.parquet", listed)


def entry(folder: Path, source: int, **settings: Any) -> dict[str, Any]:
    path = f"{folder}/data/source{source}/*.parquet"
    return {"name": f"s{source}", "path": path, "column": PARQUET.column} | settings


def later(source: int, count: int = 70) -> Listed:
    """Documents of a file that comes later."""
    return [
        each and [token + STEP // 2 for token in each] for each in documents(source, count, 50, 9)
    ]


def tokens_of(*listed: Listed) -> list[int]:
    return [token for document in chain(*listed) for token in document or []]


OLD = [documents(d, 90, 60, 5) for d in range(2)]
STAGES: list[dict[str, Any]] = [{"samples": 320}, {"samples": 1600, "new_data": True}]


def make_run(folder: Path, **settings: Any) -> dict[str, Any]:
    """A built run of two sources, of which the second is read more than once."""
    for d in range(2):
        write_file(folder, d, "m0", OLD[d][:50])
        write_file(folder, d, "m1", OLD[d][50:])
    sources = [entry(folder, 0, weight=2), entry(folder, 1, weight=1)]
    config = make_config(folder, sources, **({"stages": STAGES[:1]} | settings))
    megablend.build(config)
    return config


def find_holding(samples: Sequence[ReadSample], listed: Sequence[int]) -> list[int]:
    """The samples that have any of these tokens."""
    wanted = set(listed)
    return [k for k, sample in enumerate(samples) if wanted & set(sample.tokens.tolist())]


def read_tokens(dataset: megablend.Dataset, stop: int) -> list[list[int]]:
    """The tokens of the first samples, without the extra ones."""
    return [each.tokens[:-1].tolist() for each in read_samples(dataset, range(stop))]


def read_rows(dataset: megablend.Dataset, start: int) -> list[list[int]]:
    """The tokens of all samples from `start` on, all as long as one another, read in batches."""
    with closing(megablend.Loader(dataset, micro_batch_size=50, consumed_samples=start)) as loader:
        return [row.tolist() for batch in loader for row in batch["tokens"]]


def read_sources(
    dataset: megablend.Dataset, read: Sequence[ReadSample] = ()
) -> dict[str, list[int]]:
    """Of each source, the tokens of its samples by ordinal, without the extra ones; of all samples, where `read` lists them."""
    samples = defaultdict[str, dict[int, list[int]]](dict)
    for sample in read or read_samples(dataset):
        name = dataset.sources[sample.source]
        listed = sample.tokens.tolist()
        assert samples[name].setdefault(sample.ordinal, listed[:-1]) is not None
    assert sum(map(len, samples.values())) == len(dataset)
    return {
        name: [token for _, each in sorted(found.items()) for token in each]
        for name, found in samples.items()
    }


def begin_epochs(tokens: Sequence[int], old: Sequence[int], new: Sequence[int]) -> int:
    """The epoch with which a source in file order begins the new tokens. Raises: AssertionError where it reads anything else."""
    for epochs in range(len(tokens) // len(old) + 2):
        expected = islice(chain(islice(cycle(old), epochs * len(old)), cycle(new)), len(tokens))
        if list(expected) == list(tokens):
            return epochs
    raise AssertionError("neither old nor new epochs")


@pytest.mark.parametrize("at", [None, 112])
def test_a_grown_source_finishes_its_epoch_and_a_new_one_begins_at_once(
    tmp_path: Path, at: int | None
) -> None:
    config = make_run(tmp_path, order="sequential")
    before = megablend.open(config)
    past = read_tokens(before, at or 320)
    state = json.loads(json.dumps(before.state_dict(at or 320)))
    write_file(tmp_path, 1, "m00", later(1))  # between the others, by name
    write_file(tmp_path, 2, "a", later(2))
    grown = config | {
        "sources": [*config["sources"], entry(tmp_path, 2, weight=0)],
        "stages": [STAGES[0], STAGES[1] | {"sources": {"s2": {"weight": 1}}}],
    }
    with pytest.raises(
        PlanError, match="none of which has source 's2'; index the files as they are"
    ):
        megablend.open(grown)
    megablend.build_index(grown)
    found = megablend.amend(grown, at=at or 320, dry_run=True)
    committed = load_ledger(config["cache"], "default")
    assert committed is not None
    assert (found.at, found.committed, committed.num_samples) == (at or 320, False, 320)
    megablend.amend(grown, state=state)
    dataset = megablend.open(grown, state=state)
    assert read_tokens(dataset, at or 320) == past
    tokens = read_sources(dataset)
    old = [tokens_of(each) for each in OLD]
    new = tokens_of(OLD[1][:50], later(1), OLD[1][50:])
    assert begin_epochs(tokens["s0"], old[0], old[0]) >= 0
    first = (
        sum(8 for k in range(at or 320) if dataset.run.plan.locate(k)[0] == 1) + len(old[1])
    ) // len(old[1])
    assert first <= begin_epochs(tokens["s1"], old[1], new) <= first + (at is not None)
    assert tokens["s2"] == list(islice(cycle(tokens_of(later(2))), len(tokens["s2"])))
    newer = json.loads(json.dumps(dataset.state_dict(700)))
    assert len(newer["indices"]) == 2
    assert newer["index"] == newer["indices"][1]
    resumed = megablend.Loader(megablend.open(grown, state=newer), micro_batch_size=4)
    assert [row.tolist() for row in next(iter(resumed))["tokens"]] == [
        dataset[k]["tokens"].tolist() for k in range(700, 704)
    ]


def test_a_file_that_did_not_change_is_described_once(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    write_file(tmp_path, 1, "m00", later(1))
    grown = config | {"stages": STAGES}
    megablend.build(grown)
    described = megablend.describe(grown)
    assert isinstance(described, RunDescription)
    tokens = len(tokens_of(*OLD, later(1)))
    assert (described.index.files, described.index.tokens) == (5, tokens)
    assert described.index.rows == sum(map(len, [*OLD, later(1)]))
    newest = megablend.describe(config["cache"])
    assert isinstance(newest, CacheDescription)
    assert described.index.blocks in {
        each.blocks for each in newest.indices if isinstance(each, IndexDescription)
    }
    path = tmp_path / "grown.json"
    path.write_text(json.dumps(grown))
    assert f"index of 5 files, {tokens:,} tokens, in" in run("describe", path).stdout
    (tmp_path / "data/source0/m0.parquet").unlink()
    write_file(tmp_path, 0, "m2", later(0))
    config = grown | {"stages": [*STAGES, {"samples": 3200, "new_data": True}]}
    megablend.build(config)
    described = megablend.describe(config)
    assert isinstance(described, RunDescription)
    assert (described.index.files, described.index.tokens) == (
        6,
        tokens + len(tokens_of(later(0))),
    )


@pytest.mark.parametrize("order", ["block", "document"])
def test_epochs_of_shuffled_sources_have_each_token_once(tmp_path: Path, order: str) -> None:
    config = make_run(tmp_path, order=order, interleaving="lanes")
    write_file(tmp_path, 1, "m00", later(1))
    edited = config | {"stages": STAGES}
    megablend.build(edited)  # a stage at the end needs no amendment
    tokens = read_sources(megablend.open(edited))
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    assert len(ledger.indices) == 2
    old = tokens_of(OLD[1])
    new = tokens_of(OLD[1], later(1))
    whole, left = divmod(len(tokens["s1"]) - len(old), len(new))
    assert whole >= 1
    for epoch, count in (
        (tokens["s1"][: len(old)], 1),
        (tokens["s1"][len(old) : len(old) + whole * len(new)], whole),
    ):
        assert Counter(epoch) == Counter(
            (old if epoch[0] == tokens["s1"][0] and count == 1 and len(epoch) == len(old) else new)
            * count
        )
    last = Counter(tokens["s1"][len(old) + whole * len(new) :])
    assert sum(last.values()) == left
    assert max(last.values(), default=1) == 1


def test_documents_keep_their_split(tmp_path: Path) -> None:
    config = make_run(tmp_path, split="70,20,10")
    write_file(tmp_path, 1, "m00", later(1))
    edited = config | {"stages": STAGES}
    valid = set(read_sources(megablend.open(config, "valid"))["s1"])
    megablend.build(edited)
    train = set(read_sources(megablend.open(edited))["s1"])
    count = len(OLD[1])
    cut = [round(Fraction(7, 10) * n) for n in (count, 70)]
    assert train == set(tokens_of(OLD[1][: cut[0]], later(1)[: cut[1]]))
    assert set(read_sources(megablend.open(edited, "valid"))["s1"]) == valid
    wider = set(read_sources(megablend.open(edited, "valid", stage=1))["s1"])
    expected = tokens_of(OLD[1][cut[0] : round(Fraction(9, 10) * count)], later(1)[cut[1] : 63])
    assert wider <= set(expected)
    assert len(expected) - len(wider) <= 8
    assert not wider & train


def test_a_withdrawn_source_is_read_no_more(tmp_path: Path) -> None:
    config = make_run(tmp_path, order="sequential")
    edited = config | {
        "stages": [STAGES[0], {"samples": 1600, "withdraw": ["s1"]}, {"samples": 1920, "lanes": 8}]
    }
    for path in (tmp_path / "data" / "source1").iterdir():
        path.rename(path.with_suffix(".gone"))
    with pytest.raises(ConfigError, match="matches no file"):
        # The path matches no file
        megablend.build_index(config | {"cache": str(tmp_path / "other")})
    megablend.build_index(edited)
    megablend.amend(edited, at=112)
    dataset = megablend.open(edited)
    assert {dataset.run.plan.locate(k)[0] for k in range(112, 1920)} == {0}
    assert [dataset[k]["tokens"].tolist() for k in (112, 1900)]
    assert len(megablend.open(edited, state=dataset.state_dict(1700))) == 1920
    described = megablend.describe(edited)
    assert not described.to_dict()["problems"]


def test_every_snapshot_of_a_run_is_kept_and_read_by_its_ledger_alone(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    write_file(tmp_path, 1, "m00", later(1))
    edited = config | {"stages": STAGES}
    megablend.build(edited)
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    assert set(megablend.gc(config["cache"], older_than_days=0).kept) == set(ledger.indices)
    first, second = megablend.show_run(config["cache"], "default").chain
    assert (first.start, first.stop, second.start, second.stop) == (0, 320, 320, 1600)
    assert {
        "what": "index",
        "before": ledger.indices[0],
        "after": ledger.indices[1],
    } in second.changes
    assert not megablend.verify(config["cache"], data=True).problems
    samples = read_samples(megablend.open(edited))
    for k in (0, 319, 700, 1599):
        shown = megablend.show(config["cache"], k, run="default")
        assert list(shown.tokens) == samples[k].tokens.tolist()
    found = megablend.find(edited, "source1/m0.parquet").to_dict()["found"]
    assert len(found) == 1
    assert found[0]["complete"]
    holding = find_holding(samples, tokens_of(OLD[1][:50]))
    assert {each["sample"] for each in found[0]["samples"]} >= set(holding)
    assert len(holding) > 100


@pytest.mark.parametrize(("order", "at"), [("block", 112), ("document", 320), ("sequential", 112)])
def test_what_is_left_of_an_epoch_skips_withdrawn_files(
    tmp_path: Path, order: str, at: int
) -> None:
    config = make_run(tmp_path, order=order)
    before = megablend.open(config)
    past = read_tokens(before, at)
    (tmp_path / "data" / "source0" / "m1.parquet").rename(tmp_path / "m1.gone")
    (tmp_path / "data" / "source1" / "m0.parquet").rename(tmp_path / "m0.gone")
    write_file(tmp_path, 1, "m2", later(1))
    edited = config | {"stages": STAGES}
    megablend.build_index(edited)
    found = megablend.amend(edited, at=at)
    (tmp_path / "m1.gone").rename(tmp_path / "data" / "source0" / "m1.parquet")
    (tmp_path / "m0.gone").rename(tmp_path / "data" / "source1" / "m0.parquet")
    dataset = megablend.open(edited)
    assert read_tokens(dataset, at) == past
    samples = read_samples(dataset)
    tokens = read_sources(dataset, samples)
    start = at + found.drain
    gone = {"s0": set(tokens_of(OLD[0][50:])), "s1": set(tokens_of(OLD[1][:50]))}
    kept = {"s0": tokens_of(OLD[0][:50]), "s1": tokens_of(OLD[1][50:])}
    later_epochs = {"s0": kept["s0"], "s1": tokens_of(OLD[1][50:], later(1))}
    for sample in samples[start:]:
        assert not gone[dataset.sources[sample.source]] & set(sample.tokens.tolist())
    for number, name in enumerate(("s0", "s1")):
        read = sum(8 for sample in samples[:start] if sample.source == number)
        size = len(kept[name]) + len(gone[name])
        left = Counter(kept[name]) - Counter(tokens[name][read - read % size : read])
        rest = tokens[name][read:]
        assert Counter(rest[: left.total()]) == left  # the epoch's other tokens, each once
        following = rest[left.total() :][: len(later_epochs[name])]
        assert max(Counter(following).values()) == 1
        assert set(following) <= set(later_epochs[name])
    hits = megablend.find(edited, "source0/m0.parquet").to_dict()["found"][0]["samples"]
    assert {each["sample"] for each in hits} == set(find_holding(samples, kept["s0"]))
    assert len(megablend.find(edited, "source0/m1.parquet").to_dict()["found"][0]["samples"]) > 5
    skipped = (
        megablend.describe(edited)
        .to_dict()["splits"]["train"]["sources"][0]
        .get("withdrawn_tokens", 0)
    )
    read = sum(8 for sample in samples[:start] if sample.source == 0)
    size = len(kept["s0"]) + len(gone["s0"])
    assert skipped == len(gone["s0"] - set(tokens["s0"][read - read % size : read]))


@pytest.mark.parametrize("in_one_stage", [True, False])
def test_samples_of_another_length_after_a_source_is_withdrawn(
    tmp_path: Path, in_one_stage: bool
) -> None:
    """What lanes have read of the withdrawn source beyond the cut keeps the length that it had."""
    config = make_run(tmp_path, order="sequential")
    before = megablend.open(config)
    withdrawn: dict[str, Any] = {"samples": 1600 if in_one_stage else 640, "withdraw": ["s1"]}
    longer: dict[str, Any] = {"samples": 1600, "sequence_length": 16}
    edited = config | {"stages": [STAGES[0], withdrawn | longer if in_one_stage else withdrawn]}
    megablend.build_index(edited)
    at = megablend.amend(edited, at=112).at
    if not in_one_stage:
        edited["stages"].append(longer)
        megablend.build(edited)
    dataset = megablend.open(edited)
    assert read_tokens(dataset, at) == read_tokens(before, at)
    samples = read_samples(dataset)
    assert {sample.source for sample in samples[at:]} == {0}
    found = read_sources(dataset, samples)["s0"]
    assert found == list(islice(cycle(tokens_of(OLD[0])), len(found)))
    megablend.export(edited, tmp_path / "order.parquet")
    pieces = pq.read_table(tmp_path / "order.parquet").column("pieces").to_pylist()
    lengths = [sum(piece["stop"] - piece["start"] for piece in each) for each in pieces]
    assert lengths == [len(sample.tokens) for sample in samples]
    described = megablend.describe(edited)
    for number, source in enumerate(described.to_dict()["splits"]["train"]["sources"]):
        given = [k for k, sample in enumerate(samples) if sample.source == number]
        assert (source["samples"], source["first_sample"], source["last_sample"]) == (
            len(given),
            given[0],
            given[-1],
        )
        assert all(end <= given[-1] for end in source["epoch_ends"])


def test_a_drain_that_reads_nothing_of_a_withdrawn_source_needs_no_files_of_it(
    tmp_path: Path,
) -> None:
    """Its lanes keep the length of before, and go on in the sources that remain."""
    config = make_run(tmp_path)
    withdrawn = {"samples": 1600, "withdraw": ["s1"], "sequence_length": 16}
    edited = config | {"stages": [STAGES[0], withdrawn]}
    megablend.build_index(edited)
    found = megablend.amend(edited, at=112)
    assert found.drain > 0
    shutil.rmtree(tmp_path / "data" / "source1")
    dataset = megablend.open(edited)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(edited))
    assert "committed: samples of 8, then 16 tokens; index of " in run("describe", path).stdout
    assert not megablend.check(edited, state=dataset.state_dict(found.at)).problems
    loader = megablend.Loader(dataset, micro_batch_size=2, consumed_samples=found.at)
    watched = [each.number for each in loader._watch._files if each.is_needed(found.at)]
    assert len(watched) == 2
    assert sum(len(batch["tokens"]) for batch in loader) == 1600 - found.at
    lines = megablend.check(edited).older_problems
    assert len(lines) == 2
    assert all(line.endswith(f"; only samples before {found.at} need this file") for line in lines)
    early = megablend.check(edited, state=dataset.state_dict(found.at - 1))
    assert len(early.problems) == 2


def test_validation_of_the_first_stage_has_no_sources_that_come_later(tmp_path: Path) -> None:
    config = make_run(tmp_path, split="70,20,10")
    before = megablend.open(config, "valid")
    write_file(tmp_path, 2, "a", later(2))
    grown = config | {
        "sources": [*config["sources"], entry(tmp_path, 2, weight=0)],
        "stages": [STAGES[0], STAGES[1] | {"sources": {"s2": {"weight": 1}}}],
    }
    megablend.build(grown)
    for valid in (megablend.open(grown, "valid"), megablend.open(grown, "valid", stage=0)):
        assert read_tokens(valid, len(valid)) == read_tokens(before, len(before))
        assert len(list(megablend.Loader(valid, micro_batch_size=2))) == len(valid) // 2
    later_one = megablend.open(grown, "valid", stage=1)
    assert {each.source for each in read_samples(later_one)} == {0, 1, 2}
    assert not megablend.describe(grown).to_dict()["problems"]


def test_any_names_of_sources(tmp_path: Path) -> None:
    """One may look like what another is called in an older snapshot."""
    config = make_run(tmp_path)
    sources = [config["sources"][0], config["sources"][1] | {"name": "s0@0"}]
    config = config | {"cache": str(tmp_path / "other"), "sources": sources}
    megablend.build(config)
    write_file(tmp_path, 0, "m2", later(0))
    megablend.build(config | {"stages": STAGES})
    dataset = megablend.open(config | {"stages": STAGES})
    known = {"s0": set(tokens_of(OLD[0], later(0))), "s0@0": set(tokens_of(OLD[1]))}
    for name, tokens in read_sources(dataset).items():
        assert set(tokens) <= known[name]


@pytest.mark.parametrize(
    ("at", "stop", "says"),
    [(200, 208, "was amended from sample 208 on"), (320, 320, "plan differs from sample 320 on")],
)
def test_states_of_a_plan_whose_new_data_was_replaced(
    tmp_path: Path, at: int, stop: int, says: str
) -> None:
    config = make_run(tmp_path)
    edited = config | {"stages": STAGES}
    write_file(tmp_path, 1, "b", later(1))
    megablend.build(edited)
    replaced = megablend.open(edited)
    early, last, late = (json.loads(json.dumps(replaced.state_dict(k))) for k in (100, stop, 500))
    write_file(tmp_path, 0, "c", later(0))
    megablend.build_index(edited)
    assert megablend.amend(edited, at=at).at == stop
    dataset = megablend.open(edited)
    expected = read_rows(dataset, 100)
    assert len(expected) == 1500
    assert expected != read_rows(replaced, 100)
    with pytest.raises(StateError, match=says):
        megablend.open(edited, state=late)
    with pytest.raises(StateError, match=says):
        dataset.load_state_dict(late)
    megablend.gc(config["cache"], older_than_days=0)  # the snapshot that was replaced goes
    with pytest.raises(StateError, match=says):
        megablend.open(edited, state=late)
    for state in (early, last):
        resumed = megablend.open(edited, state=state)
        assert resumed.run.ledger == dataset.run.ledger
        assert read_rows(resumed, 100) == expected
        megablend.Loader(dataset, micro_batch_size=4).load_state_dict(state)
    earlier = edited | {"stages": [*STAGES[:1], STAGES[1] | {"sources": {"s0": {"weight": 5}}}]}
    assert megablend.amend(earlier, state=early, dry_run=True).at == 112


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """And what the messages say to do instead is done."""
    config = make_run(tmp_path)
    edited = config | {"stages": STAGES}
    with pytest.raises(
        PlanError,
        match=r"stages\[1\]: new_data: the run already reads the newest index, .*, or leave out new_data",
    ):
        megablend.amend(edited, at=112)
    withdrawn = config | {"stages": [STAGES[0], {"samples": 1600, "withdraw": ["s1"]}]}
    with pytest.raises(
        PlanError,
        match=r"stages\[1\]: withdraw: the newest index, .*, still has 's1'; .*`megablend index CONFIG`",
    ):
        megablend.amend(withdrawn, at=112)
    plain = {"samples": 1600, "sources": {"s0": {"weight": 1}}}
    assert megablend.amend(config | {"stages": [STAGES[0], plain]}, at=112, dry_run=True).at == 112
    write_file(tmp_path, 2, "a", later(2))
    added = entry(tmp_path, 2, weight=0)
    first = edited | {"sources": [added, *config["sources"]]}
    megablend.build_index(first)
    says = "source 's2' is new in run 'default', but listed before sources that the run already had; list it after them"
    with pytest.raises(PlanError, match=says):
        megablend.amend(first, at=112)
    assert (
        megablend.amend(edited | {"sources": [*config["sources"], added]}, at=112, dry_run=True).at
        == 112
    )
    without = edited | {"sources": [config["sources"][0], entry(tmp_path, 2, weight=1)]}
    megablend.build_index(without)
    says = r"lacks source 's1', which the run has read before; list it in `withdraw` of the stage, or index its files again"
    with pytest.raises(PlanError, match=says):
        megablend.amend(edited, at=112)
    withdrawn = edited | {
        "stages": [STAGES[0], STAGES[1] | {"withdraw": ["s1"]}],
        "sources": [*config["sources"], added],
    }
    assert megablend.amend(withdrawn, at=112, dry_run=True).at == 112
    grown = edited | {"sources": [*config["sources"], added]}
    megablend.build_index(grown)
    assert megablend.amend(grown, at=112, dry_run=True).at == 112
    write_file(tmp_path, 1, "m00", later(1))
    assert (
        "has other files of source 's1' than the source's path matches (2 indexed, 3 matched; "
        in megablend.describe(grown).to_dict()["note"]
    )
    megablend.build_index(grown)
    assert megablend.amend(grown, at=112, dry_run=True).at == 112
    assert megablend.describe(grown).to_dict()["stages"] == [320, 1600]


def test_a_source_that_is_filled_again_after_a_cut(tmp_path: Path) -> None:
    """What was left of its old files was dropped, so that its new files get another name."""
    config = make_run(tmp_path, order="sequential")
    folder = tmp_path / "data" / "source1"
    for path in folder.iterdir():
        path.unlink()
    write_file(tmp_path, 1, "empty", [[], []])
    emptied = [STAGES[0], STAGES[1] | {"sources": {"s1": {"weight": 0}}}]
    megablend.build_index(config | {"stages": emptied})
    megablend.amend(config | {"stages": emptied}, at=112)
    write_file(tmp_path, 1, "m2", later(1))
    filled = [*emptied, {"samples": 1920, "new_data": True, "sources": {"s1": {"weight": 1}}}]
    megablend.build_index(config | {"stages": filled})
    says = "source 's1' is read again after a stage without any of its files, .*; add its new files as a source with another name"
    with pytest.raises(PlanError, match=says):
        megablend.build(config | {"stages": filled})
    write_file(tmp_path, 2, "m2", later(1))
    named = {"sources": [*config["sources"], entry(tmp_path, 2, weight=0)]}
    named["stages"] = [
        *emptied,
        {"samples": 1920, "new_data": True, "sources": {"s2": {"weight": 1}}},
    ]
    megablend.build_index(config | named)
    megablend.build(config | named)
    dataset = megablend.open(config | named)
    last = read_samples(dataset, range(1600, 1920))
    assert {token for each in last if each.source == 2 for token in each.tokens.tolist()} <= set(
        tokens_of(later(1))
    )
    assert {each.source for each in last} == {0, 2}


@pytest.mark.parametrize("whole", [False, True])
def test_an_index_without_a_withdrawn_source_has_its_document_tables(
    tmp_path: Path, whole: bool
) -> None:
    config = make_run(tmp_path, order="document")
    edited = config | {"stages": [STAGES[0], {"samples": 1600, "withdraw": ["s1"]}]}
    if whole:
        megablend.build(edited)
    else:
        report = megablend.build_index(edited)
        assert report.documents is not None
        megablend.amend(edited, at=112)
    dataset = megablend.open(edited)
    assert len(dataset) == 1600
    assert {dataset.run.plan.locate(k)[0] for k in range(320, 1600)} == {0}


def test_new_data_in_another_order_needs_no_document_table_of_the_old_index(tmp_path: Path) -> None:
    # The index then has counts of documents
    config = make_run(tmp_path, order="block", split="70,20,10")
    before = megablend.open(config)
    past = read_tokens(before, 112)
    write_file(tmp_path, 1, "m00", later(1))
    edited = config | {"stages": [STAGES[0], STAGES[1] | {"order": "document"}]}
    megablend.build_index(edited)
    megablend.amend(edited, at=112)
    dataset = megablend.open(edited)
    assert read_tokens(dataset, 112) == past
    assert set(tokens_of(later(1))) & set(read_sources(dataset)["s1"])


@pytest.mark.parametrize("counted", [False, True])
def test_another_order_without_new_data_after_files_changed(tmp_path: Path, counted: bool) -> None:
    """`index` makes the tables of the index that the run keeps, if documents were counted; else a message says what to do."""
    config = make_run(tmp_path, order="block", **({"split": "70,20,10"} if counted else {}))
    before = megablend.open(config)
    past = read_tokens(before, 112)
    write_file(tmp_path, 1, "m00", later(1))
    edited = config | {"stages": [STAGES[0], {"samples": 1600, "order": "document"}]}
    says = (
        r"rebuild the index \(`megablend index CONFIG`\)" if counted else "has no document counts"
    )
    with pytest.raises(MegablendError, match=says):
        megablend.amend(edited, at=112)
    megablend.build_index(edited)
    if not counted:
        with pytest.raises(
            PlanError,
            match=r"has no document counts .* read an index that has them \(`new_data: true`",
        ):
            megablend.amend(edited, at=112)
        edited = config | {
            "stages": [STAGES[0], {"samples": 1600, "order": "document", "new_data": True}]
        }
    megablend.amend(edited, at=112)
    dataset = megablend.open(edited)
    assert read_tokens(dataset, 112) == past
    assert (set(tokens_of(later(1))) & set(read_sources(dataset)["s1"]) == set()) == counted
    megablend.export(edited, tmp_path / "order.parquet", stop=112)
    listing = pq.read_table(tmp_path / "order.parquet").column("pieces").to_pylist()
    for sample, pieces in zip(read_samples(dataset, range(112)), listing, strict=True):
        listed = OLD[sample.source]
        documents = listed[:50] if "m0" in pieces[0]["file"] else listed[50:]
        row = pieces[0]["row"]
        first = sample.tokens[0]
        assert (row is not None) == counted
        assert row is None or first in (documents[row] or [])


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("is_error", [False, True])
def test_caps_count_epochs_of_before_as_they_were(
    tmp_path: Path, grows: bool, is_error: bool
) -> None:
    """A quarter of an epoch is one of the files of before, as long as that epoch is not over."""
    config = make_run(tmp_path, order="sequential")
    for number in range(8 * grows):
        write_file(
            tmp_path,
            1,
            f"m2{number}",
            [[token + number * 3000 for token in each or ()] for each in later(1)],
        )
    before = megablend.open(config)
    read = 8 * sum(before.run.plan.locate(k)[0] == 1 for k in range(320))
    size = len(tokens_of(OLD[1]))
    sources = {
        "s0": {"weight": 1},
        "s1": {"weight": 1, "max_epochs": Fraction(read, size) + Fraction(1, 4)},
    }
    settings = {
        "sources": sources,
        "on_exhausted": "error" if is_error else "redistribute",
        "new_data": grows,
    }
    edited = config | {"stages": [STAGES[0], {"samples": 1600} | settings]}
    most = (size // 4 - 1) // 8
    if is_error:
        with pytest.raises(
            PlanError, match=rf"640 samples of 8 tokens are requested, {most} are left"
        ):
            megablend.build(edited)
        return
    megablend.build(edited)
    dataset = megablend.open(edited)
    assert sum(dataset.run.plan.locate(k)[0] == 1 for k in range(320, 1600)) == most


def test_new_data_in_another_order_after_files_of_before_are_gone(tmp_path: Path) -> None:
    """`build` needs no documents of an index that is read in blocks."""
    config = make_run(tmp_path, order="block", split="70,20,10")
    write_file(tmp_path, 1, "m2", later(1))
    (tmp_path / "data" / "source1" / "m0.parquet").rename(tmp_path / "m0.gone")
    edited = config | {"stages": [STAGES[0], STAGES[1] | {"order": "document"}]}
    megablend.build(edited)
    dataset = megablend.open(edited)
    assert dataset.sample(1599).tokens.tolist()


@pytest.mark.parametrize("order", ["sequential", "document"])
def test_renamed_files_are_read_where_they_are_now(tmp_path: Path, order: str) -> None:
    config = make_run(tmp_path, order=order)
    before = megablend.open(config)
    past = read_tokens(before, 112)
    here = tmp_path / "data" / "source1"
    (here / "m1.parquet").rename(here / "z1.parquet")
    write_file(tmp_path, 0, "m3", later(0))
    edited = config | {"stages": STAGES}
    megablend.build_index(edited)
    megablend.amend(edited, at=112)
    dataset = megablend.open(edited)
    assert read_tokens(dataset, 112) == past
    samples = read_samples(dataset)
    tokens = read_sources(dataset, samples)["s1"]
    old = tokens_of(OLD[1])
    first = Counter(tokens[: len(old)])
    assert first == Counter(old)
    assert len(tokens) > 2 * len(old)
    assert megablend.check(edited).problems == megablend.check(edited).older_problems == ()
    assert megablend.verify(config["cache"], data=True).problems == ()
    hits = megablend.find(edited, "source1/z1.parquet").to_dict()["found"]
    holding = find_holding(samples, tokens_of(OLD[1][50:]))
    assert {each["sample"] for found in hits for each in found["samples"]} >= set(holding)
    if order == "document":  # else the index has no counts of documents
        row = max(range(len(OLD[1][50:])), key=lambda i: len(OLD[1][50 + i] or []))
        of_row = megablend.find(edited, "source1/z1.parquet", row).to_dict()["found"]
        expected = find_holding(samples, OLD[1][50 + row] or [])
        assert expected
        assert {each["sample"] for found in of_row for each in found["samples"]} >= set(expected)
    shown = {
        piece.file
        for k in holding[:9]
        for piece in megablend.show(config["cache"], k, run="default").pieces
    }
    assert str(here / "m1.parquet") not in shown
    by_name = [megablend.find(edited, name).found for name in ("z1.parquet", "source1/m1.parquet")]
    assert by_name[0] == by_name[1]
    assert by_name[0][0].samples
    (here / "z1.parquet").rename(here / "z2.parquet")
    assert "z1.parquet" in str(megablend.check(edited).problems)
    assert "z1.parquet" in str(megablend.verify(config["cache"], data=True).problems)


def test_files_that_only_earlier_samples_read_are_checked_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A round may be over before the file is gone: another one has to follow
    monkeypatch.setattr("megablend.reader.file_watch.ROUND_SECONDS", 0.01)
    config = make_run(tmp_path, order="block", file_checks_per_second=1e6)
    gone = tmp_path / "data" / "source1" / "m0.parquet"
    gone.rename(tmp_path / "m0.gone")
    write_file(tmp_path, 1, "m2", later(1))
    edited = config | {"stages": STAGES}
    megablend.build_index(edited)
    found = megablend.amend(edited, at=112)
    stop = found.at + found.drain
    dataset = megablend.open(edited)
    checked = megablend.check(edited)
    assert (checked.problems, checked.files) == ((), 5)
    assert re.fullmatch(
        rf".*m0.parquet: no such file .*; only samples before {stop} need this file",
        "".join(checked.older_problems),
    )
    early = dataset.state_dict(stop - 1)
    late = dataset.state_dict(stop)
    restore = ", and this state is at an earlier sample: restore the file"
    assert megablend.check(edited, state=early).problems == tuple(
        line + restore for line in checked.older_problems
    )
    assert (
        megablend.check(edited, state=late).problems,
        megablend.check(edited, state=late).files,
    ) == ((), 4)
    loader = megablend.Loader(dataset, micro_batch_size=4, consumed_samples=stop)
    watched = {each.number for each in loader._watch._files if each.is_needed(stop - 1)}
    assert len(watched) == 5
    for number, _ in enumerate(loader):
        if number == 20:
            break
    early_one = megablend.Loader(dataset, micro_batch_size=4, consumed_samples=0)
    (tmp_path / "data" / "source1" / "m0.parquet").symlink_to(tmp_path / "m0.gone")
    batches = iter(early_one)
    next(batches)
    gone.unlink()
    deadline = time.monotonic() + 500
    while early_one._watch._end.found is None and time.monotonic() < deadline:
        early_one._watch.start(4)
        time.sleep(0.01)
    with pytest.raises(DataError, match=r"m0\.parquet: no such file.*background check"):
        early_one._watch.raise_found()
    early_one._watch.start(stop)
    early_one._watch.raise_found()
    early_one.close()
    loader.close()


def test_of_equal_files_one_that_is_left_is_read(tmp_path: Path) -> None:
    here = tmp_path / "data" / "source1"
    write_file(tmp_path, 1, "m2", OLD[1][:50])  # as m0
    config = make_run(tmp_path, order="block")
    before = megablend.open(config)
    past = read_tokens(before, 320)
    (here / "m0.parquet").unlink()
    edited = config | {"stages": STAGES}
    megablend.build(edited)
    dataset = megablend.open(edited)
    assert read_tokens(dataset, 320) == past
    assert set(read_sources(dataset)["s1"]) == set(tokens_of(OLD[1]))


def test_states_of_validation_with_new_data_need_the_run(tmp_path: Path) -> None:
    config = make_run(tmp_path, split="70,20,10")
    write_file(tmp_path, 1, "m00", later(1))
    edited = config | {"stages": STAGES}
    megablend.build(edited)
    valid = megablend.open(edited, "valid", stage=1)
    state = json.loads(json.dumps(valid.state_dict(3)))
    again = megablend.open(edited, "valid", stage=1, state=state)
    assert [each.tokens.tolist() for each in read_samples(again)] == [
        each.tokens.tolist() for each in read_samples(valid)
    ]
    shutil.copytree(config["cache"], tmp_path / "kept")
    megablend.remove_run(config["cache"], "default")
    says = r"run 'default' in .* does not read; open the state with the cache in which its run was built$"
    with pytest.raises(StateError, match=says):
        megablend.open(edited, "valid", stage=1, state=state)
    kept = edited | {"cache": str(tmp_path / "kept")}
    assert megablend.open(kept, "valid", stage=1, state=state).consumed_samples == 3
    new = tmp_path / "data" / "source1" / "m00.parquet"
    new.rename(tmp_path / "later.parquet")
    megablend.build(config)  # "replay"
    (tmp_path / "later.parquet").rename(new)
    megablend.build(edited)
    assert megablend.open(edited, "valid", stage=1, state=state).consumed_samples == 3


def test_stages_with_new_data_are_committed_one_after_another(tmp_path: Path) -> None:
    """What messages say is done, to the letter; a run is cut before stages with new data that it had already."""
    config = make_run(tmp_path)
    two = config | {
        "stages": [*STAGES, {"samples": 1920, "new_data": True, "sources": {"s0": {"weight": 1}}}]
    }
    write_file(tmp_path, 1, "m2", later(1))
    megablend.build_index(two)
    says = (
        r"`new_data` is set, but the new files have not been added to run '.*' yet; leave out all but the first of these "
        r"stages for now, index the files \(`megablend index CONFIG`\)"
    )
    with pytest.raises(PlanError, match=says):
        megablend.amend(two, at=320)
    megablend.build_index(config | {"stages": STAGES})
    megablend.amend(config | {"stages": STAGES}, at=320)
    indices = megablend.open(config | {"stages": STAGES}).run.ledger.indices
    write_file(tmp_path, 0, "m2", later(0))
    with pytest.raises(
        PlanError,
        match=r"new_data: the run already reads the newest index, .*; index the new files \(`megablend index CONFIG`\)",
    ):
        megablend.amend(two, at=112)
    megablend.build_index(two)
    # Before the first of the two begins, which keeps its index
    assert megablend.amend(two, at=112).at == 112
    dataset = megablend.open(two)
    assert dataset.run.ledger.indices[:2] == indices
    assert [stage.stop for stage in dataset.run.ledger.stages] == [112, 1600, 1920]
    late = set(tokens_of(later(0)))
    assert not any(late & set(each.tokens.tolist()) for each in read_samples(dataset, range(1600)))


def test_rows_where_the_files_of_before_are_back(tmp_path: Path) -> None:
    """The third version of the index is the first one again. What the run reads first then comes after the second."""
    config = make_run(tmp_path, order="document")
    listed = {"m2": later(1), "m3": later(2)}
    stages = STAGES[:1]
    folder = tmp_path / "data" / "source1"
    aside = tmp_path / "aside"
    for stop, added, gone in ((960, "m2", ""), (1600, "", "m2"), (2400, "m3", "")):
        if gone:
            (folder / f"{gone}.parquet").rename(aside)
        if added:
            write_file(tmp_path, 1, added, listed[added])
        stages = [
            *stages,
            {"samples": stop, "new_data": True, "sources": {"s1": {"weight": int(not gone)}}},
        ]
        megablend.build_index(config | {"stages": stages})
        megablend.build(config | {"stages": stages})
        if gone:
            aside.rename(folder / f"{gone}.parquet")  # to be read
    dataset = megablend.open(config | {"stages": stages})
    indices = dataset.run.ledger.indices
    assert indices[0] == indices[2]
    assert len(set(indices)) == 3
    megablend.export(config | {"stages": stages}, tmp_path / "order.parquet")
    listing = pq.read_table(tmp_path / "order.parquet").column("pieces").to_pylist()
    for sample, pieces in zip(read_samples(dataset), listing, strict=True):
        documents = {"m0": OLD[sample.source][:50], "m1": OLD[sample.source][50:]} | listed
        assert sample.tokens[0] in (documents[Path(pieces[0]["file"]).stem][pieces[0]["row"]] or [])


def test_files_are_withdrawn_as_a_capped_epoch_ends_with_the_others(tmp_path: Path) -> None:
    """The extra token of the last sample before is one of the withdrawn file."""
    config = make_run(tmp_path, order="sequential", shuffle_window=1)
    samples = len(tokens_of(OLD[1])) // 8 * 3 // 8 * 8
    capped = config | {
        "stages": [{"samples": samples, "sources": {"s1": {"max_epochs": 1}}}],
        "run": "capped",
    }
    megablend.build(capped)
    dataset = megablend.open(capped)
    kept = len(tokens_of(OLD[1][:50]))
    read = 0
    at = 0
    while at % 4 or read < kept:
        read = read + 8 * (dataset.sample(at).source == 1)
        at = at + 1
    (tmp_path / "data" / "source1" / "m1.parquet").rename(tmp_path / "m1.gone")
    edited = capped | {
        "stages": [capped["stages"][0], STAGES[1] | {"sources": {"s1": {"max_epochs": None}}}]
    }
    megablend.build_index(edited)
    (tmp_path / "m1.gone").rename(tmp_path / "data" / "source1" / "m1.parquet")
    assert megablend.amend(edited, at=at).at == at


def test_what_lets_a_run_with_new_data_go_on_after_it_was_reset(tmp_path: Path) -> None:
    """A state from before the stage knows one index only: each way that the error names leads on."""
    config = make_run(tmp_path)
    state = megablend.open(config).state_dict(100)
    write_file(tmp_path, 1, "m2", later(1))
    grown = config | {"stages": STAGES}
    plan = megablend.build(grown).ledger.digest
    aside = Path(megablend.reset_run(grown, "default"))
    with pytest.raises(
        PlanError,
        match=r"stages\[1\]: new_data: run 'default' is not built yet; build the run without "
        r"stages\[1\] and later stages, then add the stage",
    ):
        megablend.build(grown)
    says = "before the run read all new data of this config.*the config of that time, or, if the run was reset, restore"
    with pytest.raises(StateError, match=says):
        megablend.open(grown, state=state)
    megablend.build(config)  # on the new index
    source = entry(tmp_path, 2, weight=0)
    write_file(tmp_path, 2, "a", later(2))
    for edited in (grown, grown | {"sources": [*config["sources"], source]}):
        with pytest.raises(StateError, match=says):
            megablend.open(edited, state=state)
    assert megablend.open(config, state=state).consumed_samples == 100
    ledger = Path(config["cache"]) / "runs" / "default.json"
    aside.rename(ledger)
    assert megablend.open(grown, state=state).state_dict()["plan"] == plan
    ledger.unlink()
    added = tmp_path / "data" / "source1" / "m2.parquet"
    added.rename(tmp_path / "later")
    megablend.build(config)
    (tmp_path / "later").rename(added)
    megablend.build_index(grown)
    megablend.amend(grown, at=320)
    assert megablend.open(grown, state=state).state_dict()["plan"] == plan


def test_where_grown_runs_part(tmp_path: Path) -> None:
    """`diff` of a committed config, and of one that would change its last stage, finds what their samples show."""
    config = make_run(tmp_path)
    alone = config | {"cache": str(tmp_path / "alone")}
    megablend.build(alone)
    write_file(tmp_path, 1, "m00", later(1))
    edited = config | {"stages": STAGES}
    changed = config | {"stages": [STAGES[0], STAGES[1] | {"sources": {"s1": {"weight": 3}}}]}
    newest = alone | {"stages": [{"samples": 1600}], "run": "newest", "cache": config["cache"]}
    for each in (edited, newest, alone | {"stages": changed["stages"]}):
        megablend.build(each)
    paths = [tmp_path / f"{name}.json" for name in ("edited", "changed", "newest")]
    for path, each in zip(paths, (edited, changed, newest), strict=True):
        path.write_text(json.dumps(each))
    datasets = [
        megablend.open(each) for each in (edited, alone | {"stages": changed["stages"]}, newest)
    ]
    listed = [
        [sample.tokens.tolist() for sample in read_samples(each, range(1600))] for each in datasets
    ]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        parts_at = next(k for k in range(1600) if listed[i][k] != listed[j][k])
        assert megablend.diff(paths[i], paths[j]).to_dict()["parts_at"] == parts_at
    assert megablend.diff(paths[0], paths[0]).to_dict()["parts_at"] is None


def test_the_newest_index_must_be_of_the_configs_files(tmp_path: Path) -> None:
    """Another config of the same cache has indexed other files of sources of the same names; or a file came after the index."""
    config = make_run(tmp_path)
    edited = config | {"stages": [*STAGES[:1], STAGES[1]]}
    other = tmp_path / "other"
    for d in range(2):
        write_file(other, d, "m0", later(d))
    megablend.build_index(
        config | {"sources": [entry(other, 0, weight=2), entry(other, 1, weight=1)]}
    )
    ledger = load_ledger(config["cache"], "default")
    for dry_run in (True, False):
        with pytest.raises(
            CacheError,
            match=r"has other files of source 's0' than the source's path matches .* `megablend index CONFIG`",
        ):
            megablend.amend(edited, at=112, dry_run=dry_run)
    assert load_ledger(config["cache"], "default") == ledger
    write_file(tmp_path, 0, "m2", later(0))
    megablend.build_index(edited)
    write_file(tmp_path, 1, "m2", later(1))
    note = megablend.amend(edited, at=112).note
    assert note is not None
    assert re.search(
        r"source 's1' .*m2.parquet is not indexed\); .*index again \(`megablend index CONFIG`\) and amend",
        note,
    )
    megablend.build_index(
        config
        | {"sources": [dict(each, name=f"s{1 - d}") for d, each in enumerate(config["sources"])]}
    )
    # Of equal names
    with pytest.raises(
        CacheError,
        match=r"has other files of source 's[01]' than .*, but those of .* were indexed\)",
    ):
        megablend.amend(edited, at=112)
    megablend.build_index(edited)
    assert megablend.amend(edited, at=112).note is None
    assert set(tokens_of(later(1))) & set(read_sources(megablend.open(edited))["s1"])


def assert_same(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
    """All fields of all samples are the same."""
    for k, (sample, again) in enumerate(zip(before, after, strict=True)):
        assert sample.keys() == again.keys()
        for name, value in sample.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(again[name])), (k, name)


@pytest.mark.parametrize(
    ("order", "gone", "at"),
    each_pair(
        ["block", "document", "sequential"],
        [(0, "m0"), (0, "m1"), (1, "m0"), (1, "m1")],
        [64, 112, 160, 320],
    ),
)
def test_all_fields_before_an_amendment_stay_when_a_file_is_gone(
    tmp_path: Path, order: str, gone: tuple[int, str], at: int
) -> None:
    """The last label of a sample that ends where the files change is still that of the stage that has the sample."""
    config = make_run(tmp_path, order=order)
    before = [dict(sample) for sample in map(megablend.open(config).__getitem__, range(at))]
    source, name = gone
    path = tmp_path / "data" / f"source{source}" / f"{name}.parquet"
    edited = config | {"stages": STAGES}
    path.rename(tmp_path / "aside")
    megablend.build_index(edited)
    found = megablend.amend(edited, at=at)
    assert found.at == at
    (tmp_path / "aside").rename(path)  # jobs before the amendment still have it
    dataset = megablend.open(edited)
    assert_same(before, [dataset[k] for k in range(at)])
    samples = read_samples(dataset)
    for number, part in ((n, part) for n in range(2) for part in ("m0", "m1")):
        half = OLD[number][:50] if part == "m0" else OLD[number][50:]
        hits = megablend.find(edited, f"source{number}/{part}.parquet").to_dict()["found"][0][
            "samples"
        ]
        assert {hit["sample"] for hit in hits} == set(find_holding(samples, tokens_of(half)))


def test_epochs_that_end_in_what_a_withdrawn_source_has_left_are_described(tmp_path: Path) -> None:
    """An epoch may end in samples that the lanes had begun when the source was withdrawn, and that nobody reads."""
    config = make_run(tmp_path)
    config["sources"][1]["weight"] = 6
    for at in range(32, 320, 32):
        of_run = config | {"run": f"run-{at}"}
        megablend.build(of_run)
        withdrawn = {"samples": 1600, "withdraw": ["s1"], "sequence_length": 16}
        edited = of_run | {"stages": [STAGES[0], withdrawn]}
        megablend.build_index(edited)
        assert megablend.amend(edited, at=at).at == at
        source = megablend.describe(edited).to_dict()["splits"]["train"]["sources"][1]
        samples = read_samples(megablend.open(edited))
        given = [k for k, sample in enumerate(samples) if sample.source == 1]
        epoch = -(-len(tokens_of(OLD[1])) // 8)  # ordinals until an epoch's worth was given
        worth = [given[end - 1] for end in range(epoch, len(given) + 1, epoch)]
        assert len(source["epoch_ends"]) == len(worth)

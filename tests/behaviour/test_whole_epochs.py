"""Epochs that files which are gone have made shorter, just where the next stage begins: they are read to the end that they have.

Ledgers of before, in which such an epoch ends within another one, keep their samples. Expected tokens are listed by hand.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import PlanError
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import load_ledger, parse_ledger, save_ledger
from megablend.run.ledger_format import chain_digests, ledger_record
from megablend.run.run_files import list_files
from tests.cases import each_pair
from tests.formats.writers import KINDS
from tests.runs import make_config, read_samples

pytestmark = pytest.mark.long
PARQUET = KINDS["parquet"]
FIRST = [*range(1, 13)]
GONE = [*range(13, 25)]
LAST = [*range(25, 41)]
ADDED = [*range(41, 61)]
OTHER = 1000
"""Tokens of the other source are above."""
STAGES: list[dict[str, Any]] = [
    {"samples": 8},
    {"samples": 16, "new_data": True, "sources": {"s1": {"weight": 0}}},
    {"samples": 76, "sources": {"s1": {"weight": 1}}},
]


def write_file(folder: Path, source: int, name: str, tokens: list[int]) -> Path:
    here = folder / f"source{source}"
    here.mkdir(exist_ok=True)
    path = here / f"{name}.parquet"
    PARQUET.write(path, [tokens[i : i + 4] for i in range(0, len(tokens), 4)])
    return path


def make_run(
    folder: Path, last: dict[str, Any], *, gone: str = "m1", gone_later: str = "", first: int = 8
) -> dict[str, Any]:
    """A built run of three stages: the second source has given two tokens for each of `first` samples when one of its files is
    gone, and nothing more when the last stage begins, and perhaps another one is gone."""
    files = [
        (0, "m0", [OTHER + i for i in range(600)]),
        (1, "m0", FIRST),
        (1, "m1", GONE),
        (1, "m2", LAST),
    ]
    for source, name, tokens in files:
        write_file(folder, source, name, tokens)
    named = [
        {
            "name": f"s{source}",
            "path": f"{folder}/source{source}/*.parquet",
            "column": PARQUET.column,
            "weight": 1,
        }
        for source in range(2)
    ]
    settings = {"sequence_length": 4, "lanes": 1, "shuffle_window": 1, "order": "sequential"}
    config = make_config(folder, named, **settings, add_extra_token_to_sequence=False)
    stages = [each | {"samples": each["samples"] + first - 8} for each in STAGES]
    config["stages"] = stages[:1]
    megablend.build(config)
    file = folder / "source1" / f"{gone}.parquet"
    file.rename(folder / "gone")
    config["stages"] = stages[:2]
    megablend.build(config)
    write_file(folder, 1, "m3", ADDED)
    config["stages"] = [*stages[:2], stages[2] | last]
    if gone_later:
        later = folder / "source1" / f"{gone_later}.parquet"
        later.unlink()
    megablend.build(config)
    (folder / "gone").rename(file)  # samples of the first stage read it
    return config


def read_source(dataset: megablend.Dataset) -> list[int]:
    """The tokens of the second source."""
    read = defaultdict[int, list[int]](list)
    for sample in sorted(read_samples(dataset), key=lambda sample: sample.ordinal):
        read[sample.source] += sample.tokens.tolist()
    return read[1]


def check_epochs(tokens: list[int], parts: list[list[int]]) -> None:
    """The tokens are these parts, one after another, each in some order; of the last one perhaps not all."""
    for part in parts:
        given = tokens[: len(part)]
        tokens = tokens[len(part) :]
        assert set(given) <= set(part)
        assert len(set(given)) == len(given)
        assert not tokens or len(given) == len(part)
    assert not tokens


def make_old(config: dict[str, Any]) -> Ledger:
    """Write the run's ledger as releases before did."""
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    old = Ledger(
        run=ledger.run,
        stages=tuple(dataclasses.replace(each, whole_epochs=False) for each in ledger.stages),
    )
    save_ledger(config["cache"], old, replaces=ledger)
    return old


NEW_DATA = {"new_data": True}
SHUFFLED = {"order": "block"}
GROWN = [*FIRST, *LAST, *ADDED]


@pytest.mark.parametrize(("last", "epoch"), [(NEW_DATA, GROWN), (SHUFFLED, [*FIRST, *LAST])])
def test_what_is_left_of_an_epoch_is_read_before_the_next_one(
    tmp_path: Path, last: dict[str, Any], epoch: list[int]
) -> None:
    config = make_run(tmp_path, last)
    dataset = megablend.open(config)
    tokens = read_source(dataset)
    assert len(tokens) == 4 * (4 + 30)
    assert tokens[:32] == [*range(1, 17), *LAST]
    check_epochs(tokens[32:], [epoch] * 4)
    assert read_source(megablend.open(cache=config["cache"], run="default")) == tokens
    state = json.loads(json.dumps(dataset.state_dict(40)))
    assert state["stages"][2][2:] == [None, None, True]
    assert read_source(megablend.open(config, state=state)) == tokens
    assert megablend.build(config).ledger == dataset.run.ledger
    described = megablend.describe(config)
    assert described.to_dict()["splits"]["train"]["sources"][1]["withdrawn_tokens"] == len(GONE) - 4
    ends = next(k for k, sample in enumerate(read_samples(dataset)) if LAST[-1] in sample.tokens)
    assert described.to_dict()["splits"]["train"]["sources"][1]["epoch_ends"][0] == ends
    assert not [line for line in described.to_dict()["warnings"] if "are not read" in line]


def test_an_epoch_of_which_only_files_that_are_gone_were_read(tmp_path: Path) -> None:
    config = make_run(tmp_path, NEW_DATA, gone="m0", first=24)
    dataset = megablend.open(config)
    tokens = read_source(dataset)
    assert tokens[:76] == [*range(1, 41), *range(1, 9), *GONE, *LAST]
    check_epochs(tokens[76:], [[*GONE, *LAST, *ADDED]] * 2)
    samples = read_samples(dataset)
    ends = [k for k, sample in enumerate(samples) if LAST[-1] in sample.tokens]
    assert (
        megablend.describe(config).to_dict()["splits"]["train"]["sources"][1]["epoch_ends"][:2]
        == ends[:2]
    )


def test_a_second_file_is_gone_before_anything_of_the_first_one_s_rest_was_read(
    tmp_path: Path,
) -> None:
    config = make_run(tmp_path, NEW_DATA, gone="m0", gone_later="m1", first=24)
    write_file(tmp_path, 1, "m1", GONE)  # samples of the first stage read it
    dataset = megablend.open(config)
    assert [stage.whole_epochs for stage in dataset.run.ledger.stages] == [False, False, True]
    tokens = read_source(dataset)
    assert tokens[:64] == [*range(1, 41), *range(1, 9), *LAST]
    check_epochs(tokens[64:], [[*LAST, *ADDED]] * 3)
    described = megablend.describe(config).to_dict()["splits"]["train"]["sources"][1]
    assert described["withdrawn_tokens"] == len(FIRST) - 8 + len(GONE)


@pytest.mark.parametrize("num_tokens", range(36, 64, 5))
def test_samples_of_a_source_that_is_gone_stay_as_they_were(
    num_tokens: int, tmp_path: Path
) -> None:
    """Its lanes have left samples before others that were read, across an end of an epoch, where the order changes."""
    for source, tokens in ((0, range(OTHER, OTHER + 900)), (1, range(1, num_tokens + 1))):
        write_file(tmp_path, source, "m0", [*tokens])
    sources = [
        {
            "name": f"s{source}",
            "path": f"{tmp_path}/source{source}/*.parquet",
            "column": PARQUET.column,
            "weight": 1,
        }
        for source in range(2)
    ]
    settings = {"sequence_length": 4, "lanes": 4, "shuffle_window": 4, "order": "sequential"}
    config = make_config(tmp_path, sources, **settings, add_extra_token_to_sequence=False)
    config["stages"] = [{"samples": 8}, {"samples": 64, "order": "block"}]
    megablend.build(config)
    before = [sample.tokens.tolist() for sample in read_samples(megablend.open(config))]
    config["stages"].append(
        {"samples": 90, "new_data": True, "withdraw": ["s1"], "sequence_length": 2}
    )
    file = tmp_path / "source1" / "m0.parquet"
    file.rename(tmp_path / "gone")
    megablend.build_index(config)
    at = megablend.amend(config, at=20).at
    (tmp_path / "gone").rename(file)
    after = [sample.tokens.tolist() for sample in read_samples(megablend.open(config))]
    assert after[:at] == before[:at]


@pytest.mark.parametrize("last", [NEW_DATA, SHUFFLED])
def test_a_ledger_of_before_keeps_its_samples_and_says_what_they_lack(
    tmp_path: Path, last: dict[str, Any]
) -> None:
    config = make_run(tmp_path, last)
    old = make_old(config)
    dataset = megablend.open(config)
    assert dataset.run.ledger == old
    tokens = read_source(dataset)
    assert tokens[:32] == [*range(1, 17), *LAST]
    # The stage before reads the epoch that it would have begun, up to there
    assert tokens[32:40] == FIRST[:8]
    check_epochs(tokens[40:], [GROWN if last == NEW_DATA else [*FIRST, *LAST]] * 4)
    says = (
        "source 's1': the last 20 tokens of an epoch are not read, since stage 2 begins within it"
    )
    for warnings in (
        megablend.build(config).warnings,
        megablend.describe(config).to_dict()["warnings"],
        megablend.check(config).warnings,
    ):
        assert [says in line for line in warnings].count(True) == 1
    assert megablend.build(config).ledger == old
    described = megablend.describe(config).to_dict()["splits"]["train"]["sources"][1]
    assert described["withdrawn_tokens"] == len(GONE) - 4
    remedy = next(line for line in megablend.build(config).warnings if says in line)
    assert remedy.endswith(
        "to read them, run `megablend amend CONFIG --at 16` before training reaches that sample"
    )
    megablend.amend(config, at=16)
    amended = read_source(megablend.open(config))
    assert amended[:32] == tokens[:32]
    check_epochs(
        amended[32:], [[*FIRST, *GONE, *LAST, *ADDED] if last == NEW_DATA else [*FIRST, *LAST]] * 4
    )
    assert not [line for line in megablend.build(config).warnings if "are not read" in line]


def test_a_ledger_says_that_epochs_are_whole(tmp_path: Path) -> None:
    """In a version of its own, covered by its digest; longer runs keep it."""
    config = make_run(tmp_path, {})
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    # It continues in the same files
    assert [stage.whole_epochs for stage in ledger.stages] == [False, False, False]
    assert ledger_record(ledger.run, ledger.stages)["version"] == 3
    (tmp_path / "another").mkdir()
    config = make_run(tmp_path / "another", SHUFFLED)
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    record = ledger_record(ledger.run, ledger.stages)
    assert [stage.whole_epochs for stage in ledger.stages] == [False, False, True]
    assert record["version"] == 5
    assert parse_ledger(record) == ledger
    assert parse_ledger(record).digests == ledger.digests
    stages = [*ledger.stages[:2], dataclasses.replace(ledger.stages[2], whole_epochs=False)]
    assert chain_digests(stages)[2] != ledger.digest
    for damaged in (False, None, 1):
        stage = record["stages"][2] | {"whole_epochs": damaged}
        with pytest.raises(ValueError, match="does not match its own digest"):
            parse_ledger(record | {"stages": [*record["stages"][:2], stage]})
    longer = config | {"stages": [*config["stages"][:2], config["stages"][2] | {"samples": 90}]}
    assert [stage.whole_epochs for stage in megablend.build(longer).ledger.stages] == [
        False,
        False,
        True,
        False,
    ]
    with pytest.raises(PlanError, match="has already started"):
        megablend.open(longer | {"lanes": 2})


def test_with_the_extra_token_nothing_was_wrong(tmp_path: Path) -> None:
    """A sample's extra token is one of what is left."""
    config = make_run(tmp_path, SHUFFLED) | {
        "cache": str(tmp_path / "extra"),
        "add_extra_token_to_sequence": True,
    }
    (tmp_path / "source1" / "m3.parquet").unlink()
    megablend.build(config | {"stages": STAGES[:1]})
    (tmp_path / "source1" / "m1.parquet").rename(tmp_path / "gone")
    megablend.build(config | {"stages": STAGES[:2]})
    ledger = megablend.build(config).ledger
    assert not any(stage.whole_epochs for stage in ledger.stages)


def lose_file(
    folder: Path, at: int, *, is_added: bool, extra: bool, length: int = 4
) -> tuple[dict[str, Any], Any]:
    """An amended run whose second source loses a file of tokens GONE with the last stage; it had the file from the start, or
    got it with a stage before, within an epoch without it. Returns: its config, and what the amendment said."""
    write_file(folder, 0, "m0", [OTHER + i for i in range(600)])
    write_file(folder, 1, "m0", [*FIRST, *LAST])
    named = [
        {
            "name": f"s{source}",
            "path": f"{folder}/source{source}/*.parquet",
            "column": PARQUET.column,
            "weight": 1,
        }
        for source in range(2)
    ]
    settings = {"sequence_length": 4, "lanes": 2, "shuffle_window": 2, "order": "document"}
    config = make_config(folder, named, **settings, add_extra_token_to_sequence=extra)
    stages: list[dict[str, Any]] = [{"samples": 200}, {"samples": 260, "new_data": True}]
    if is_added:
        stages.insert(0, {"samples": 4})
        stages[1]["new_data"] = True
        megablend.build(config | {"stages": stages[:1]})
    gone = write_file(folder, 1, "m1", GONE)
    megablend.build(config | {"stages": stages[:-1]})
    gone.rename(folder / "gone")
    if length != 4:
        stages[-1]["sequence_length"] = length
    config["stages"] = stages
    megablend.build_index(config)
    said = megablend.amend(config, at=at)
    (folder / "gone").rename(gone)
    return config, said


def find_gone(dataset: megablend.Dataset, *, labels: int = 0) -> list[int]:
    """The samples that have tokens of the file that is gone, their last `labels` apart."""
    return [
        k
        for k, sample in enumerate(read_samples(dataset))
        if not set(GONE).isdisjoint(sample.tokens.tolist()[: len(sample.tokens) - labels])
    ]


@pytest.mark.parametrize(
    ("at", "is_added", "extra"), each_pair([8, 12, 16, 28], [True, False], [True, False])
)
def test_files_that_are_gone_are_not_read_for_another_epoch(
    tmp_path: Path, at: int, is_added: bool, extra: bool
) -> None:
    """Whether or not what lanes have begun ends with an epoch, or with its extra token in the next one."""
    config, said = lose_file(tmp_path, at, is_added=is_added, extra=extra)
    dataset = megablend.open(config)
    after = said.at + said.drain
    assert [k for k in find_gone(dataset, labels=dataset.run.extra_token) if k >= after] == []
    (stop,) = [each.stop for each in list_files(dataset.run) if each.stop is not None]
    assert stop == max([said.at, *(k + 1 for k in find_gone(dataset))])
    samples = [each for each in read_samples(dataset) if each.source == 1]
    read = [t for each in samples for t in each.tokens.tolist()[:4] if t in {*FIRST, *LAST}]
    counts = [read.count(token) for token in (*FIRST, *LAST)]
    assert max(counts) - min(counts) <= 2  # epochs of what is left follow, of each token once
    (tmp_path / "source1" / "m1.parquet").unlink()
    assert not megablend.check(config).problems
    assert [each.tokens.shape for each in read_samples(dataset, range(after, 260))]
    assert megablend.build(config).ledger == dataset.run.ledger


def test_a_drain_begins_nothing_of_files_that_are_gone(tmp_path: Path) -> None:
    """The epoch that it would begin is of another snapshot than the one that the source is in."""
    config, said = lose_file(tmp_path, 8, is_added=True, extra=True, length=8)
    dataset = megablend.open(config)
    assert find_gone(dataset, labels=dataset.run.extra_token) == []
    assert (said.at + said.drain) % 2 == 0


def test_a_ledger_of_before_says_how_long_it_reads_files_that_are_gone(tmp_path: Path) -> None:
    config, said = lose_file(tmp_path, 8, is_added=True, extra=True)
    old = make_old(config)
    dataset = megablend.open(config)
    assert dataset.run.ledger == old
    assert max(find_gone(dataset, labels=dataset.run.extra_token)) > said.at + said.drain
    says = "source 's1': files that stage 2 no longer has are still read after sample"
    for warnings in (
        megablend.build(config).warnings,
        megablend.describe(config).to_dict()["warnings"],
        megablend.check(config).warnings,
    ):
        assert [says in line for line in warnings].count(True) == 1
    (tmp_path / "source1" / "m1.parquet").unlink()
    (problem,) = megablend.check(config).older_problems
    assert problem.endswith("only samples before 260 need this file")
    remedy = next(line for line in megablend.check(config).warnings if says in line)
    assert remedy.endswith(
        f"`megablend amend CONFIG --at {said.at}` before training reaches that sample"
    )
    megablend.build_index(config)  # the build above had the file again
    amended = megablend.amend(config, at=said.at)
    dataset = megablend.open(config)
    assert [
        k
        for k in find_gone(dataset, labels=dataset.run.extra_token)
        if k >= amended.at + amended.drain
    ] == []
    assert not [line for line in megablend.check(config).warnings if says in line]

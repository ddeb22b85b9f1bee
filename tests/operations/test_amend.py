"""Amending a run: jobs go on through it, states say where they stand, and no token is lost or repeated."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

import megablend
from megablend.caches.base import RUNS, Record
from megablend.caches.local import LocalCacheStore
from megablend.cli.main import cli
from megablend.run.ledger_file import load_ledger
from tests.behaviour.test_stages import stream
from tests.runs import make_config, read_samples, write_blend

FIRST: dict[str, Any] = {"samples": 640}
NEXT: dict[str, Any] = {"samples": 640, "sources": {"s0": {"weight": 1}, "s2": {"weight": 2}}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_blend(tmp_path_factory.mktemp("amend"), 3, 1, 0)


@pytest.fixture
def config(tmp_path: Path, data: list[dict[str, Any]]) -> dict[str, Any]:
    """A run of one stage, and the index that it reads."""
    config = make_config(tmp_path, data, stages=[FIRST])
    megablend.build(config)
    return config


def read(dataset: megablend.Dataset) -> list[list[int]]:
    return [each.tokens[:-1].tolist() for each in read_samples(dataset)]


def test_a_job_goes_through_an_amendment(config: dict[str, Any]) -> None:
    """The blend is changed while a job runs; it is stopped, and resumed on another number of ranks."""
    before = megablend.open(config)
    promised = read(before)
    loader = megablend.Loader(before, micro_batch_size=8)
    seen = list[list[int]]()
    batches = iter(loader)
    for _ in range(5):
        seen += next(batches)["tokens"].tolist()
    state = json.loads(json.dumps(loader.state_dict()))
    edited = config | {"stages": [FIRST, NEXT]}
    found = megablend.amend(edited, state=state, after=5)
    assert (found.requested, found.at, found.drain, found.committed) == (45, 48, 0, True)
    seen += next(batches)["tokens"].tolist()  # the job knows nothing of it
    assert loader.consumed_samples == 48
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    resumed = megablend.open(edited, state=state)
    ranks = [
        megablend.Loader(resumed, micro_batch_size=4, data_parallel_rank=rank, data_parallel_size=2)
        for rank in (0, 1)
    ]
    for pair in zip(*ranks, strict=True):
        seen += [row for batch in pair for row in batch["tokens"].tolist()]
    assert seen[:48] == promised[:48]
    assert seen == read(megablend.open(edited))
    sources = [each.source for each in read_samples(resumed, range(640))]
    assert Counter(sources[48:]) == {0: 148, 1: 148, 2: 296}
    # What was begun is read to its end, each token as often as any other before the next epoch
    for number in range(3):
        counts = Counter(t for k, tokens in enumerate(seen) if sources[k] == number for t in tokens)
        assert set(counts) <= set(stream(number))
        assert max(counts.values()) - min(counts[t] for t in stream(number)) <= 1


def test_no_token_is_lost_when_the_length_changes(config: dict[str, Any]) -> None:
    edited = config | {"stages": [FIRST, NEXT | {"sequence_length": 12, "samples": 600}]}
    found = megablend.amend(edited, at=100)
    assert found.at == 112
    assert 0 < found.drain <= 31 * 16
    dataset = megablend.open(edited)
    assert [(each.start, each.sequence_length) for each in dataset.run.sections] == [
        (0, 8),
        (112 + found.drain, 12),
    ]
    samples = read_samples(dataset)
    for number in range(3):
        ordinals = sorted(sample.ordinal for sample in samples if sample.source == number)
        assert ordinals == list(range(len(ordinals)))
        counts = Counter(
            t for sample in samples if sample.source == number for t in sample.tokens.tolist()[:-1]
        )
        assert max(counts.values()) - min(counts[t] for t in stream(number)) <= 1


def test_states_before_are_good_and_those_past_it_say_what_to_do(config: dict[str, Any]) -> None:
    old = megablend.open(config)
    states = {k: old.state_dict(k) for k in (0, 100, 112, 113, 200)}
    edited = config | {"stages": [FIRST, NEXT]}
    megablend.amend(edited, at=100)
    amended = megablend.open(edited)
    for k in (0, 100, 112):
        assert megablend.open(edited, state=states[k]).run.ledger == amended.run.ledger
        amended.load_state_dict(states[k])
    for k in (113, 200):
        says = rf"was amended from sample 112 on, but this state is at sample {k} .*amend CONFIG --state FILE"
        with pytest.raises(megablend.StateError, match=says):
            megablend.open(edited, state=states[k])
        with pytest.raises(megablend.StateError, match=says):
            amended.load_state_dict(states[k])
        with pytest.raises(megablend.StateError, match=says):
            megablend.open(config, state=states[k])  # not even with the config as it was
    with pytest.raises(
        megablend.PlanError, match="in stage 1, from sample 112 on, share of source 's0' was 1/4"
    ):
        megablend.open(config)
    later = megablend.amend(edited, state=states[200], after=1)
    assert (later.at, later.requested) == (208, 201)
    assert megablend.open(edited, state=states[200]).consumed_samples == 200
    says = (
        "the state is at sample 150 of a plan that was amended from sample 112 on, as run '.*' no longer is: resume from "
        "a state saved at sample 112 or earlier, or, if the run was reset, restore its ledger"
    )
    with pytest.raises(megablend.StateError, match=says):
        megablend.open(edited, state=amended.state_dict(150))
    assert megablend.open(edited, state=amended.state_dict(112)).consumed_samples == 112
    megablend.reset_run(config, amended.run.ledger.run)
    megablend.build(config)
    with pytest.raises(megablend.StateError, match=says):
        megablend.open(config, state=amended.state_dict(150))


def test_config_data_and_state_alone_rebuild_an_amended_run(
    config: dict[str, Any], tmp_path: Path
) -> None:
    edited = config | {"stages": [FIRST, NEXT, {"samples": 960, "sequence_length": 12}]}
    found = megablend.amend(edited, at=100)
    assert found.drain_settings == ({"from": 640, "drain": 196},)
    ledger = megablend.open(edited).run.ledger
    state = megablend.open(edited).state_dict(300)
    assert len(json.dumps(state)) < 1000
    elsewhere = edited | {"cache": str(tmp_path / "other")}
    megablend.build_index(elsewhere)
    rebuilt = megablend.open(elsewhere, state=state)
    assert rebuilt.run.ledger == ledger
    assert rebuilt.consumed_samples == 300
    written = [FIRST, NEXT | {"from": 112}, edited["stages"][2] | {"drain": 196}]
    assert megablend.build(elsewhere | {"stages": written}).ledger == ledger
    # As the amended config may say
    assert megablend.build(edited | {"stages": written}).ledger == ledger
    assert megablend.show(config["cache"], 400, run="default") == megablend.show(edited, 400)


def test_amended_again_and_again(config: dict[str, Any]) -> None:
    """In the middle of what an amendment left, and in a drain."""
    stages = [FIRST]
    ends = []
    longer = NEXT | {"samples": 2400}
    past = read(megablend.open(config))
    changes: list[tuple[int, dict[str, Any]]] = [
        (20, NEXT),
        (40, longer | {"lanes": 2, "shuffle_window": 3}),
        (60, longer | {"sequence_length": 12}),
        (70, longer | {"sources": {"s1": {"weight": 5}}}),
        (1300, longer | {"sequence_length": 8}),
    ]
    for at, change in changes:
        stages = [*stages, change]
        edited = config | {"stages": stages}
        found = megablend.amend(edited, at=at)
        assert found.at >= at
        dataset = megablend.open(edited)
        now = read(dataset)
        sources = [each.source for each in read_samples(dataset)]
        assert now[: found.at] == past[: found.at]
        for number in range(3):
            tokens = Counter(
                t for source, row in zip(sources, now, strict=True) if source == number for t in row
            )
            if tokens:
                assert max(tokens.values()) - min(tokens.values()) <= 1 + (min(tokens.values()) > 1)
        past = now
        ends.append(found.at)
    assert ends == sorted(ends)
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    assert ledger.ends[:5] == tuple(ends)


@pytest.mark.parametrize("extended", [False, True])
def test_a_config_without_stages(
    tmp_path: Path, data: list[dict[str, Any]], extended: bool
) -> None:
    """The form that the message prints works at once."""
    config = make_config(tmp_path, data, samples=640)
    if extended:
        megablend.build(config | {"samples": 320})
    megablend.build(config)
    ends = "{samples: 320}, {samples: 640}" if extended else "{samples: 640}"
    form = f"stages: [{ends}, {{from: 432, ...}}]"
    with pytest.raises(
        megablend.ConfigError, match=rf"has no `stages`: add `{re.escape(form)}`, replacing"
    ) as caught:
        megablend.amend(config, at=420)
    (printed,) = re.findall(r"`(stages: [^`]*)`", str(caught.value))
    edited = config | yaml.safe_load(printed.replace("...", "sources: {s1: {weight: 3}}"))
    assert megablend.amend(edited, at=420).at == 432
    assert len(megablend.open(edited)) == 640


CHANGES: list[tuple[Any, Any, str, list[tuple[Any, Any]]]] = [
    # (what is requested, with which arguments, what is said, requests and arguments that do what it says)
    (
        {"stages": [FIRST]},
        {"at": 100},
        "the config lists no stage that begins at sample 112; add one to `stages` after the stage that has this sample, with the "
        "settings to change and `from: 112`$",
        [({"stages": [FIRST, NEXT | {"from": 112}]}, {"at": 100})],
    ),
    (
        {"stages": [FIRST, NEXT]},
        {"at": 0},
        "found sample 0, expected 1 to 640",
        [({"stages": [FIRST, NEXT]}, {"at": 1})],
    ),
    (
        {"stages": [FIRST, NEXT | {"samples": 800}]},
        {"at": 641},
        "found sample 641, expected 1 to 640",
        [({"stages": [FIRST, NEXT | {"samples": 800}]}, {"at": 640})],
    ),
    (
        {"stages": [FIRST, NEXT | {"from": 100}]},
        {"at": 100},
        "begins at sample 100, expected 112: set `samples: "
        "640` in the previous stage, as it was built, and `from: 112` in the next one$",
        [
            ({"stages": [FIRST, NEXT | {"from": 112}]}, {"at": 100}),
            ({"stages": [FIRST, NEXT]}, {"at": 100}),
        ],
    ),
    (
        {"stages": [{"samples": 100}, NEXT]},
        {"at": 100},
        "begins at sample 100, expected 112: set `samples: 640`",
        [({"stages": [{"samples": 640}, NEXT | {"from": 112}]}, {"at": 100})],
    ),
    (
        {"stages": [FIRST | {"lanes": 2}, NEXT]},
        {"at": 100},
        "its order is fixed: lanes was 4 and is now 2.*during training, restore the config, add `stages: ",
        [({"stages": [FIRST, {"lanes": 2, "samples": 800}]}, {"at": 100})],
    ),
    (
        {"stages": [FIRST, NEXT | {"samples": 120, "sequence_length": 12}]},
        {"at": 100},
        "ends at sample 120, but the previous stage's settings are kept until sample [0-9]+, since .*; let the stage "
        "end later",
        [({"stages": [FIRST, NEXT | {"samples": 720, "sequence_length": 12}]}, {"at": 100})],
    ),
    (
        {"stages": [FIRST, {"samples": 800}]},
        {"at": 100},
        "amending from sample 112 on would change nothing; change a setting that affects the order",
        [({"stages": [FIRST, {"samples": 800, "shuffle_window": 8}]}, {"at": 100})],
    ),
    (
        {"stages": [FIRST, NEXT]},
        {},
        r"give exactly one of `at` \(a sample number\) and `state`",
        [({"stages": [FIRST, NEXT]}, {"at": 100})],
    ),
    (
        {"stages": [FIRST, NEXT | {"samples": 104}]},
        {"at": 100},
        r"stages\[1\]: ends at sample 104, but begins at sample 112; let it end later",
        [({"stages": [FIRST, NEXT]}, {"at": 100})],
    ),
    ({"run": "other", "stages": [FIRST, NEXT]}, {"at": 100}, "contains no run 'other'", []),
]


@pytest.mark.parametrize(
    ("change", "arguments", "says", "remedies"), CHANGES, ids=[each[2][:40] for each in CHANGES]
)
def test_what_cannot_be_amended(
    config: dict[str, Any], change: Any, arguments: Any, says: str, remedies: list[tuple[Any, Any]]
) -> None:
    ledger = load_ledger(config["cache"], "default")
    with pytest.raises(megablend.MegablendError, match=says):
        megablend.amend(config | change, **arguments)
    assert load_ledger(config["cache"], "default") == ledger
    for number, (other, given) in enumerate(remedies, 1):
        found = megablend.amend(config | other, **given, dry_run=number < len(remedies))
        assert found.at >= given["at"]


def test_masks_need_no_amendment(config: dict[str, Any]) -> None:
    """The error of `amend` says how to change only masks, and that is enough."""
    edited = config | {"stages": [FIRST, FIRST | {"from": 112, "create_attention_mask": True}]}
    with pytest.raises(megablend.PlanError, match="masks need no amendment, only `from: 112`"):
        megablend.amend(edited, at=100)
    dataset = megablend.open(edited)
    assert [k for k in (0, 111, 112, 639) if "attention_mask" in dataset[k]] == [112, 639]


def test_before_the_first_sample_a_run_is_reset(config: dict[str, Any], tmp_path: Path) -> None:
    edited = config | {"stages": [NEXT]}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(edited))
    with pytest.raises(
        megablend.ConfigError,
        match=r"to change the whole run, plan it again \(`megablend runs reset CONFIG`\)",
    ):
        megablend.amend(edited, at=0)
    done = CliRunner().invoke(cli, ["runs", "reset", str(path)])
    assert done.exit_code == 0, done.output
    assert megablend.build(edited).stages_before == 0


def test_a_dry_run_changes_nothing_and_says_what_would(config: dict[str, Any]) -> None:
    ledger = load_ledger(config["cache"], "default")
    edited = config | {"stages": [FIRST, NEXT | {"samples": 1600}]}
    found = megablend.amend(edited, at=97, dry_run=True)
    assert load_ledger(config["cache"], "default") == ledger
    assert (found.at, found.samples_before, found.samples, found.committed) == (
        112,
        640,
        1600,
        False,
    )
    assert {"what": "share of source 's0'", "before": "3/4", "after": "1/4"} in found.changes
    assert [round(each.before.share, 2) for each in found.sources] == [0.75, 0.25, 0.0]
    assert [round(each.after.share, 2) for each in found.sources] == [0.25, 0.25, 0.5]
    assert found.plan == megablend.amend(edited, at=97).plan
    with_repeat = [each.after.first_repeat for each in found.sources]
    dataset = megablend.open(edited)
    for number, sample in enumerate(with_repeat):
        seen = Counter[int]()
        again = None
        for k, each in enumerate(read_samples(dataset)):
            if each.source == number:
                seen.update(each.tokens.tolist()[:-1])
                if again is None and max(seen.values()) > 1:
                    again = k
        assert (sample is None) == (again is None)


def test_the_first_repeat_after_an_earlier_one_is_a_sample_of_its_source(
    tmp_path: Path, data: list[dict[str, Any]]
) -> None:
    """All sources have begun a second epoch before the amendment, after which s0 is not read."""
    config = make_config(tmp_path, data, stages=[{"samples": 6400}])
    megablend.build(config)
    edited = config | {"stages": [{"samples": 6400}, {"sources": {"s0": {"weight": 0}}}]}
    edited["samples"] = 6400
    found = megablend.amend(edited, at=6000)
    sources = [each.source for each in read_samples(megablend.open(edited), range(found.at, 6400))]
    assert [each.after.first_repeat for each in found.sources] == [
        None,
        found.at + sources.index(1),
        None,
    ]
    assert found.sources[0].before.first_repeat is not None


def test_skipped_samples_after_an_amendment_are_of_the_plan_before(config: dict[str, Any]) -> None:
    megablend.skip(config, 100, 140, batch_size=4)
    edited = config | {"stages": [FIRST, NEXT]}
    says = (
        "within samples 100 to 140, which run 'default' skips; amend the run at sample 140 or later"
    )
    with pytest.raises(megablend.ConfigError, match=says):
        megablend.amend(edited, at=100)
    assert megablend.amend(edited, at=140, dry_run=True).at == 144
    megablend.amend(edited, at=97 - 16)
    assert megablend.open(edited).skips.ranges == ()


def test_an_index_that_is_not_listed(config: dict[str, Any], monkeypatch: Any) -> None:
    """As by a store whose listings are late, after the run was opened by its name."""
    edited = config | {"stages": [FIRST, NEXT]}
    monkeypatch.setattr("megablend.operations.session.list_snapshots", lambda _: [])
    with pytest.raises(megablend.CacheError, match=r"cache: lists no index, .*; try again, or"):
        megablend.amend(edited, at=100)


def test_describe_names_the_reason_for_which_build_refuses(config: dict[str, Any]) -> None:
    """Not that the config alone, without the amendment, has a stage that ends where it begins."""
    edited = config | {"stages": [FIRST, NEXT]}
    megablend.amend(edited, at=100)
    changed = edited | {"stages": [FIRST | {"lanes": 2}, NEXT]}
    functions: list[Any] = [megablend.build, megablend.describe]
    for refuses in functions:
        with pytest.raises(megablend.PlanError, match="order is fixed: lanes was 4 and is now 2"):
            refuses(changed)


def test_the_command(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    state = tmp_path / "state.json"
    path.write_text(json.dumps(config | {"stages": [FIRST, NEXT]}))
    state.write_text(json.dumps(megablend.open(config).state_dict(90)))

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli, ["amend", str(path), *arguments], standalone_mode=True)
        assert result.exit_code == code, result.output
        return result.output

    assert "give either --at SAMPLE or --state FILE" in run(code=2)
    assert "--plus needs --state" in run("--at", "9", "--plus", "3", code=2)
    printed = run("--state", str(state), "--plus", "2", "--dry-run")
    assert (
        "run 'default' would continue with new settings from sample 96 on (92 rounded up" in printed
    )
    assert "share of source 's0': 3/4 -> 1/4" in printed
    assert json.loads(run("--at", "97", "--json"))["at"] == 112
    again = run("--at", "97", "--dry-run")
    assert again.startswith("run 'default' would continue unchanged from sample 112 on (")
    assert torch.tensor(megablend.open(str(path)).run.ledger.ends).tolist() == [112, 640]


def test_a_run_of_any_length_can_be_amended(tmp_path: Path, data: list[dict[str, Any]]) -> None:
    config = make_config(tmp_path, data, stages=[{"samples": 641}])  # not a multiple of the 4 lanes
    megablend.build(config)
    edited = config | {"stages": [{"samples": 641}, NEXT]}
    assert megablend.amend(edited, at=100).at == 112
    assert len(megablend.open(edited)) == 640


def test_a_run_that_is_amended_while_it_is_shown(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is read once: what is shown is of the plan before, or of the plan after."""
    edited = config | {"stages": [FIRST, NEXT]}
    before = list(megablend.show(config["cache"], 150, run=config.get("run", "default")).tokens)
    read = LocalCacheStore.read_record

    def read_and_amend(store: LocalCacheStore, kind: str, name: str) -> Record | None:
        found = read(store, kind, name)
        if kind == RUNS and not amended:
            amended.append(True)
            megablend.amend(edited, at=100)
        return found

    amended: list[bool] = []
    monkeypatch.setattr(LocalCacheStore, "read_record", read_and_amend)
    shown = list(megablend.show(config["cache"], 150, run=config.get("run", "default")).tokens)
    assert amended
    after = list(megablend.show(config["cache"], 150, run=config.get("run", "default")).tokens)
    assert after != before
    assert shown in (before, after)


def change_before_held(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Let another process change the cache just before the next command holds it."""
    hold = LocalCacheStore.hold

    def hold_after_the_change(store: LocalCacheStore, **options: Any) -> Any:
        monkeypatch.setattr(LocalCacheStore, "hold", hold)
        change()
        return hold(store, **options)

    monkeypatch.setattr(LocalCacheStore, "hold", hold_after_the_change)


def test_an_index_that_is_removed_meanwhile_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, write_blend(tmp_path, 3, 1), stages=[FIRST])
    megablend.build(config)
    more = tmp_path / "data/source0/2.parquet"
    shutil.copy(tmp_path / "data/source1/0.parquet", more)
    megablend.build_index(config)

    def read_other_files() -> None:
        more.unlink()
        shutil.copy(tmp_path / "data/source1/1.parquet", more)
        megablend.build(config | {"run": "other"})
        megablend.gc(config, older_than_days=0)

    change_before_held(monkeypatch, read_other_files)
    edited = config | {"stages": [FIRST, {"samples": 640, "new_data": True}]}
    assert megablend.amend(edited, at=320).committed
    assert megablend.verify(config).problems == ()
    assert read(megablend.open(edited))


def test_samples_that_are_skipped_meanwhile_are_not_amended(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_before_held(monkeypatch, lambda: megablend.skip(config, 100, 140, batch_size=4))
    with pytest.raises(megablend.ConfigError, match="within samples 100 to 140, which run"):
        megablend.amend(config | {"stages": [FIRST, NEXT]}, at=112)
    assert megablend.open(config).skips.ranges == ((100, 140),)

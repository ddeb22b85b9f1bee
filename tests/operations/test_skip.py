"""Skipping samples of a run: what loaders give, what states are worth, what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.base import RUNS, SKIPS, OvertakenError
from megablend.caches.local import LocalCacheStore
from megablend.errors import CacheError, ConfigError, StateError
from megablend.run.ledger_file import save_ledger
from megablend.run.run import Run
from megablend.run.skips import Skips, skips_of
from tests.cli.commands import run
from tests.inspect.test_find import make_run

REMOVE_RECORD = LocalCacheStore.remove_record


def read_samples(
    config: dict[str, Any], *, rank: int = 0, size: int = 1, micro: int = 4, **options: Any
) -> list[int]:
    """Sample numbers that a loader gives, looked up by their tokens, which no other sample has at that place."""
    dataset = megablend.open(config)
    known = {tuple(dataset[k]["tokens"].tolist()): k for k in range(len(dataset))}
    assert len(known) == len(dataset)
    loader = megablend.Loader(
        dataset, micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=size, **options
    )
    expected = len(loader)
    batches = [[known[tuple(row)] for row in batch["tokens"].tolist()] for batch in loader]
    assert len(batches) == expected
    assert loader.consumed_samples == 200
    return [k for batch in batches for k in batch]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Of one pass at most, so that no two samples hold the same tokens."""
    made, _ = make_run(tmp_path, eod=False, split=None, samples=200, sequence_length=1, lanes=4)
    return made


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_loaders_jump(config: dict[str, Any], options: dict[str, Any]) -> None:
    digest = megablend.open(config).run.ledger.digest
    length = len(megablend.open(config))
    found = megablend.skip(config, 42, 70, batch_size=8)
    # Whole steps of 8
    assert [(each["start"], each["stop"]) for each in found.to_dict()["skips"]] == [(40, 72)]
    left = [*range(40), *range(72, 200)]
    assert read_samples(config, micro=8, **options) == left
    ranks = [read_samples(config, rank=rank, size=2, **options) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == left
    dataset = megablend.open(config)
    assert (dataset.run.ledger.digest, len(dataset)) == (digest, length)
    sampler = megablend.PretrainingSampler(dataset, micro_batch_size=8)
    assert [k for ks in sampler for k in ks] == left
    assert len(megablend.PretrainingSampler(dataset, micro_batch_size=8)) == len(left) // 8
    assert megablend.describe(config).to_dict()["skips"] == found.to_dict()["skips"]
    (skipped,) = found.to_dict()["skips"]
    read = [dataset.run.sources[dataset.run.plan.locate(k)[0]].name for k in range(40, 72)]
    # Samples are of one token
    assert skipped["by_source"] == {name: read.count(name) for name in set(read)}
    assert skipped["tokens"] == 32


def test_states_are_one_sample_number(config: dict[str, Any]) -> None:
    old = {n: megablend.open(config).state_dict(n) for n in (0, 40, 48, 72, 80)}
    megablend.skip(config, 40, 72, batch_size=8)
    for consumed, first in ((0, 0), (40, 72), (72, 72), (80, 80)):
        loader = megablend.Loader(megablend.open(config, state=old[consumed]), micro_batch_size=8)
        assert loader.sampler.next_step(loader.consumed_samples)[0] == first
        next(iter(loader))
        assert loader.state_dict()["consumed_samples"] == first + 8
        assert loader.state_dict().keys() == old[0].keys()
    with pytest.raises(
        StateError,
        match="sample 48 is within samples 40 to 72, which run 'demo' skips; resume from a",
    ):
        megablend.open(config, state=old[48])
    megablend.unskip(config)
    assert megablend.open(config, state=old[48]).consumed_samples == 48
    assert megablend.list_skips(config).to_dict()["skips"] == []


def test_loops_that_count_by_themselves(config: dict[str, Any]) -> None:
    megablend.skip(config, 40, 72, batch_size=8)
    dataset = megablend.open(config)
    assert [dataset.position(n) for n in (0, 39, 40, 41, 168)] == [0, 39, 72, 73, 200]
    with pytest.raises(StateError, match=r"201; expected 0 to 200, the samples"):
        dataset.position(169)
    with pytest.raises(ConfigError, match="trained_samples"):
        dataset.position(-1)
    shown = megablend.show_step(config, 5, micro_batch_size=4, data_parallel_size=2, rank=1)
    assert [each["sample"] for each in shown.to_dict()["samples"]] == [76, 77, 78, 79]
    with pytest.raises(ConfigError, match="expected 0 to 20"):
        megablend.show_step(config, 21, micro_batch_size=8)


def test_find_knows_what_is_skipped(config: dict[str, Any]) -> None:
    megablend.skip(config, 40, 72, batch_size=8)
    (found,) = megablend.find(config, "source1/0.bin", batch_size=8).to_dict()["found"]
    for sample in found["samples"]:
        k = sample["sample"]
        assert sample["skipped"] == (40 <= k < 72)
        assert sample["step"] == (None if 40 <= k < 72 else (k if k < 40 else k - 32) // 8)
    assert len({sample["skipped"] for sample in found["samples"]}) == 2


def test_steps_that_do_not_end_there(config: dict[str, Any]) -> None:
    megablend.skip(config, 40, 72, batch_size=8)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=6)
    with pytest.raises(
        ConfigError, match=r"steps of 6 .* would reach into samples 40 to 72.*with --batch 6"
    ):
        iter(loader)  # before the first batch


def test_steps_are_compared_when_the_position_is_known(config: dict[str, Any]) -> None:
    """Opened with a state, or at `load_state_dict`: not before, since another position may fit."""
    megablend.skip(config, 40, 72, batch_size=8)
    dataset = megablend.open(config)
    says = "would reach into samples 40 to 72"
    with pytest.raises(ConfigError, match=says):
        megablend.Loader(dataset, micro_batch_size=6, consumed_samples=8)
    state = dataset.state_dict(8)
    with pytest.raises(ConfigError, match=says):
        megablend.Loader(megablend.open(config, state=state), micro_batch_size=6)
    loader = megablend.Loader(dataset, micro_batch_size=6, num_workers=1)
    with pytest.raises(ConfigError, match=says):
        loader.load_state_dict(state)
    with pytest.raises(ConfigError, match=says):
        iter(loader)  # before workers start
    assert loader._loader._iterator is None
    loader.load_state_dict(dataset.state_dict(4))
    assert len(list(loader)) == (200 - 32 - 4) // 6
    sampler = megablend.PretrainingSampler(dataset, micro_batch_size=6)
    with pytest.raises(ConfigError, match=says):
        next(iter(sampler))


def test_describe_and_check_compare_steps_before_a_job(
    config: dict[str, Any], tmp_path: Path
) -> None:
    megablend.skip(config, 40, 72, batch_size=8)
    says = "steps of 6 samples from sample 0 on would reach into samples 40 to 72"
    assert says in "".join(
        megablend.describe(config, micro_batch_size=3, data_parallel_size=2).to_dict()["warnings"]
    )
    assert says not in "".join(megablend.describe(config, micro_batch_size=8).to_dict()["warnings"])
    assert says in str(megablend.check(config, micro_batch_size=6).unfit_steps)
    state = megablend.open(config).state_dict(4)
    assert megablend.check(config, micro_batch_size=6, state=state).unfit_steps is None
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    done = run("check", path, "--micro-batch", 3, "--ranks", 2)
    assert (done.returncode, says in done.stdout) == (3, True)
    assert run("check", path, "--micro-batch", 4, "--ranks", 2).returncode == 0


def test_ranges_that_together_are_the_whole_run_are_refused(config: dict[str, Any]) -> None:
    megablend.skip(config, 0, 100, batch_size=4)
    says = r"cover, with the ranges that are skipped already, the whole run of 200 samples"
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match=says):
            megablend.skip(config, 80, 200, batch_size=4, dry_run=dry_run)
    assert [
        (each["start"], each["stop"]) for each in megablend.list_skips(config).to_dict()["skips"]
    ] == [(0, 100)]


def test_ranges_add_up_and_are_checked(config: dict[str, Any], tmp_path: Path) -> None:
    tried = megablend.skip(config, 10, 11, batch_size=2, dry_run=True)
    assert [(each["start"], each["stop"]) for each in tried.to_dict()["skips"]] == [
        (8, 12)
    ]  # 4 lanes
    assert not Path(config["cache"], "runs", "skips", "demo.json").exists()
    megablend.skip(config, 8, 16, batch_size=4)
    megablend.skip(config["cache"], 16, 20, batch_size=4, run="demo")
    found = megablend.skip(config, 190, 200, batch_size=4)
    assert [(each["start"], each["stop"]) for each in found.to_dict()["skips"]] == [
        (8, 20),
        (188, 200),
    ]
    with pytest.raises(
        ConfigError,
        match=r"multiples of 256 .lanes and samples per step., cover the whole run of 200 samples",
    ):
        megablend.skip(config, 5, 9, batch_size=256)
    with pytest.raises(
        ConfigError, match="found samples 5 to 201, expected a range within the 200 samples"
    ):
        megablend.skip(config, 5, 201, batch_size=4)
    path = Path(config["cache"], "runs", "skips", "demo.json")
    kept = path.read_bytes()
    for damage, says in (
        ('{"version": 1, "skips": [[9, 3, "x"]]}', "damaged list of skipped samples"),
        (
            '{"version": 1, "skips": [[3, 1000000000000000000000000000000, "x"]]}',
            "damaged list of skipped samples",
        ),
        ('{"version": 1, "skips": [[3, Infinity, "x"]]}', "damaged list of skipped samples"),
        ("{", "cannot read the run's skipped samples: .*"),
    ):
        path.write_text(damage)
        says = rf"demo\.json: {says}; restore it from a backup, or clear the run's skips .`megablend skip CONFIG --clear`."
        with pytest.raises(CacheError, match=says):
            megablend.open(config)
        path.write_bytes(kept)  # "restore it"
        assert megablend.open(config).skips.ranges == ((8, 20), (188, 200))
        megablend.unskip(config)  # "or clear the run's skips"
        assert megablend.open(config).skips.ranges == ()


def test_skips_belong_to_a_plan_and_move_with_the_run(config: dict[str, Any]) -> None:
    megablend.skip(config, 40, 72, batch_size=8)
    longer = config | {"samples": 240}
    megablend.build(longer)
    assert megablend.open(longer).skips.ranges == ((40, 72),)
    megablend.rename_run(config, "demo", "other")
    assert megablend.open(longer | {"run": "other"}).skips.ranges == ((40, 72),)
    assert not Path(config["cache"], "runs", "skips", "demo.json").exists()
    megablend.reset_run(config, "other")
    replanned = config | {"run": "other", "seed": 8}
    megablend.build(replanned)
    assert megablend.open(replanned).skips.ranges == ()
    megablend.remove_run(config, "other")
    assert not Path(config["cache"], "runs", "skips", "other.json").exists()


def test_a_renamed_run_keeps_its_skips_and_gets_no_others(config: dict[str, Any]) -> None:
    """Whatever an earlier run of the new name has left."""
    other = config | {"run": "other"}
    megablend.build(other)
    megablend.skip(other, 0, 16, batch_size=4)
    megablend.skip(config, 32, 48, batch_size=4)
    megablend.reset_run(config, "other")
    megablend.rename_run(config, "demo", "other")
    assert megablend.open(other).skips.ranges == ((32, 48),)
    megablend.build(config)
    megablend.skip(config, 0, 16, batch_size=4)
    megablend.reset_run(config, "demo")
    megablend.unskip(other)
    assert not Path(config["cache"], "runs", "skips", "other.json").exists()
    megablend.rename_run(config, "other", "demo")
    assert megablend.open(config).skips.ranges == ()


@pytest.mark.parametrize("change", ["extend", "reset", "rename"])
@pytest.mark.parametrize("command", ["skip", "unskip"])
def test_what_another_process_made_of_the_run_meanwhile_stays(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, change: str, command: str
) -> None:
    changes: dict[str, Callable[[], object]] = {
        "extend": lambda: megablend.build(config | {"samples": 240}),
        "reset": lambda: megablend.reset_run(config, "demo"),
        "rename": lambda: megablend.rename_run(config, "demo", "other"),
    }
    commands: dict[str, Callable[[], object]] = {
        "skip": lambda: megablend.skip(config, 0, 16, batch_size=4),
        "unskip": lambda: megablend.unskip(config),
    }
    hold = LocalCacheStore.hold
    found = []

    def hold_after_the_change(store: LocalCacheStore, **options: Any) -> Any:
        monkeypatch.setattr(LocalCacheStore, "hold", hold)
        changes[change]()
        found.append(megablend.list_runs(config))
        return hold(store, **options)

    monkeypatch.setattr(LocalCacheStore, "hold", hold_after_the_change)
    says = "another process changed run 'demo' in the meantime; run the command again$"
    with pytest.raises(OvertakenError, match=says):
        commands[command]()
    assert [megablend.list_runs(config)] == found
    assert not list(Path(config["cache"], "runs", "skips").glob("*.json"))


def test_a_run_that_is_renamed_while_it_is_opened_is_not_read_without_its_skips(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    megablend.skip(config, 0, 16, batch_size=4)

    def rename_before(run: Run) -> Skips:
        megablend.rename_run(config, "demo", "other")
        return skips_of(run)

    monkeypatch.setattr("megablend.operations.open.skips_of", rename_before)
    with pytest.raises(OvertakenError, match="another process changed run 'demo'"):
        megablend.open(config)


def test_a_removal_that_is_interrupted_leaves_no_skips_to_a_later_run(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    megablend.skip(config, 0, 16, batch_size=4)
    with monkeypatch.context() as patch:
        patch.setattr(LocalCacheStore, "remove_record", _interrupt_at_the_ledger)
        with pytest.raises(KeyboardInterrupt):
            megablend.remove_run(config, "demo")
    with pytest.raises(CacheError, match="skips"):
        megablend.open(config)
    megablend.remove_run(config, "demo")
    megablend.build(config)
    assert megablend.open(config).skips.ranges == ()


def test_a_rename_that_is_interrupted_leaves_no_skips_to_a_later_run(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is interrupted; until then, and if the run is reset, its skips remain."""
    megablend.skip(config, 0, 16, batch_size=4)

    def interrupt_at_the_skips(store: LocalCacheStore, kind: str, *names: Any) -> None:
        if kind == SKIPS:
            raise KeyboardInterrupt
        REMOVE_RECORD(store, kind, *names)

    for interrupt in (_interrupt_at_the_ledger, interrupt_at_the_skips):
        assert megablend.open(config).skips.ranges == ((0, 16),)
        with monkeypatch.context() as patch:
            patch.setattr(LocalCacheStore, "remove_record", interrupt)
            with pytest.raises(KeyboardInterrupt):
                megablend.rename_run(config, "demo", "other")
        if interrupt is _interrupt_at_the_ledger:
            megablend.reset_run(config, "demo")
            megablend.build(config)
    assert Path(config["cache"], "runs", "skips", "demo.json").exists()
    megablend.build(config)
    assert megablend.open(config).skips.ranges == ()
    for name in ("demo", "other"):
        settings = config | {"run": name}
        megablend.skip(settings, 32, 48, batch_size=4)
        megablend.reset_run(config, name)
        megablend.build(settings)
    assert megablend.open(config).skips.ranges == ((32, 48),)
    assert megablend.open(config | {"run": "other"}).skips.ranges == ((0, 16), (32, 48))


def test_a_range_that_another_process_counts_with_its_own_is_no_error(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache without locks."""

    def skip_another_before(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(LocalCacheStore, "hold", nullcontext)
        megablend.skip(config, 32, 48, batch_size=4)
        save_ledger(*args, **options)

    monkeypatch.setattr("megablend.run.skips.save_ledger", skip_another_before)
    monkeypatch.setattr(LocalCacheStore, "hold", nullcontext)
    assert [(each.start, each.stop) for each in megablend.skip(config, 0, 16, batch_size=4).skips]
    assert megablend.open(config).skips.ranges == ((0, 16), (32, 48))

    def clear_before(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(LocalCacheStore, "hold", nullcontext)
        megablend.unskip(config)
        save_ledger(*args, **options)

    monkeypatch.setattr("megablend.run.skips.save_ledger", clear_before)
    monkeypatch.setattr(LocalCacheStore, "hold", nullcontext)
    with pytest.raises(OvertakenError, match="another process changed run 'demo'"):
        megablend.skip(config, 64, 80, batch_size=4)
    assert megablend.open(config).skips.ranges == ()


def _interrupt_at_the_ledger(
    store: LocalCacheStore, kind: str, name: str, after: Any = None
) -> None:
    if kind == RUNS:
        raise KeyboardInterrupt
    REMOVE_RECORD(store, kind, name, after)

"""Plans that are stored with their ledgers: the same plan, whatever its stages are."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import megablend
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_format import chain_digests, dump_ledger
from megablend.plan.plan_file import RELEASE, is_approved, load_plan_file, save_approval, save_plan_file
from megablend.plan.schedule import make_schedule
from megablend.plan.stage import Stage
from megablend.plan.stage_requests import plan_stages
from megablend.plan.stages_plan import StagesPlan
from megablend.plan.stored_plan import StoredPlan, dump_plan, parse_plan
from tests.plan.test_amended_plan import draw_amended
from tests.plan.test_stages_plan import History, draw_history


def assert_same(a: StagesPlan, b: StagesPlan) -> None:
    """Both plans have the same samples, counts, tokens and epochs."""
    ks = np.arange(a.num_samples)
    assert b.num_samples == a.num_samples
    assert [plan is None for plan in b._plans] == [True] * len(b.stages)
    for one, other in zip(a.locate_many(ks), b.locate_many(ks), strict=True):
        np.testing.assert_array_equal(one, other)
    for n in (0, 1, a.num_samples // 2, a.num_samples):
        np.testing.assert_array_equal(a.counts(n), b.counts(n))
        np.testing.assert_array_equal(a.count_tokens(n), b.count_tokens(n))
    sources, ordinals = a.locate_many(ks)
    np.testing.assert_array_equal(b.samples_of(sources, ordinals), ks)
    for one, other in zip(a.token_ranges(sources, ordinals), b.token_ranges(sources, ordinals), strict=True):
        np.testing.assert_array_equal(one, other)
    assert a.epochs == b.epochs
    for x, y in zip(a.list_stretches(), b.list_stretches(), strict=True):
        assert (x.stage, x.start, x.stop) == (y.stage, y.start, y.stop)
        np.testing.assert_array_equal(x.read, y.read)
    for source in range(a.num_sources):
        assert a.list_tokens(source) == b.list_tokens(source)
        assert a.first_sample_from(source, 3) == b.first_sample_from(source, 3)


def draw(seed: int) -> History:
    rng = random.Random(seed)
    return draw_amended(rng, lengths=(7, 11, 7)) if seed % 2 else draw_history(rng)


@pytest.mark.parametrize("seed", range(12))
def test_a_stored_plan_is_the_same(seed: int) -> None:
    history = draw(seed)
    plan = plan_stages(history.stages, history.tokens)
    stored = dump_plan(plan)
    record = json.loads(json.dumps(stored.record))
    assert_same(plan, parse_plan(StoredPlan(record, [array.copy() for array in stored.arrays])))


def test_epochs_of_several_snapshots() -> None:
    history = draw(1)
    stages = [replace(stage, index=f"{number % 2 + 1:x}") for number, stage in enumerate(history.stages)]
    plan = plan_stages(stages, {"1": history.tokens, "2": [each + 13 for each in history.tokens]})
    assert any(len(each) > 1 for each in plan.epochs.segments)
    assert_same(plan, parse_plan(dump_plan(plan)))


def with_schedule(history: History) -> History:
    """The history with a last stage whose shares change in four steps."""
    last = history.stages[-1]
    blend, count = replace(last.blend, interleaving="lanes"), len(history.tokens)
    cycle = blend.lanes * blend.shuffle_window
    schedule = make_schedule("cosine", 4, [Fraction(1, count)] * count, samples=8 * cycle, cycle=cycle, longest=1)
    added = Stage(end=last.end + 8 * cycle, index=last.index, blend=replace(blend, schedule=schedule))
    return History([*history.stages, added], history.tokens)


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_file_is_read_back(seed: int, tmp_path: Path) -> None:
    history = with_schedule(draw(seed))
    stages = tuple(replace(stage, index="f" * 32) for stage in history.stages)
    text, plan = dump_ledger("demo", stages), plan_stages(stages, history.tokens)
    assert load_plan_file(tmp_path, text) is None
    save_plan_file(tmp_path, text, stages, plan, "data")
    file = load_plan_file(tmp_path, text)
    assert file is not None
    ledger = Ledger.from_plan_file(file)
    assert [stage.stop for stage in ledger.stages] == [stage.stop for stage in stages]
    assert all(lazy._items is None for lazy in (stage.blend.sources for stage in ledger.stages))  # type: ignore[attr-defined]
    assert ledger.digests == chain_digests(stages)
    made = file.make_plan("data")
    assert made is not None
    assert_same(plan, made)
    assert file.make_plan("other data") is None
    assert pickle.loads(pickle.dumps(ledger)) == ledger == Ledger(run="demo", stages=stages)
    assert chain_digests(ledger.stages) == ledger.digests


def test_a_plan_file_is_of_one_ledger_and_of_its_bytes(tmp_path: Path) -> None:
    history = draw(3)
    stages = tuple(replace(stage, index="f" * 32) for stage in history.stages)
    text, plan = dump_ledger("demo", stages), plan_stages(stages, history.tokens)
    save_plan_file(tmp_path, text, stages, plan, "data")
    assert load_plan_file(tmp_path, text.replace("demo", "memo")) is None
    (path,) = (tmp_path / "splits").iterdir()
    whole = path.read_bytes()
    rng = random.Random(5)
    for place in {*range(40), *(rng.randrange(len(whole)) for _ in range(200)), len(whole) - 1}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
        assert load_plan_file(tmp_path, text) is None
    for size in (0, 1, 16, 24, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert load_plan_file(tmp_path, text) is None
    save_plan_file(tmp_path, text, stages, plan, "data")
    assert path.read_bytes() == whole


def test_approvals_are_of_a_ledger_its_data_and_a_request(tmp_path: Path) -> None:
    given = '{"index": "ff"}', "data", "request"
    assert not is_approved(tmp_path, *given)
    save_approval(tmp_path, *given)
    assert is_approved(tmp_path, *given)
    for other in (
        ('{"index": "ff" }', *given[1:]),
        (given[0], "data 2", given[2]),
        (*given[:2], "other"),
        (*given[:2], None),
    ):
        assert not is_approved(tmp_path, *other)
    (path,) = (tmp_path / "splits").iterdir()
    path.write_bytes(b"")
    assert not is_approved(tmp_path, *given)


def test_the_release_is_the_one_that_is_named() -> None:
    assert megablend.__version__ == RELEASE

"""Plans that are stored beside their ledgers: the same plan, whatever its stages are, and the other splits' ledgers."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megablend.blend.plan import StagesPlan
from megablend.blend.schedule import make_schedule
from megablend.caches.find import find_store
from megablend.run.companion import Companion, load_companion, save_companion
from megablend.run.ledger import Ledger
from megablend.run.plan_stages import plan_stages
from megablend.run.stage import Blend, SourceShare, Stage
from tests.blend.test_plan import History, draw_history
from tests.run.test_amended_plan import draw_amended

REQUEST = "0" * 32


def assert_same(a: StagesPlan, b: StagesPlan) -> None:
    """Both plans have the same samples, counts, tokens and epochs."""
    ks = np.arange(a.num_samples)
    assert b.num_samples == a.num_samples
    assert not b._plans
    for one, other in zip(a.locate_many(ks), b.locate_many(ks), strict=True):
        np.testing.assert_array_equal(one, other)
    for n in (0, 1, a.num_samples // 2, a.num_samples):
        np.testing.assert_array_equal(a.counts(n), b.counts(n))
        np.testing.assert_array_equal(a.count_tokens(n), b.count_tokens(n))
    sources, ordinals = a.locate_many(ks)
    np.testing.assert_array_equal(b.find_samples(sources, ordinals), ks)
    for one, other in zip(
        a.token_ranges(sources, ordinals), b.token_ranges(sources, ordinals), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert a.epochs == b.epochs
    for x, y in zip(a.stages, b.stages, strict=True):
        assert (x.number, x.start, x.stop) == (y.number, y.start, y.stop)
        np.testing.assert_array_equal(x.read, y.read)
    for source in range(a.num_sources):
        assert a.list_tokens(source) == b.list_tokens(source)


def draw(seed: int) -> History:
    rng = random.Random(seed)
    return draw_amended(rng, lengths=(7, 11, 7)) if seed % 2 else draw_history(rng)


def make_ledger(history: History) -> Ledger:
    return Ledger(
        run="demo", stages=tuple(replace(stage, index="f" * 32) for stage in history.stages)
    )


def keep(folder: Path, ledger: Ledger, plan: StagesPlan) -> Companion | None:
    """A companion as it is read back."""
    save_companion(find_store(folder), ledger, REQUEST, Companion(starts=(0, 7), plan=plan))
    return load_companion(find_store(folder), ledger, REQUEST)


@pytest.mark.parametrize("seed", range(12))
def test_a_stored_plan_is_the_same(seed: int, tmp_path: Path) -> None:
    history = draw(seed)
    plan = plan_stages(history.stages, history.tokens)
    found = keep(tmp_path, make_ledger(history), plan)
    assert found is not None
    assert found.starts == (0, 7)
    again = pickle.loads(pickle.dumps(found))
    assert_same(plan, found.plan)
    assert_same(plan, again.plan)


def test_epochs_of_several_snapshots(tmp_path: Path) -> None:
    history = draw(1)
    stages = [
        replace(stage, index=f"{number % 2 + 1:x}") for number, stage in enumerate(history.stages)
    ]
    plan = plan_stages(stages, {"1": history.tokens, "2": [each + 13 for each in history.tokens]})
    assert any(len(each) > 1 for each in plan.epochs.segments)
    found = keep(tmp_path, Ledger(run="demo", stages=tuple(stages)), plan)
    assert found is not None
    assert_same(plan, found.plan)


def test_a_schedule(tmp_path: Path) -> None:
    history = draw(2)
    last = history.stages[-1]
    blend = replace(last.blend, interleaving="lanes")
    count = len(history.tokens)
    cycle = blend.lanes * blend.shuffle_window
    schedule = make_schedule(
        "cosine", 4, [Fraction(1, count)] * count, samples=8 * cycle, cycle=cycle, longest=1
    )
    added = Stage(
        end=last.end + 8 * cycle, index=last.index, blend=replace(blend, schedule=schedule)
    )
    history = History([*history.stages, added], history.tokens)
    plan = plan_stages(history.stages, history.tokens)
    found = keep(tmp_path, make_ledger(history), plan)
    assert found is not None
    assert_same(plan, found.plan)


def test_ledgers_of_other_splits(tmp_path: Path) -> None:
    history = draw(0)
    ledger = make_ledger(history)
    blended = replace(history.stages[0].blend, split="valid of 1/2,1/2,0")
    sources = (SourceShare(name="a", append_eod=None), SourceShare(name="b", append_eod=3))
    unblended = Blend(
        split="test of 1,0,0", sequence_length=5, add_extra_token_to_sequence=False, sources=sources
    )
    others = {
        split: Ledger(run="demo", stages=(Stage(end=40, index="f" * 32, blend=blend),))
        for split, blend in (("valid", blended), ("test", unblended))
    }
    plan = plan_stages(history.stages, history.tokens)
    save_companion(
        find_store(tmp_path), ledger, REQUEST, Companion(starts=(0,), others=others, plan=plan)
    )
    found = load_companion(find_store(tmp_path), ledger, REQUEST)
    assert found is not None
    assert found.others == others


def test_it_is_of_one_ledger_one_request_and_of_its_bytes(tmp_path: Path) -> None:
    history = draw(3)
    ledger = make_ledger(history)
    plan = plan_stages(history.stages, history.tokens)
    assert load_companion(find_store(tmp_path), ledger, REQUEST) is None
    assert keep(tmp_path, ledger, plan) is not None
    assert (
        load_companion(find_store(tmp_path), replace(ledger, run="renamed", request="1"), REQUEST)
        is not None
    )
    assert load_companion(find_store(tmp_path), ledger, "1" * 32) is None
    *before, last = ledger.stages
    assert (
        load_companion(
            find_store(tmp_path),
            replace(ledger, stages=(*before, replace(last, end=last.end + 1))),
            REQUEST,
        )
        is None
    )
    (path,) = (tmp_path / "splits").iterdir()
    whole = path.read_bytes()
    rng = random.Random(5)
    for place in {*range(40), *(rng.randrange(len(whole)) for _ in range(200)), len(whole) - 1}:
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]
        )
        assert load_companion(find_store(tmp_path), ledger, REQUEST) is None
    for size in (0, 1, 16, 24, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert load_companion(find_store(tmp_path), ledger, REQUEST) is None
    assert keep(tmp_path, ledger, plan) is not None
    assert path.read_bytes() == whole

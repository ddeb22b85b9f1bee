"""Random histories of runs: blends change inside periods, files come and go, amendments are killed, jobs go on with other ranks.

The twin knows which tokens each snapshot of the files has, and from which sample on each stage decides; not how the plan is made.
It takes each source's samples in their order, and divides their tokens into epochs.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import megablend
from megablend.plan.ledger_file import load_ledger
from tests.formats.writers import KINDS
from tests.runs import documents, make_config

Files = Mapping[int, tuple[str, ...]]
"""The files of each source."""


class Data:
    """Files of parquet whose tokens are all different, and snapshots of them."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.tokens = dict[str, set[int]]()
        self.snapshots: list[Files] = [{s: (self.write(s), self.write(s)) for s in range(2)}]

    def write(self, source: int) -> str:
        """A new file, which may come before others by its name."""
        number, name = len(self.tokens), f"{self.rng.randrange(10**6)}.parquet"
        listed = [each and [number * 4000 + t for t in each] for each in documents(0, 30, 40, number)]
        here = self.folder / f"source{source}"
        here.mkdir(exist_ok=True)
        KINDS["parquet"].write(here / name, listed)
        self.tokens[str(here / name)] = {token for each in listed for token in each or []}
        return str(here / name)

    def change(self) -> None:
        """Another snapshot: a file or a source is new, and perhaps a file is gone."""
        files = dict(self.snapshots[-1])
        grown, other = self.rng.randrange(len(files) + 1), self.rng.randrange(2)
        files[grown] = (*files.get(grown, ()), self.write(grown))
        if self.rng.random() < 0.5 and len(files[other]) > 1:
            files[other] = files[other][1:]
        self.snapshots.append(files)

    def of(self, snapshot: int, source: int) -> set[int]:
        """The tokens of a source in a snapshot."""
        return {token for path in self.snapshots[snapshot].get(source, ()) for token in self.tokens[path]}


def config_of(folder: Path, data: Data, stages: Sequence[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    sources = [
        {"name": f"s{s}", "path": list(paths), "column": KINDS["parquet"].column, "weight": int(s < 2)}
        for s, paths in data.snapshots[-1].items()
    ]
    return make_config(folder, sources, stages=list(stages), **settings)


def train(
    config: dict[str, Any], state: dict[str, Any] | None, steps: int, ranks: int
) -> tuple[list[Any], dict[str, Any]]:
    """The samples of some steps of 4, and the state after them as JSON has it."""
    dataset = megablend.open(config, state=state)
    loaders = [
        megablend.Loader(dataset, micro_batch_size=4 // ranks, data_parallel_rank=rank, data_parallel_size=ranks)
        for rank in range(ranks)
    ]
    seen = []
    for batches in itertools.islice(zip(*loaders, strict=True), steps):
        seen += [row for batch in batches for row in batch["tokens"].tolist()]
    found = json.loads(json.dumps(loaders[0].state_dict()))
    for loader in loaders:
        loader.close()
    return seen, found


def amend_with_kills(config: dict[str, Any], at: int, delays: Sequence[float]) -> int:
    """Amend a run in processes that are killed, then in this one. Returns: the first sample that the new stage decides."""
    before = load_ledger(config["cache"], "default")
    assert before is not None
    for delay in delays:
        child = os.fork()
        if child == 0:
            megablend.amend(config, at=at)
            os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after = load_ledger(config["cache"], "default")
        if after != before:
            assert after is not None
            assert len(after.stages) == len(config["stages"])  # it is whole
            break
    else:
        megablend.amend(config, at=at)
    stretches = megablend.open(config).run.plan.list_stretches()
    return next(each.start for each in stretches if each.stage == len(config["stages"]) - 1)


class Change(NamedTuple):
    """A stage with other data, as a source meets it."""

    snapshot: int
    begun: int
    """Position to which something was read before it."""
    period: int
    """Tokens of the source's period that the stage may have cut, all of which count as begun."""


def divide_epochs(data: Data, source: int, tokens: Sequence[int | None], changes: Sequence[Change]) -> bool:
    """Whether the tokens of a source are epochs of its snapshots, one after another, of each token once.

    Args:
        tokens: of the samples in the source's order; None for those that an amendment left for after the run's end.
    """

    def fits(place: int, snapshot: int) -> bool:
        if place >= len(tokens):
            return True
        later = [each for each in changes if each.snapshot > snapshot and each.begun <= place]
        must = max((each.snapshot for each in later if each.begun + each.period + 1 < place), default=snapshot)
        for now in sorted({snapshot, *(each.snapshot for each in later)}, reverse=True):
            expected = data.of(now, source)
            for each in changes:
                if each.snapshot > now and place < each.begun <= place + len(expected):
                    early = {token for token in tokens[place : each.begun] if token is not None}
                    expected = early & expected | expected & data.of(each.snapshot, source)
            epoch = [token for token in tokens[place : place + len(expected)] if token is not None]
            is_epoch = len(set(epoch)) == len(epoch) and set(epoch) <= expected
            if now >= must and is_epoch and fits(place + max(1, len(expected)), now):
                return True
        return False

    return fits(0, 0)


def run_history(folder: Path, seed: int, *, num_stages: int) -> None:
    rng = random.Random(seed)
    data = Data(folder, rng)
    settings = {
        "order": rng.choice(["block", "document", "sequential"]),
        "shuffle_window": rng.choice([2, 4]),
        "seed": seed,
    }
    stages: list[dict[str, Any]] = [{"samples": 352}]
    config = config_of(folder, data, stages, settings)
    megablend.build(config)
    seen, state = list[Any](), None
    firsts = list[tuple[int, int]]()  # snapshot, and first sample, of each stage with other data
    for number in range(1, num_stages):
        samples, state = train(config, state, rng.randrange(20, 60), rng.choice([1, 2, 4]))
        seen += samples
        stage: dict[str, Any] = {"samples": stages[-1]["samples"] + 32 * rng.randrange(4, 9)}
        if rng.random() < 0.8:
            stage["new_data"] = True
            data.change()
        stage["sources"] = {f"s{s}": {"weight": rng.randrange(1, 4)} for s in data.snapshots[-1] if s > 1}
        stage["sources"] |= {"s0": {"weight": 1 + number % 3}, "s1": {"weight": 3}}  # other shares than before
        if rng.random() < 0.3:
            stage["lanes"] = rng.choice([4, 8])
        stages.append(stage)
        config = config_of(folder, data, stages, settings)
        if "new_data" in stage:
            megablend.build_index(config)
        first = amend_with_kills(config, len(seen), [rng.random() * 0.3 for _ in range(number % 2)])
        if "new_data" in stage:
            firsts.append((len(data.snapshots) - 1, first))
    dataset = megablend.open(config, state=state)
    samples, _ = train(config, state, 10**6, rng.choice([1, 2, 4]))
    assert [dataset[k]["tokens"].tolist() for k in range(len(dataset))] == seen + samples
    places = [dataset.sample(k) for k in range(len(dataset))]
    for source in range(len(dataset.sources)):
        listed = {each.ordinal: each.tokens.tolist()[:-1] for each in places if each.source == source}
        length = 1 + max(listed, default=-1)
        tokens = [token for i in range(length) for token in listed.get(i, [None] * 8)]
        changes = []
        for to, first in firsts:
            begun = [each.ordinal for each in places[:first] if each.source == source]
            blend = dataset.run.ledger.stage_at(first - 1).blend
            cycles = max((each.cycles or 1 for each in blend.sources[source : source + 1]), default=0)
            changes.append(
                Change(to, 8 * (max(begun, default=-1) + 1), 8 * cycles * blend.lanes * blend.shuffle_window)
            )
        assert len(listed) == sum(each.source == source for each in places)  # none repeated
        assert divide_epochs(data, source, tokens, changes)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_each_epoch_has_the_tokens_of_its_snapshot_once(tmp_path: Path, seed: int) -> None:
    run_history(tmp_path, seed, num_stages=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 60))
def test_each_epoch_has_the_tokens_of_its_snapshot_once_in_long_histories(tmp_path: Path, seed: int) -> None:
    run_history(tmp_path, seed, num_stages=6)

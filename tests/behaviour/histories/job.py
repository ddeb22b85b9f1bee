"""A run whose config is edited again and again, and the job that trains on it: what it was given, sample by sample."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import signal
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import megablend
from megablend.config.stages import MASKS
from megablend.errors import ConfigError, MegablendError, PlanError
from megablend.run.ledger_file import load_ledger
from tests.behaviour.histories.files import Files
from tests.behaviour.histories.twin import EOD
from tests.formats.writers import KINDS
from tests.runs import list_fields, make_config, read_fields


class Requested(NamedTuple):
    """What the config requests of a stage."""

    snapshot: int
    weights: tuple[Fraction, ...]


def draw_masks(rng: random.Random) -> dict[str, bool]:
    """What samples contain besides their tokens."""
    masks = {key: rng.random() < 0.4 for key in MASKS}
    return masks | {
        "create_attention_mask": masks["create_attention_mask"]
        and not masks["inter_document_masking"]
    }


class Job:
    """A run and its training.

    Attributes:
        stages: as the config lists them.
        trained: all fields by sample number, of what was trained on and not trained again.
        skips: ranges of samples that loaders leave out.
        skipped: by sample number, what was to be skipped in this plan or others.
    """

    def __init__(self, folder: Path, rng: random.Random, *, kills: bool) -> None:
        self.folder = folder
        self.rng = rng
        self.kills = kills
        eod = rng.choice([None, None, EOD])
        split = rng.choice([None, None, "70,20,10"])
        shares = [Fraction(int(each), 100) for each in (split or "100,0,0").split(",")]
        self.files = Files(folder / "data", rng, shares, appends_eod=eod is not None)
        self.settings: dict[str, Any] = {
            "order": rng.choice(["block", "document", "sequential"]),
            "shuffle_window": rng.choice([1, 2, 4]),
            "lanes": rng.choice([2, 4, 4, 8]),
            "seed": rng.randrange(100),
            "eod_token": EOD,
            "run": "first",
            "add_extra_token_to_sequence": rng.random() < 0.6,
            **draw_masks(rng),
            **({"split": split} if split else {}),
        }
        self.eod = eod
        self.stages: list[dict[str, Any]] = [{"samples": 8 * rng.randrange(20, 60)}]
        self.requested = [Requested(0, (Fraction(1), Fraction(1)))]
        self.refused = ""
        self.state: dict[str, Any] | None = None
        self.position = 0
        self.states = list[dict[str, Any]]()
        self.trained = dict[int, dict[str, Any]]()
        self.skips = list[tuple[int, int]]()
        self.skipped = defaultdict[int, list[dict[str, Any]]](list)
        self.with_files(lambda: megablend.build(self.config))
        self.dataset = megablend.open(self.config)
        self.valid = self.read_valid() if split else None
        self.amends_late = False

    @property
    def config(self) -> dict[str, Any]:
        """The config as it is now."""
        files = self.files
        sources = list[dict[str, Any]]()
        for source, kind in enumerate(files.kinds):
            path = f"{self.folder}/data/source{source}/*{KINDS[kind].suffix}"
            sources.append(
                {
                    "name": f"s{source}",
                    "path": path,
                    "column": KINDS[kind].column,
                    "weight": int(source < 2),
                }
            )
            if self.eod is not None:
                sources[-1]["append_eod"] = self.eod
        return make_config(self.folder, sources, stages=list(self.stages), **self.settings)

    def with_files(self, act: Callable[[], Any]) -> Any:
        """Do something while files that are gone are not there."""
        with self.files.hide_gone():
            return act()

    def settings_of(self, stage: int) -> dict[str, Any]:
        """All settings of a stage; some are those of stages before."""
        found = {"sequence_length": 8, **self.settings}
        for each in self.stages[: stage + 1]:
            found |= each
        return found

    def read_valid(self) -> list[dict[str, Any]]:
        """All of validation, as it is by default."""
        return read_fields(megablend.open(self.config, "valid"))

    def rename(self) -> None:
        """Give the run another name."""
        old = self.settings["run"]
        new = f"run{self.rng.randrange(10**6)}"
        self._kill_sometimes(lambda: megablend.rename_run(self.config, old, new))
        if old in [each.run for each in megablend.list_runs(self.config)]:
            megablend.rename_run(self.config, old, new)
        self.settings["run"] = new
        self.dataset = megablend.open(self.config, state=self.state)

    def reset(self) -> None:
        """Set the ledger aside, where a state of all stages finds its plan, or plan another in its place; and put it back."""
        ks = range(self.position, min(self.position + 8, len(self.dataset)))
        expected = read_fields(self.dataset, ks)
        aside = Path(megablend.reset_run(self.config, self.settings["run"]))
        if self.rng.random() < 0.5:
            with contextlib.suppress(MegablendError):  # files that it needs may be gone
                self.with_files(lambda: megablend.build(self.config))
        elif self.state is not None and len(self.state["stages"]) == len(self.stages):
            assert read_fields(megablend.open(self.config, state=self.state), ks) == expected
        aside.rename(Path(self.config["cache"]) / "runs" / f"{self.settings['run']}.json")
        self.dataset = megablend.open(self.config, state=self.state)

    def train(self, steps: int) -> None:
        """Train some steps of 4 samples on one, two or four ranks; sample by sample where steps of 4 end elsewhere."""
        ranks = self.rng.choice([1, 2, 4])
        try:
            self._keep(*self._read(steps, ranks, 4 // ranks))
        except ConfigError as error:
            if "in the middle of a batch" not in str(error) and "would reach into" not in str(
                error
            ):
                raise
            self._keep(*self._read(4 * steps, 1, 1))

    def finish(self) -> None:
        """Train to the end of the run."""
        self.train(len(self.dataset))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the run is read", RuntimeWarning)
            self._keep(*self._read(4, 1, 1))  # less than a step of 4, or nothing

    def _keep(self, found: list[dict[str, Any]], state: dict[str, Any]) -> None:
        """Keep the samples that were read, and the state after them."""
        for sample in found:
            self.position = self._next(self.position)
            assert self.position not in self.trained
            self.trained[self.position] = sample
            self.position += 1
        assert state["consumed_samples"] == self.position
        links = len(state["stages"]) + len(state.get("indices", []))
        assert len(json.dumps(state)) <= 1000 + 60 * links
        self.state = state
        self.states.append(state)

    def _next(self, k: int) -> int:
        """The first sample from k on that is not skipped."""
        while any(start <= k < stop for start, stop in self.skips):
            k += 1
        return k

    def _read(
        self, steps: int, ranks: int, micro: int
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        dataset = megablend.open(self.config, state=self.state)
        assert dataset.consumed_samples == self.position
        loaders = [
            megablend.Loader(
                dataset, micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=ranks
            )
            for rank in range(ranks)
        ]
        try:
            found = list[dict[str, Any]]()
            for batches in itertools.islice(zip(*loaders, strict=True), steps):
                found += itertools.chain.from_iterable(map(list_fields, batches))
            return found, json.loads(json.dumps(loaders[0].state_dict()))
        finally:
            for loader in loaders:
                loader.close()

    def go_back(self) -> None:
        """Continue from an older checkpoint, perhaps without a range of samples after it."""
        self.state = self.rng.choice(self.states)
        self.position = self.state["consumed_samples"]
        self.states = [each for each in self.states if each["consumed_samples"] <= self.position]
        self.check_trained()
        self.trained = {k: sample for k, sample in self.trained.items() if k < self.position}
        left = len(self.dataset) - self.position
        if left > 16 and self.rng.random() < 0.7:
            start = self.position + self.rng.randrange(left // 2)
            stop = start + self.rng.randrange(1, left // 4)
            before = {k for a, b in self.skips for k in range(a, b)}
            listed = megablend.skip(self.config, start, stop, batch_size=4).to_dict()["skips"]
            self.skips = [(each["start"], each["stop"]) for each in listed]
            now = {k for a, b in self.skips for k in range(a, b)}
            assert now >= before | set(range(start, stop))
            if any(a < self.position < b for a, b in self.skips):
                megablend.unskip(self.config)
                self.skips = []
            ks = [k for skip in self.skips for k in range(*skip)]
            for k, sample in zip(ks, read_fields(self.dataset, ks), strict=True):
                self.skipped[k].append(sample)

    def commit(self, stage: dict[str, Any], requested: Requested) -> bool:
        """Add a stage to the config, by an amendment or at the end. Returns: whether the plan allows it."""
        self.stages.append(stage)
        at = len(self.dataset)
        try:
            if stage.get("new_data") or stage.get("withdraw"):
                self._kill_sometimes(lambda: megablend.build_index(self.config))
                self.with_files(lambda: megablend.build_index(self.config))
            elif stage.get("order") == "document":
                # An amendment before new data reads this index
                self.with_files(lambda: megablend.build_index(self.config))
            if self.rng.random() < 0.25:
                self._kill_sometimes(lambda: megablend.build(self.config))
                self.with_files(lambda: megablend.build(self.config))
            else:
                at = self._amend()
        except PlanError as error:
            self.refused = str(error)
            self.stages.pop()
            return False
        self.requested.append(requested)
        self.amends_late = False
        self.dataset = megablend.open(self.config, state=self.state)
        assert len(self.dataset.run.ledger.stages) == len(self.stages)
        self._check_skips(at)
        self.check_trained()
        return True

    def check_trained(self) -> None:
        """The dataset gives what training was given."""
        for (k, sample), found in zip(
            self.trained.items(), read_fields(self.dataset, list(self.trained)), strict=True
        ):
            assert found == sample, f"sample {k} of the past has changed"

    def _check_skips(self, at: int) -> None:
        """Ranges before an amendment are kept; later ones only where the samples are those that were to be skipped, perhaps
        before an amendment that this one takes back.
        """
        listed = [
            (each["start"], each["stop"])
            for each in megablend.list_skips(self.config).to_dict()["skips"]
        ]
        now = [k for start, stop in listed for k in range(start, stop)]
        for k, sample in zip(now, read_fields(self.dataset, now), strict=True):
            assert sample in self.skipped[k]
        assert all(stop > at or {*range(start, stop)} <= {*now} for start, stop in self.skips)
        self.skips = listed

    def _may_go_on(self, at: int) -> bool:
        """Whether a source that is read just before a sample, in that step of a schedule, keeps all files in the newest snapshot:
        else nothing can be read further, and a drain is what lanes have left."""
        before = self.requested[-1]
        last = len(self.files.snapshots) - 1
        step = next(each for each in self.dataset.run.plan.stages if at <= each.stop)
        return any(
            weight > 0
            and step.request.totals[source] > 0
            and all(
                self.files.tokens(snapshot, source, "train")
                <= self.files.tokens(last, source, "train")
                for snapshot in range(before.snapshot + 1)
            )
            for source, weight in enumerate(before.weights)
        )

    def _amend(self) -> int:
        """Amend the run at its job's position or later. Returns: the first sample that may change."""
        after = min(self.rng.randrange(40), len(self.dataset) - self.position)
        where: dict[str, Any] = {"at": max(1, self.position + after)}
        if self.amends_late:
            where["at"] = max(where["at"], self.dataset.run.ledger.starts[-1] + 1)
        if self.state is not None and not self.amends_late and self.rng.random() < 0.5:
            where = {"state": self.state, "after": after}
        if self.rng.random() < 0.4:
            where["batch"] = self.rng.choice([1, 3, 4, 8])
        while True:
            try:
                expected = megablend.amend(self.config, dry_run=True, **where)
                break
            except ConfigError as error:
                if "skips; amend the run at" not in str(error):
                    raise
                where["at"] = int(
                    str(error)
                    .rpartition("amend the run at sample ")[2]
                    .split(" ")[0]
                    .replace(",", "")
                )
                where = {key: where[key] for key in where if key in ("at", "batch")}
        now, then = (self.settings_of(len(self.stages) - back) for back in (1, 2))
        # Else stages that had not begun come before
        is_next = expected.at > self.dataset.run.ledger.starts[-1]
        # As planned, with nothing left
        has_ended = expected.at == self.dataset.run.num_samples and not expected.drain
        changes_length = now["sequence_length"] != then["sequence_length"]
        if is_next and changes_length and not has_ended and self._may_go_on(expected.at):
            unit = math.lcm(where.get("batch", 1), now["lanes"], then["lanes"])
            assert (expected.at + expected.drain) % unit == 0
        self._kill_sometimes(lambda: megablend.amend(self.config, **where))
        ledger = load_ledger(self.config["cache"], self.settings["run"])
        assert ledger is not None
        if ledger != self.dataset.run.ledger:
            assert ledger.digest == expected.plan  # it is whole
            return expected.at
        done = megablend.amend(self.config, **where)
        assert (done.at, done.drain, done.plan) == (expected.at, expected.drain, expected.plan)
        return done.at

    def _kill_sometimes(self, act: Callable[[], Any]) -> None:
        """Begin something in a process that is killed."""
        if not self.kills or self.rng.random() < 0.5:
            return
        delay = self.rng.random() * 0.3
        with self.files.hide_gone():
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    act()
                os._exit(0)
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

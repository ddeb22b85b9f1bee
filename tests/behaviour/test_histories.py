"""Random histories of runs against a twin that walks them sample by sample.

Blends change inside periods and step by step, with caps, in other lanes, lengths, masks and orders; files and sources come, go
and are renamed, and so is the run; its ledger is set aside and put back; samples are skipped; commands are killed; jobs go on
from older states, with other ranks. Every field of every sample is compared, whenever the run has changed.

MEGABLEND_TEST_HISTORIES sets how many are in the long part, MEGABLEND_TEST_SEED the first one's seed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.behaviour.histories.checks import check_job
from tests.behaviour.histories.draw import draw_stage, ease
from tests.behaviour.histories.job import Job

FOUND = (910261, 910387, 897297)
"""Seeds that have found faults which have no shorter test of all that they show."""
FIRST = 100 + int(os.environ.get("MEGABLEND_TEST_SEED", "0"))
HISTORIES = int(os.environ.get("MEGABLEND_TEST_HISTORIES", "60"))


def run_history(folder: Path, seed: int, *, num_stages: int, kills: bool) -> None:
    rng = random.Random(seed)
    job = Job(folder, rng, kills=kills)
    for _ in range(1, num_stages):
        job.train(rng.randrange(10, 60))
        for chance, act in ((0.3, job.go_back), (0.2, job.rename), (0.15, job.reset)):
            if rng.random() < chance:
                act()
        stage, requested = draw_stage(job)
        for _ in range(8):
            if job.commit(stage, requested):
                break
            requested = ease(job, stage, requested)
        else:
            raise AssertionError(job.refused)
    job.finish()
    check_job(job)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_a_run_follows_its_config(tmp_path: Path, seed: int) -> None:
    run_history(tmp_path, seed, num_stages=3, kills=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*FOUND, *range(FIRST, FIRST + HISTORIES)])
def test_long_runs_follow_their_configs(tmp_path: Path, seed: int) -> None:
    run_history(tmp_path, seed, num_stages=7, kills=True)

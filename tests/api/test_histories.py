"""Random histories of runs against a twin that walks them sample by sample.

Blends change inside periods and step by step, with caps, in other lanes, lengths and orders; files and sources come, go and are
renamed; samples are skipped; commands are killed; jobs go on from older states, with other ranks.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.api.histories.checks import check_job
from tests.api.histories.draw import draw_stage, ease
from tests.api.histories.job import Job


def run_history(folder: Path, seed: int, *, num_stages: int, kills: bool) -> None:
    rng = random.Random(seed)
    job = Job(folder, rng, kills=kills)
    for _ in range(1, num_stages):
        job.train(rng.randrange(10, 60))
        if rng.random() < 0.3:
            job.go_back()
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
@pytest.mark.parametrize("seed", range(100, 160))
def test_long_runs_follow_their_configs(tmp_path: Path, seed: int) -> None:
    run_history(tmp_path, seed, num_stages=7, kills=True)

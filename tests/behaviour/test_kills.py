"""Builds that are killed at any moment, beside another build or a collection of garbage: the cache gives the right tokens.

MEGABLEND_TEST_KILLS sets how many processes the long part kills, MEGABLEND_TEST_SEED the first round's seed.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import python
from tests.runs import documents, make_config, write_source

KILLS = int(os.environ.get("MEGABLEND_TEST_KILLS", "200"))
SEED = int(os.environ.get("MEGABLEND_TEST_SEED", "0"))
ROOT = Path(__file__).parents[2]


def kill(folder: Path, seed: int, count: int) -> None:
    kinds = ("parquet", "arrow", "megatron")
    sources = [
        write_source(folder, i, kind, documents(i, 60, 20, 5), num_files=6) | {"weight": 1}
        for i, kind in enumerate(kinds)
    ]
    config = make_config(folder, sources, samples=60, run="demo", order="row")
    fewer = [source | {"path": source["path"].replace("*", "[0-3]")} for source in sources]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "fewer.json").write_text(json.dumps(config | {"sources": fewer}))
    command = [
        *python("torch"),
        str(Path(__file__).with_name("kill_campaign.py")),
        str(folder),
        str(seed),
        str(count),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=500 + 10 * count,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] >= count
    assert not found["problems"], "\n\n".join(found["problems"])


def test_a_few_kills(tmp_path: Path) -> None:
    kill(tmp_path, 0, 6)


@pytest.mark.slow
@pytest.mark.timeout(200 + 10 * KILLS)
def test_many_kills(tmp_path: Path) -> None:
    kill(tmp_path, SEED, KILLS)

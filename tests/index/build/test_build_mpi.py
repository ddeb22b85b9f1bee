from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.index.index_data import driver, run, snapshot_bytes, write

pytestmark = pytest.mark.long  # each starts several processes under mpirun


@pytest.mark.parametrize("ranks", [(0, 1, 3, 7), pytest.param((0, 2, 4), marks=pytest.mark.slow)])
def test_any_number_of_ranks_makes_the_same_bytes(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    for i in range(9):
        write(tmp_path / "data" / "big" / f"{i}.arrow", i)
    write(tmp_path / "data" / "small.arrow", 20)
    made = []
    for num_ranks in ranks:
        cache = tmp_path / f"cache{num_ranks}"
        result = run(
            driver(num_ranks, cache, f"a={tmp_path}/data/big/*.arrow", f"b={tmp_path}/data/*.arrow")
        )
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert (report["read"], report["reused"], report["num_files"]) == (10, 0, 10)
        assert report["progress"]["files"] == report["progress"]["num_files"] == 10
        assert report["progress"]["bytes"] == report["progress"]["num_bytes"]
        made.append(
            {"digest": report["digest"].encode(), **snapshot_bytes(cache, report["digest"])}
        )
    assert all(each == made[0] for each in made[1:])


def test_ranks_reuse_what_one_process_found(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", 1)
    run(driver(0, tmp_path / "cache", f"s={tmp_path}/*.arrow"))
    write(tmp_path / "b.arrow", 2)
    report = json.loads(run(driver(3, tmp_path / "cache", f"s={tmp_path}/*.arrow")).stdout)
    assert (report["read"], report["reused"], report["added"]) == (1, 1, 1)

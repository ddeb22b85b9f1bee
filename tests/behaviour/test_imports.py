"""What opening and reading import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend

OPEN = """
import sys, megablend
dataset = megablend.open(sys.argv[1])
next(iter(megablend.Loader(dataset, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1)))
print([name for name in ("pyarrow.compute", "pyarrow.parquet") if name in sys.modules])
"""


def test_pandas_is_not_imported_and_sources_are_named(tmp_path: Path) -> None:
    """pyarrow imports it for some conversions, where it is installed: here one that says so."""
    tokens = pa.array(np.arange(4000, dtype=np.int32))
    table = pa.table(
        {"input_ids": pa.ListArray.from_arrays(np.arange(0, 4001, 40, dtype=np.int32), tokens)}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    sources = [
        {"name": name, "path": f"{tmp_path}/{name}.*", "append_eod": 0, "weight": 1}
        for name in "ab"
    ]
    config = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 16,
        "samples": 100,
        "sources": sources,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    megablend.build(tmp_path / "config.json")
    dataset = megablend.open(tmp_path / "config.json")
    assert dataset.sources == ("a", "b")
    assert (
        repr(dataset)
        == f"<megablend.Dataset {dataset.run.ledger.run!r} train: 100 samples, dataset_id 0: a, 1: b>"
    )
    assert {dataset.sources[dataset[k]["dataset_id"]] for k in range(100)} == {"a", "b"}
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", OPEN, str(tmp_path / "config.json")]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
    assert done.stdout == "[]\n", "modules that take long to import, and that reading does not need"


@pytest.mark.parametrize(
    ("program", "not_needed"),
    [
        ("import megablend", ("logging", "numpy", "pydantic")),
        ("import megablend.cli", ("numpy", "numba", "pyarrow", "pydantic", "yaml")),
    ],
)
def test_what_takes_long_is_imported_when_it_is_needed(
    program: str, not_needed: tuple[str, ...]
) -> None:
    code = f"import sys; {program}; print([name for name in {not_needed!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True
    )
    assert done.stdout == "[]\n"


def test_a_star_import_leaves_the_builtins() -> None:
    names: dict[str, object] = {}
    exec("from megablend import *", names)  # what a user writes
    assert "open" not in names
    assert {"build", "describe", "Loader"} <= names.keys()
    assert callable(megablend.open)
    assert "open" in dir(megablend)

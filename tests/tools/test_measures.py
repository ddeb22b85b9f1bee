"""The tools that measure the package's size and how far an operation reaches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from duplicates import find_duplicates
from size import measure
from trace_calls import tracing

from tests.preloaded import python

ROOT = Path(__file__).parents[2]


def test_the_size_of_code_does_not_depend_on_its_form(tmp_path: Path) -> None:
    short = tmp_path / "short.py"
    short.write_text("def f(a): return a + 1\n")
    long = tmp_path / "long.py"
    long.write_text(
        '"""A."""\nimport os\n\n\ndef f(\n    a: int,\n) -> int:\n    """B."""\n    # why\n    return (\n        a + 1\n    )\n'
    )
    assert measure(short)["nodes"] == measure(long)["nodes"] > 0
    parallel = tmp_path / "parallel.py"
    parallel.write_text("a, b = 1, 2\na, b = b, a\nc, d = f()\n")
    assert measure(parallel)["parallel"] == 1


def test_the_package_has_one_statement_a_line() -> None:
    for path in (ROOT / "megablend").rglob("*.py"):
        assert measure(path)["parallel"] == 0, (
            f"{path}: several values are assigned to several names by one statement"
        )


def test_functions_of_the_package_are_traced_and_no_others() -> None:
    from megablend.config.numbers import whole_number

    with tracing() as trace:
        whole_number("n", 3)
        sorted([2, 1], key=str)
    assert {code.co_name for code in trace.functions} == {"whole_number"}
    assert (trace.files, trace.rooms, trace.depths) == ({"config/numbers.py"}, {"config"}, [1])


@pytest.mark.long
def test_the_table_has_a_row_for_each_operation() -> None:
    done = subprocess.run(
        [*python(), "tools/trace_calls.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    rows = dict(line.rsplit(maxsplit=4)[::4] for line in done.stdout.splitlines()[1:])
    assert {"build", "open", "dataset[0]", "show", "amend", "open, amended"} <= set(rows)
    assert all(int(deepest) > 1 for deepest in rows.values())


def test_duplicates_are_found_where_they_begin() -> None:
    shared = [f"x{i} = {i}" for i in range(7)]
    a = "\n".join(["import os", *shared, "y = 1"])
    b = "\n".join(["if True:", *(f"    {line}" for line in shared), "", "z = 2"])
    assert find_duplicates({"a": a, "b": b}) == [(("a", 2), ("b", 2))]
    assert find_duplicates({"a": a, "b": b}, length=8) == []
    assert find_duplicates({"a": "\n".join([*shared, "y = 1", *shared])}) == [(("a", 1), ("a", 9))]

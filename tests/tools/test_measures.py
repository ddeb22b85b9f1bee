"""The tools that measure the package's size and how far an operation reaches."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from duplicates import find_duplicates
from size import measure
from trace_calls import PACKAGE, Trace, operate, tracing

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


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    found: dict[str, Trace] = {}

    def trace(name: str, operation: Callable[[], Any]) -> Any:
        with tracing() as found[name]:
            return operation()

    operate(tmp_path_factory.mktemp("walks"), trace)
    return found


def list_entered(trace: Trace, thread: str = "") -> list[tuple[str, str]]:
    """Name and file of the functions that threads whose names begin so entered first."""
    return [
        (code.co_name, code.co_filename.removeprefix(PACKAGE))
        for code, name in trace.functions.items()
        if name.startswith(thread)
    ]


def check_walk(steps: list[tuple[str, str]], entered: list[tuple[str, str]]) -> None:
    assert len(steps) > 8
    missing = [step for step in steps if step not in entered]
    assert not missing
    assert sorted(steps, key=entered.index) == steps


def walk_in_docs(title: str, columns: str = "") -> list[Any]:
    text = ARCHITECTURE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    row = rf"^\| {columns}`(?:\w+\.)?(\w+)` \| `([\w/.]+)` \|"
    return re.findall(row, text, re.MULTILINE)


def test_the_walk_of_a_sample_is_as_the_docs_say(traces: dict[str, Trace]) -> None:
    check_walk(walk_in_docs("The walk of a sample"), list_entered(traces["dataset[700]"]))


def test_the_walk_of_a_build_is_as_the_docs_say(traces: dict[str, Trace]) -> None:
    text = ARCHITECTURE.partition("## The walk of a build\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:all|0) \| `([\w/.]+)` \|", text, re.MULTILINE)
    check_walk(rows, list_entered(traces["build"]))


def test_the_walk_of_a_batch_is_as_the_docs_say_in_each_thread(traces: dict[str, Trace]) -> None:
    rows = walk_in_docs("The walk of a batch", r"(\w+) \| ")
    threads = {"caller": threading.current_thread().name, "read": "megablend-read_"}
    assert {thread for thread, *_ in rows} == set(threads)
    for thread, name in threads.items():
        steps = [(function, file) for row, function, file in rows if row == thread]
        check_walk(steps, list_entered(traces["first batch"], name))


@pytest.mark.long
def test_the_table_has_a_row_for_each_operation() -> None:
    done = subprocess.run(
        [*python(), "tools/trace_calls.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    rows = [line.rsplit(maxsplit=4) for line in done.stdout.splitlines()[1:]]
    found = {name.strip(): list(map(int, counts)) for name, *counts in rows}
    told = {
        name: list(map(int, counts.split(" | ")))
        for name, counts in re.findall(
            r"^\| ([^`|]+) \| (\d+ \| \d+ \| \d+ \| \d+) \|$", ARCHITECTURE, re.MULTILINE
        )
    }
    assert set(found) == set(told)
    if sys.version_info[:2] == (3, 11):
        for name, counts in told.items():
            assert found[name] == pytest.approx(counts, rel=0.1, abs=3), (
                f"{name}: `python tools/trace_calls.py` prints the table for docs/architecture.md"
            )


def test_duplicates_are_found_where_they_begin() -> None:
    shared = [f"x{i} = {i}" for i in range(7)]
    a = "\n".join(["import os", *shared, "y = 1"])
    b = "\n".join(["if True:", *(f"    {line}" for line in shared), "", "z = 2"])
    assert find_duplicates({"a": a, "b": b}) == [(("a", 2), ("b", 2))]
    assert find_duplicates({"a": a, "b": b}, length=8) == []
    assert find_duplicates({"a": "\n".join([*shared, "y = 1", *shared])}) == [(("a", 1), ("a", 9))]

"""The benchmarks of Megatron's files and of blends, tiny: they run, agree with megatron-core, and print their tables."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.preloaded import write_program

BENCH = Path(__file__).parent.parent.parent / "tools" / "bench"

RUNS = {
    "shuffle": (["--sizes", "70000", "--rounds", "1"], ["70,000 elements of int64", "megablend"]),
    "blend": (
        ["--datasets", "2", "40", "--samples", "500", "--rounds", "1"],
        ["exhaustive, 40 datasets", "megablend"],
    ),
    "sample_index": (
        ["--scale", "0.0002", "--rounds", "1"],
        ["2,000 documents of 60 tokens", "megablend"],
    ),
    "two_billion": (
        ["--samples", "70000", "--datasets", "40", "--part", "3000"],
        [
            "plan: ready in",
            "Megatron's greedy",
            "ours are the same there",
            "megablend's greedy: CPU",
        ],
    ),
}


def load(
    name: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], run_name: str
) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what megatron-core says when it is imported
        return runpy.run_path(str(BENCH / f"{name}.py"), run_name=run_name)


@pytest.mark.parametrize("name", RUNS)
def test_a_bench_of_arrays_prints_its_tables(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = RUNS[name]
    load(name, monkeypatch, arguments, "__main__")
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed


def test_checksums_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from megablend.megatron.exact.greedy import greedy

    bench = load("two_billion", monkeypatch, [], "two_billion")
    weights = [0.5, 0.3, 0.2]
    assert bench["in_pieces"]("x", greedy(weights, 400_000), 1) == bench["in_pieces"](
        "x", greedy(weights, 400_000), 3
    )


@pytest.mark.slow
def test_a_whole_build_races_against_megatrons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = [
        "--datasets",
        "3",
        "--documents",
        "50",
        "--samples",
        "200",
        "--ranks",
        "1",
        "--rounds",
        "1",
    ]
    load("megatron_build", monkeypatch, [*size, "--folder", str(tmp_path)], "__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["Megatron", "1 rank"]
    assert list(tmp_path.iterdir()) == []


def test_mixers_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron")
    monkeypatch.setattr(sys, "executable", write_program(tmp_path / "python", "megatron"))
    load("mixers", monkeypatch, ["--scale", "1e-6", "--datasets", "3"], "__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[2].startswith("megablend, plan")
    assert lines[3].startswith("Megatron-core")
    assert not any("does not run" in line for line in lines[2:4])


@pytest.mark.slow
def test_mixers_of_a_blend_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", write_program(tmp_path / "python", "megatron"))
    load("mixers", monkeypatch, ["--changes", "--scale", "1e-6", "--datasets", "3"], "__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[2].split()[:3] == ["megablend,", "plan", "192"]
    assert lines[2].split()[-2:] == ["0", "0"]  # nothing read again, nothing left out
    assert lines[3].split()[:2] == ["Megatron-core", "192"]


def test_worst_prefix_error_is_that_of_every_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    worst = load("mixers", monkeypatch, [], "mixers")["worst_prefix_error"]
    rng = np.random.default_rng(0)
    for size in (1, 2, 30):
        for weights in (np.array([1.0]), np.array([0.5, 0.25, 0.25, 0.0])):
            ids = rng.integers(0, max(1, len(weights) - 1), size)
            counted = np.cumsum(ids[:, None] == np.arange(len(weights)), axis=0)
            expected = np.abs(counted - np.arange(1, size + 1)[:, None] * weights).max()
            # a prefix that ends just before a sample is one that ends just after the sample before it
            assert worst(ids, weights) == pytest.approx(expected)

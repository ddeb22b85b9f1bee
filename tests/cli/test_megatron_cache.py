"""`megablend megatron-cache` as a user meets it: alone, under mpirun, killed, in want of memory or room."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from megablend.cli.megatron_cache import megatron_cache, parse_bytes, spread
from megablend.errors import ConfigError, CorruptFileError, MegablendError
from tests.cli.commands import run as run_here
from tests.cli.commands import runner_with_stderr
from tests.pairs import contents, write_pair
from tests.preloaded import python

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("PMI", "MPI_", "OMPI_", "SLURM_")
IDENTIFIERS = '{"class": "T", "tokenizer_path": []}'
SIZES = [
    "--seq-length",
    "16",
    "--train-samples",
    "3000",
    "--valid-samples",
    "100",
    "--test-samples",
    "20",
]


def environment() -> dict[str, str]:
    """The environment without what a launcher of the tests themselves may have left in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


def flags(cache: Path, *args: object) -> list[str]:
    return [
        "--data-cache-path",
        str(cache),
        *SIZES,
        "--tokenizer-identifiers",
        IDENTIFIERS,
        *map(str, args),
    ]


def command(cache: Path, *args: object, ranks: int = 0) -> list[str]:
    launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)] if ranks else []
    return [*launcher, *python(), "-m", "megablend", "megatron-cache", *flags(cache, *args)]


def run(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args, **options),
        capture_output=True,
        text=True,
        timeout=500,
        env=environment(),
        cwd=ROOT,
        check=False,
    )


def here(cache: Path, *args: object) -> dict[str, Any]:
    """Run the command in this process; its JSON. Errors are raised."""
    done = runner_with_stderr().invoke(
        megatron_cache, flags(cache, *args, "--json"), catch_exceptions=False, standalone_mode=False
    )
    assert done.exit_code == 0
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    return [write_pair(tmp_path / "data" / f"{i}_text", rng.integers(0, 60, 800)) for i in range(5)]


def blend(data: list[str]) -> list[object]:
    return [
        "--data-path",
        *(word for i, prefix in enumerate(data) for word in (i + 1, prefix)),
        "--split",
        "8,1,1",
    ]


def test_a_blend_alone_then_again(data: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    planned = run(cache, *blend(data), "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    assert not cache.exists()
    found = json.loads(planned.stdout)
    assert [split["missing"] for split in found["splits"]] == [6, 6, 6]
    assert found["memory_bytes"] > 0
    done = run(cache, *blend(data), "--json")
    assert "built 18 of 18 files" in done.stderr
    built = json.loads(done.stdout)
    assert {name: built[name] for name in ("splits", "artefacts")} == {
        name: found[name] for name in ("splits", "artefacts")
    }
    assert (
        sum(path.stat().st_size for path in cache.glob("*.npy")) - built_bytes(built) < 129 * 3 * 18
    )
    again = run(cache, *blend(data))
    assert "nothing is missing" in again.stdout
    assert "train" in again.stdout


@pytest.mark.parametrize("is_built", [False, True])
def test_a_copy_that_was_interrupted(data: list[str], tmp_path: Path, is_built: bool) -> None:
    """A `.bin` that is shorter than its `.idx` says is refused by a new cache and by a complete one."""
    if is_built:
        here(tmp_path / "cache", *blend(data))
    path = Path(f"{data[2]}.bin")
    os.truncate(path, path.stat().st_size - 200)
    with pytest.raises(
        CorruptFileError, match=r"2_text\.idx at byte \d+: sequence 799 .* is outside the \.bin of"
    ):
        here(tmp_path / "cache", *blend(data))


def built_bytes(found: dict[str, Any]) -> int:
    return sum(artefact["bytes"] for artefact in found["artefacts"])


@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_writes_the_same_bytes(
    ranks: int, data: list[str], tmp_path: Path
) -> None:
    alone = run(tmp_path / "alone", *blend(data))
    shared = run(tmp_path / "shared", *blend(data), ranks=ranks)
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    assert len(contents(tmp_path / "alone")) == 15 * 4 + 3 * 3


def test_ranks_of_a_node_share_its_memory(data: list[str], tmp_path: Path) -> None:
    done = run(tmp_path / "cache", *blend(data), "--max-memory", "40k", "--json", ranks=3)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 1
    assert json.loads(done.stdout)["memory_bytes"] <= 40_000


@pytest.mark.parametrize("ranks", [0, 2])
def test_too_little_memory_is_told_before_anything_is_built(
    ranks: int, data: list[str], tmp_path: Path
) -> None:
    done = run(tmp_path / "cache", *blend(data), "--max-memory", "1k", ranks=ranks)
    assert done.returncode == 2
    assert "bytes of memory, but" in done.stderr
    assert "has only 1,000 for them (--max-memory" in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_cache_that_cannot_be_written(ranks: int, data: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path / "file" / "cache", *blend(data), ranks=ranks)
    assert done.returncode == 3
    assert "file/cache" in done.stderr
    assert "check the path and the file system, or use another folder" in done.stderr


def test_a_disk_that_runs_full(data: list[str], tmp_path: Path) -> None:
    """No file may grow beyond 20 kB: some arrays do."""
    limited = [
        "sh",
        "-c",
        'ulimit -f 40; exec "$@"',
        "sh",
        *command(tmp_path / "cache", *blend(data)),
    ]
    done = subprocess.run(
        limited,
        capture_output=True,
        text=True,
        timeout=500,
        env=environment(),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "cannot write the cache (File too large)" in done.stderr
    bases = {path.name.split("-description")[0] for path in (tmp_path / "cache").glob("*.txt")}
    assert all(len(list((tmp_path / "cache").glob(f"{base}-*.npy"))) >= 2 for base in bases)
    assert run(tmp_path / "cache", *blend(data)).returncode == 0


def test_a_damaged_array_is_made_anew_and_told(data: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    here(cache, *blend(data))
    before = contents(cache)
    array = next(cache.glob("*-BlendedDataset-train-dataset_index.npy"))
    array.write_bytes(array.read_bytes()[:-2])
    found = here(cache, *blend(data))
    assert sum(split["missing"] for split in found["splits"]) == 1
    assert found["notes"][0].startswith(f"{array}: contains int16")
    assert contents(cache) == before


@pytest.mark.parametrize("wanted", [1, 9])
def test_a_killed_build_is_never_taken_for_a_hit(
    wanted: int, data: list[str], tmp_path: Path
) -> None:
    """Killed when so many descriptions stand: the arrays of each are whole, and the next build goes on."""
    whole = tmp_path / "whole"
    cache = tmp_path / "cache"
    run(whole, *blend(data))
    expected = contents(whole)
    words = [sys.executable, "-m", "megablend", "megatron-cache", *flags(cache, *blend(data))]
    process = subprocess.Popen(words, env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 500
    while len(list(cache.glob("*.txt"))) < wanted and time.monotonic() < deadline:
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    # Names are given in batches: it may be done by then
    assert process.wait() in (-signal.SIGKILL, 0)
    left = contents(cache)
    assert left.items() <= expected.items()
    for name in (name for name in left if name.endswith("description.txt")):
        base = name.removesuffix("description.txt")
        assert {each for each in expected if each.startswith(base)} <= set(left)
    done = run(cache, *blend(data))
    assert done.returncode == 0, done.stderr
    assert contents(cache) == expected
    # One killed after its last rename leaves its own folder, empty: what comes next finds all built, and has nothing to clean.
    assert not [
        path for folder in (cache / ".megablend").glob(".tmp*") for path in folder.rglob("*")
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data-path"], r"--data-path has no value"),
        (
            ["--data-path", "30", "a", "b"],
            r"--data-path: word 3 of 3 is 'b'; expected a weight before each prefix",
        ),
        (["--train-data-path", "/nowhere"], r"/nowhere\.bin: "),
        (
            ["--train-data-path", "a", "--data-path", "b"],
            r"data: found --data-path and --train-data-path",
        ),
        ([], r"data: found none; expected exactly one of --data-path"),
        (["--data-args-path", "/nowhere"], r"/nowhere: cannot be read"),
        (
            ["--data-path", "a", "--split", ""],
            r"split '': expected up to three numbers, at least one of them above 0, such as 969,30,1",
        ),
        (
            ["--train-data-path", "a", "--split", "1"],
            r"split '1' cannot be combined with a separate blend for each split",
        ),
        (
            ["--data-path", "a", "--tokenizer-type", "NullTokenizer"],
            r"tokenizer: expected exactly one of --tokenizer-identifiers",
        ),
        (["--data-path", "a", "--max-memory", "much"], r"--max-memory 'much': expected bytes"),
        (
            ["--data-path", "a", "--phase-transition-iterations", "3"],
            r"set --train-samples N to the samples of all phases",
        ),
    ],
)
def test_usage_errors(args: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises((click.ClickException, MegablendError), match=message):
        here(tmp_path / "cache", *args)


def test_flags_mean_what_megatron_reads_into_them(data: list[str], tmp_path: Path) -> None:
    """The same blend in each of its four ways; flags that change nothing are taken."""
    words = [word for i, prefix in enumerate(data) for word in (str(i + 1), prefix)]
    (tmp_path / "words").write_text(" ".join(words))
    (tmp_path / "blends.json").write_text(
        json.dumps({"train": words, "valid": " ".join(words), "test": None})
    )
    idle = ["--num-workers", "3", "--reset-position-ids", "--no-mmap-bin-files"]
    idle += ["--dataloader-inter-document-masking", "--validation-set-names", "a", "b"]
    ways: list[list[object]] = [
        ["--data-path", *words, "--split", "1", *idle],
        ["--data-args-path", tmp_path / "words", "--split", "1"],
        ["--train-data-path", *words, "--valid-data-path", *words],
        ["--per-split-data-args-path", tmp_path / "blends.json"],
    ]
    found = []
    for number, way in enumerate(ways):
        here(tmp_path / str(number), *way)
        found.append(contents(tmp_path / str(number)))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert len(found[0]) * 2 == len(found[2])


def test_without_split_it_is_megatrons_old_default(data: list[str], tmp_path: Path) -> None:
    here(tmp_path / "cache", "--data-path", data[0])
    descriptions = {
        json.loads(path.read_text())["split"] for path in (tmp_path / "cache").glob("*.txt")
    }
    assert descriptions == {"969, 30, 1"}


def test_an_earlier_description_names_the_tokenizer(data: list[str], tmp_path: Path) -> None:
    here(tmp_path / "first", *blend(data))
    for kind in ("GPTDataset", "BlendedDataset"):
        description = next((tmp_path / "first").glob(f"*-{kind}-train-description.txt"))
        found = here(tmp_path / "first", *blend(data), "--tokenizer-identifiers", description)
        assert [split["missing"] for split in found["splits"]] == [0, 0, 0]


def test_spread_puts_a_flag_before_each_of_its_words() -> None:
    args = ["--a", "x", "--words", "1", "-2", "y", "--b", "z", "--more=1", "q", "--c=--words"]
    flags = ["--words", "1", "--words", "-2", "--words", "y", "--more", "1"]
    assert spread(args, {"--words", "--more"}) == [
        *flags,
        "--a",
        "x",
        "--b",
        "z",
        "q",
        "--c=--words",
    ]


@pytest.mark.parametrize(
    "args",
    ["--data-path 1 a 2 b --data-path {}", "--data-path=a --x y --data-path {}", "--data-path {}"],
)
@pytest.mark.parametrize("last", ["3 c 4 d", "e"])
def test_of_a_flag_given_twice_the_last_words_count_as_in_argparse(args: str, last: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--x")
    words = args.format(last).split()
    expected = parser.parse_args(words).data_path
    assert [
        word for word in spread(words, {"--data-path"}) if word not in ("--data-path", "--x", "y")
    ] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 7), ("64G", 64 * 10**9), ("1.5 GiB", 3 << 29), ("2kb", 2000), ("3MiB", 3 << 20)],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1", "1Q"])
def test_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-memory '.*': expected bytes"):
        parse_bytes(text)


BASE = ["megatron-cache", "--data-path", "x", "--seq-length", "8", "--data-cache-path", "c"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--eval-global-batch-size", "8"],
            "validation has a batch size of its own: set --valid-samples N",
        ),
        (["--eval-global-batch-size=8"], "validation has a batch size of its own"),
        (
            ["--phase-transition-iterations", "100,200"],
            "set --train-samples N to the samples of all phases",
        ),
        (["--sft"], "builds only the cache of GPTDataset"),
        (["--sft-tokenizer-prompt-format", "x"], "builds only the cache of GPTDataset"),
        (["--use-varlen-dataset"], "builds only the cache of GPTDataset"),
        (
            ["--start-eval-at-iter", "9"],
            "the first validations are left out: set --valid-samples N",
        ),
        (["--skip-train"], "only one validation takes place: set --valid-samples N"),
        (["--step-batch-size-schedule", "0:8 9:16"], "batches change during training: set"),
        (["--global-batch-sise", "8"], "Did you mean"),
    ],
)
def test_flags_of_training_scripts_are_answered_by_name(flags: list[str], says: str) -> None:
    done = run_here(*BASE, *flags)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Did you mean" not in done.stderr or says == "Did you mean"


def test_flags_that_only_look_alike_are_not_suggested() -> None:
    done = run_here(*BASE, "--tokenizer-padding", "8")
    assert (done.returncode, "Did you mean" in done.stderr) == (2, False)

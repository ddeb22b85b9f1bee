"""Files that are missing or changed are found before a sample needs them, and errors while reading say which sample does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.errors import (
    CHANGED_REMEDY,
    MISSING_REMEDY,
    CacheError,
    ChangedFileError,
    MissingFileError,
)
from megablend.index.build.build import Progress
from megablend.reader import file_watch as watch
from megablend.storage.descriptors import default_capacity, shared_pool
from tests.formats.writers import KINDS
from tests.preloaded import python
from tests.runs import documents, make_config, write_source
from tests.storage.test_contract import skip_without_direct_reads


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [
        write_source(tmp_path, number, kind, documents(number, 40, 30, 1), num_files=4)
        | {"weight": 1}
        for number, kind in enumerate(("arrow", "megatron"))
    ]
    config = make_config(tmp_path, sources, samples=40)
    megablend.build(config)
    return config


def files(tmp_path: Path, source: int) -> list[Path]:
    return sorted(
        path for path in (tmp_path / f"source{source}").iterdir() if path.suffix != ".idx"
    )


def command(tmp_path: Path, config: dict[str, Any], *args: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = [*python(), "-m", "megablend", args[0], str(tmp_path / "config.json"), *args[1:]]
    return subprocess.run(given, capture_output=True, text=True, timeout=500, check=False)


def test_all_files_as_indexed(config: dict[str, Any]) -> None:
    seen: list[Progress] = []
    found = megablend.check(config, progress=seen.append)
    assert (found.files, found.problems) == (8, ())
    assert (seen[-1].files, seen[-1].num_files) == (8, 8)
    assert megablend.describe(config).to_dict()["problems"] == []


def test_files_that_were_touched_are_told_of(config: dict[str, Any], tmp_path: Path) -> None:
    assert megablend.check(config).warnings == ()
    first, second, *_ = files(tmp_path, 0)
    for each in (first, second):
        os.utime(each)
    found = megablend.check(config)
    assert found.problems == ()
    [warning] = found.warnings
    assert warning == (
        f"{first} (and 1 more): has been moved, copied or touched since the build; 64 KiB of each file were "
        "compared and are unchanged; run `megablend verify --data CONFIG` to compare all blocks that have checksums"
    )
    megablend.build(config)
    assert megablend.check(config).warnings == ()


def test_a_missing_a_replaced_and_a_shorter_file_are_listed(
    config: dict[str, Any], tmp_path: Path
) -> None:
    missing, shorter, touched, _ = files(tmp_path, 0)
    missing.rename(tmp_path / "aside")
    os.truncate(shorter, shorter.stat().st_size - 8)
    os.utime(touched, ns=(1, 1))
    pair = files(tmp_path, 1)[2]
    pair.write_bytes(bytes(reversed(pair.read_bytes())))
    gone = files(tmp_path, 1)[3].with_suffix(".idx")
    gone.unlink()
    problems = megablend.check(config).problems
    assert len(problems) == 4
    assert problems[0] == f"{missing}: no such file (source 's0'); {MISSING_REMEDY}"
    assert problems[1].startswith(
        f"{shorter}: has {shorter.stat().st_size} bytes, but had {shorter.stat().st_size + 8} when"
    )
    assert problems[1].endswith(f"; {CHANGED_REMEDY} (source 's0')")
    assert problems[2].startswith(f"{pair}: changed since it was indexed")
    assert problems[3] == f"{gone}: no such file (source 's1'); {MISSING_REMEDY}"
    assert megablend.describe(config).to_dict()["problems"] == list(problems)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("fault", ["missing", "shorter"])
def test_what_a_problem_says_to_do(
    config: dict[str, Any], tmp_path: Path, fault: str, is_named: bool
) -> None:
    source = config["sources"][0]
    path = files(tmp_path, 0)[1]
    if is_named:
        source |= {"path": list(map(str, files(tmp_path, 0)))}
    data = path.read_bytes()
    path.unlink()
    if fault == "shorter":
        write_source(tmp_path / "other", 0, "arrow", documents(0, 10, 10, 1), num_files=1)
        (other,) = files(tmp_path / "other", 0)
        path.write_bytes(other.read_bytes())
    (problem,) = megablend.check(config).problems
    again = MISSING_REMEDY if fault == "missing" else CHANGED_REMEDY
    assert again in problem
    assert "give the run another name (`run:`) and run `megablend build CONFIG`" in problem
    assert "amend the run (`new_data` or `withdraw` of a stage" in problem or fault == "shorter"
    if is_named and fault == "missing":
        assert "if the config lists it, remove it there" in problem
        source["path"].remove(str(path))
    renamed = config | {"run": "without"}
    assert megablend.build(renamed).problems == ()
    assert megablend.check(renamed).problems == ()
    assert len(megablend.open(renamed)[0]["tokens"])
    path.write_bytes(data)
    if is_named and fault == "missing":
        source["path"].append(str(path))
    assert megablend.check(config).problems == ()


def test_the_command(config: dict[str, Any], tmp_path: Path) -> None:
    done = command(tmp_path, config, "check")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "megablend: checked 8 of 8 files")
    assert done.stdout.startswith("8 files of index ")
    assert done.stdout.endswith(": all unchanged\n")
    path = files(tmp_path, 0)[1]
    path.unlink()
    done = command(tmp_path, config, "check", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["problems"] == [
        f"{path}: no such file (source 's0'); {MISSING_REMEDY}"
    ]
    done = command(tmp_path, config, "describe")
    assert f"problem: {path}: no such file (source 's0')" in " ".join(done.stdout.split())


def test_what_was_not_built_cannot_be_checked(tmp_path: Path) -> None:
    source = write_source(tmp_path, 0, "arrow", documents(0, 5, 9, 1))
    with pytest.raises(CacheError, match="holds no index; run `megablend build CONFIG` first"):
        megablend.check(make_config(tmp_path, [source], samples=5))


def test_a_build_says_what_the_older_index_of_its_run_lacks(
    config: dict[str, Any], tmp_path: Path
) -> None:
    path = files(tmp_path, 0)[1]
    path.unlink()
    built = megablend.build(config)
    assert built.pinned
    assert built.problems == (f"{path}: no such file (source 's0'); {MISSING_REMEDY}",)
    assert command(tmp_path, config, "build").returncode == 3


@pytest.mark.parametrize("how", ["dataset", "loader"])
def test_an_error_while_reading_names_the_sample_and_its_source(
    config: dict[str, Any], tmp_path: Path, how: str
) -> None:
    dataset = megablend.open(config | {"file_checks_per_second": 0})
    path = files(tmp_path, 1)[2]
    # whose blocks the first one does not keep
    index = dataset.run.store.snapshot
    other = megablend.open(config)
    number = next(i for i in range(index.num_files) if index.path(i) == str(path))
    needing = [
        k for k in range(len(dataset)) if number in index.file_of(other.sample(k).spans.blocks)
    ]
    path.unlink()
    message = rf"{path}: no such file \(needed for sample {needing[0]} of train, source 's1'; restore the file and resume; "
    loader = megablend.Loader(
        dataset, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1
    )
    samples = map(dataset.__getitem__, range(len(dataset))) if how == "dataset" else loader
    with pytest.raises(MissingFileError, match=message + "`megablend check CONFIG` lists"):
        list(samples)


def batches_until_error(loader: megablend.Loader) -> int:
    """Batches that came before the error; fails where none comes in good time."""
    deadline = time.monotonic() + 500
    count = 0
    while time.monotonic() < deadline:
        for _ in loader:
            count += 1
            time.sleep(0.1)
        loader.load_state_dict(loader.dataset.state_dict(0))
    raise AssertionError(f"no error after {count} batches")


def test_a_file_that_went_is_an_error_at_the_next_batch(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "ROUND_SECONDS", 0.05)
    dataset = megablend.open(config | {"file_checks_per_second": 1000})
    loader = megablend.Loader(
        dataset, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1
    )
    assert len(list(loader)) == 20
    loader.load_state_dict(dataset.state_dict(0))
    # All blocks of it stay in memory, or are read through the descriptor: reading alone would not notice.
    path = files(tmp_path, 0)[1]
    path.rename(tmp_path / "aside")
    with pytest.raises(
        MissingFileError,
        match=rf"{path}: no such file \(source 's0'\): found by the background check of",
    ):
        batches_until_error(loader)
    loader.close()


def test_files_are_checked_for_a_data_loader_of_others_too(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "ROUND_SECONDS", 0.05)
    dataset = megablend.open(config | {"file_checks_per_second": 1000})
    loader = megablend.Loader(
        dataset, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1
    )
    files(tmp_path, 0)[1].rename(tmp_path / "aside")

    def take_until_it_is_found() -> None:
        deadline = time.monotonic() + 500
        while time.monotonic() < deadline:
            loader.load_state_dict(dataset.state_dict(0))
            for _ in loader.next_indices():  # nothing reads the file
                time.sleep(0.01)

    with pytest.raises(MissingFileError, match=r"found by the background check of files"):
        take_until_it_is_found()
    loader.close()


def test_ranks_check_shares_of_the_files(config: dict[str, Any], tmp_path: Path) -> None:
    dataset = megablend.open(config)
    loaders = [
        megablend.Loader(dataset, micro_batch_size=1, data_parallel_rank=rank, data_parallel_size=3)
        for rank in range(3)
    ]
    shares = [[file.number for file in loader._watch._files] for loader in loaders]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_check_leaves_readers_their_files(config: dict[str, Any], tmp_path: Path) -> None:
    """A reader that opened a file goes on in it, and opens another one when it must."""
    dataset = megablend.open(config)
    expected = [dataset[k]["tokens"].tolist() for k in range(len(dataset))]
    path = files(tmp_path, 0)[1]
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes()[:-1] + b"\0")
    other.replace(path)
    (problem,) = megablend.check(config).problems
    assert problem.startswith(str(path))
    dataset.block_cache.resize(0)
    assert [dataset[k]["tokens"].tolist() for k in range(len(dataset))] == expected


@pytest.mark.parametrize("direct_io", [False, True])
def test_a_replaced_file_that_others_open_does_not_reach_open_datasets(
    tmp_path: Path, direct_io: bool
) -> None:
    """Neither another dataset nor a build makes an open one read the new file by the old index."""
    path = tmp_path / "x.npy"
    other = tmp_path / "y.npy"
    np.save(path, np.arange(2000, dtype=np.uint16))
    source = {"name": "a", "path": str(path), "weight": 1}
    config = make_config(
        tmp_path, [source], samples=60, sequence_length=16, file_checks_per_second=0
    )
    config["direct_io"] = direct_io
    if direct_io:
        skip_without_direct_reads(tmp_path)
    megablend.build(config)
    dataset = megablend.open(config)
    expected = [dataset[k]["tokens"].tolist() for k in range(len(dataset))]
    loader = megablend.Loader(dataset, micro_batch_size=1)
    batches = iter(loader)
    found = [next(batches)["tokens"][0].tolist()]
    np.save(other, np.full(2000, 7, np.uint16))
    other.replace(path)
    with pytest.raises(ChangedFileError, match=re.escape(str(path))):
        megablend.open(config)[0]
    megablend.build(config | {"run": "second"})
    assert megablend.open(config | {"run": "second"})[0]["tokens"].tolist() == [7] * 16
    found += [batch["tokens"][0].tolist() for batch in batches]
    assert found == expected
    dataset.block_cache.resize(0)
    for pool in ("local", "direct"):
        shared_pool(pool, 0)
    try:
        with pytest.raises(ChangedFileError, match="was replaced while it was in use"):
            dataset[0]
    finally:
        for pool in ("local", "direct"):
            shared_pool(pool, default_capacity())


def test_what_is_replaced_while_training_is_an_error(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens differ, but nothing else: reading alone would not notice."""
    monkeypatch.setattr(watch, "ROUND_SECONDS", 0.05)
    # The watch, which begins with an epoch, may take as long as it needs
    long = config | {"run": "long", "samples": 12_000}
    megablend.build(long)
    loader = megablend.Loader(
        megablend.open(long | {"file_checks_per_second": 1000}),
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    path = files(tmp_path, 0)[1]
    next(iter(loader))
    loader.close()
    others = [row and [token + 1 for token in row] for row in documents(0, 40, 30, 1)[10:20]]
    KINDS["arrow"].write(tmp_path / "other", others)
    assert path.stat().st_size == (tmp_path / "other").stat().st_size
    path.write_bytes((tmp_path / "other").read_bytes())  # the same inode, which may be open
    with pytest.raises(ChangedFileError, match=rf"{path}"):
        batches_until_error(loader)
    loader.close()


def test_steps_of_a_run_that_does_not_exist_are_not_called_right(config: dict[str, Any]) -> None:
    other = config | {"run": "other"}
    assert megablend.check(other).problems == ()
    with pytest.raises(CacheError, match=r"contains no run 'other'; run `megablend build CONFIG`"):
        megablend.check(other, micro_batch_size=2)


def test_a_config_that_was_edited_but_not_amended_is_told(
    config: dict[str, Any], tmp_path: Path
) -> None:
    says = (
        "the config differs from the one that run 'default' was built with, so loaders refuse it: "
    )
    heavier = config | {"sources": [config["sources"][0] | {"weight": 3}, config["sources"][1]]}
    without = {"samples": 80, "withdraw": ["s1"]}
    withdrawn = config | {"samples": None, "stages": [{"samples": 40}, without]}
    edits = {
        "weight": heavier,
        "the new files have not been added to run 'default' yet": withdrawn,
        "run `megablend build CONFIG` to extend it": config | {"samples": 50},
    }
    for why, edited in edits.items():
        given = {key: value for key, value in edited.items() if value is not None}
        with pytest.raises((CacheError, megablend.PlanError)) as refused:
            megablend.open(given)
        found = megablend.check(given)
        assert (found.uncommitted, found.problems) == (f"{says}{refused.value}", ())
        assert why in str(refused.value)
        done = command(tmp_path, given, "check")
        assert done.returncode == 3
        assert done.stdout.splitlines()[-1].startswith(says)
    assert megablend.check(config).uncommitted is None
    # A stage that is not committed yet withdraws nothing
    files(tmp_path, 1)[1].unlink()
    del withdrawn["samples"]
    assert len(megablend.check(withdrawn).problems) == 1


def test_a_config_of_a_states_own_plan_is_not_refused(config: dict[str, Any]) -> None:
    state = megablend.open(config).state_dict(20)
    megablend.reset_run(config, "default")
    megablend.build(config | {"seed": 9})
    assert megablend.check(config).uncommitted is not None
    assert len(megablend.open(config, state=state)) == 40
    assert megablend.check(config, state=state).uncommitted is None

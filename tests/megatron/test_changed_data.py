"""A cache whose data has changed since: its arrays are built again, also where their names and shapes are the same."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from megablend.errors import CacheError, ChangedFileError, CorruptFileError, MissingFileError
from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset, prepare
from megablend.megatron.cache_builder import build_cache, completion_marker
from megablend.system import build_lock
from tests.megatron.plugin_data import (
    assert_same_samples,
    draw_documents,
    plugin_config,
    write_word,
)
from tests.megatron.reference import config_of, megatron_build

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.filterwarnings("ignore:The pad token id:UserWarning"),
]
SIZES = [40, 10, 0]
CLASSES = [GPTDataset, MegablendGPTDataset]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    words = [
        write_word(tmp_path / str(seed), "megatron", draw_documents(seed, 30)) for seed in range(3)
    ]
    return {"blend": (words, [0.3, 0.4, 0.3]), "split": "80,20,0"}


def build(
    cls: type[Any], cache: Path, options: dict[str, Any], sizes: Any = SIZES, **others: Any
) -> list[Any]:
    config = (config_of if cls is GPTDataset else plugin_config)(cache, **options, **others)
    return MegablendDatasetBuilder(cls, sizes, lambda: True, config).build()


def check(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_samples(ours, theirs)


def rewrite(folder: Path, seed: int) -> None:
    """Some documents get longer or shorter by a few tokens: shapes of arrays hardly ever change."""
    rng = random.Random(seed)
    documents = draw_documents(1, 30)
    for number in rng.sample(range(30), 3):
        documents[number] = documents[number][: -rng.randrange(1, 4)] or [7]
    documents[rng.randrange(30)].append(9)
    write_word(folder, "megatron", documents)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("seed", range(4))
def test_documents_of_other_lengths(
    tmp_path: Path, options: dict[str, Any], cls: type[Any], seed: int
) -> None:
    build(cls, tmp_path / "cache", options)
    rewrite(tmp_path / "1", seed)
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    check(build(cls, tmp_path / "cache", options), expected)
    check(build(cls, tmp_path / "cache", options), expected)  # from the new marker


@pytest.mark.parametrize("is_built", [False, True])
def test_lengths_that_add_up_to_the_same(
    tmp_path: Path, options: dict[str, Any], is_built: bool
) -> None:
    """The files have the same sizes and times as before: noticed when they are read, or where something else is built."""
    build(MegablendGPTDataset, tmp_path / "cache", options)
    times = {
        path: path.stat().st_mtime_ns
        for path in tmp_path.rglob("*.*")
        if path.suffix in (".bin", ".idx")
    }
    documents = draw_documents(1, 30)
    write_word(tmp_path / "1", "megatron", [*documents[1:], documents[0]])
    for path, modified in times.items():
        os.utime(path, ns=(modified, modified))
    if is_built:
        next((tmp_path / "cache").glob("*-description.txt")).unlink()
    else:
        with pytest.raises(
            ChangedFileError, match=r"restore the file, or remove the cache .* and rebuild it"
        ):
            list(build(MegablendGPTDataset, tmp_path / "cache", options)[0])
        shutil.rmtree(tmp_path / "cache")
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    check(build(MegablendGPTDataset, tmp_path / "cache", options), expected)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_files_that_are_written_to_in_training(
    tmp_path: Path, options: dict[str, Any], suffix: str, masks: bool
) -> None:
    """In place, so that the open file has other documents: no sample has them, whichever way it is
    read, and in whichever process. Who only touches a file changes nothing."""
    options["eod_mask_loss"] = masks
    dataset = build(MegablendGPTDataset, tmp_path / "cache", options)[0]
    numbers = [k for k in range(len(dataset)) if dataset[k]["dataset_id"] == 1][:4]
    path = tmp_path / "1" / f"pair{suffix}"
    samples = dataset.__getitems__(numbers)
    in_worker = pickle.loads(pickle.dumps(dataset))
    os.utime(path, (1, 1))
    for read in (dataset.__getitem__, in_worker.__getitem__):
        found = read(numbers[0])
        assert all(torch.equal(found[name], samples[0][name]) for name in ("tokens", "labels"))
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size + 8))
    for read in (dataset.__getitem__, in_worker.__getitem__):
        with pytest.raises(ChangedFileError, match=rf"pair\{suffix}: was replaced or written to"):
            read(numbers[0])
    with pytest.raises(ChangedFileError, match=r"bytes now, [\d,]+ before\): restart the job"):
        dataset.__getitems__(numbers)


@pytest.mark.parametrize("cls", CLASSES)
def test_documents_in_another_order(
    tmp_path: Path, options: dict[str, Any], cls: type[Any]
) -> None:
    """Sizes and shapes are the same; the times of the files lead to another look at the lengths, when a job starts."""
    build(cls, tmp_path / "cache", options)
    documents = draw_documents(1, 30)
    write_word(tmp_path / "1", "megatron", [*documents[1:], documents[0]])
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    check(build(cls, tmp_path / "cache", options), expected)
    check(build(cls, tmp_path / "cache", options), expected)  # from the new marker


@pytest.mark.parametrize("cls", CLASSES)
def test_data_that_was_only_touched(
    tmp_path: Path, options: dict[str, Any], cls: type[Any]
) -> None:
    """Nothing is made again, and the next job asks no further."""
    build(cls, tmp_path / "cache", options)
    arrays = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*.npy")}
    for path in tmp_path.rglob("*.*"):
        if path.suffix in (".bin", ".idx"):
            os.utime(path, (1, 1))
    datasets = build(cls, tmp_path / "cache", options)
    assert {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*.npy")} == arrays
    check(datasets, megatron_build(config_of(tmp_path / "expected", **options), SIZES))
    with pytest.MonkeyPatch.context() as patch:  # the new marker counts: nothing is built together
        patch.setattr(MegablendDatasetBuilder, "_build_together", None)
        assert len(build(cls, tmp_path / "cache", options)) == 3


@pytest.mark.parametrize("cls", CLASSES)
def test_a_pair_that_is_replaced_between_a_jobs_start_and_its_first_sample(
    tmp_path: Path, options: dict[str, Any], cls: type[Any]
) -> None:
    build(cls, tmp_path / "cache", options)
    datasets = build(cls, tmp_path / "cache", options)
    documents = draw_documents(1, 30)
    write_word(tmp_path / "1", "megatron", [*documents[1:], documents[0]])
    with pytest.raises(ChangedFileError, match="was replaced or written to after this job began"):
        list(datasets[0])


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("is_built", [False, True])
def test_a_bin_whose_copying_was_interrupted(
    tmp_path: Path, options: dict[str, Any], cls: type[Any], is_built: bool
) -> None:
    """A cache that is made and one that is met refuse it when the job starts."""
    if is_built:
        build(cls, tmp_path / "cache", options)
    path = Path(f"{options['blend'][0][1]}.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptFileError, match=rf"is outside the \.bin of {len(whole) - 1} bytes"):
        build(cls, tmp_path / "cache", options)
    path.write_bytes(whole)
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    check(build(cls, tmp_path / "cache", options), expected)


def test_data_that_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    """Another request has built arrays of both meanwhile: the marker of the first one is of the data that is back."""
    other = [SIZES[0], SIZES[1] + 2, 0]
    build(GPTDataset, tmp_path / "cache", options)
    rewrite(tmp_path / "1", 1)
    expected = megatron_build(config_of(tmp_path / "expected", **options), other)
    check(build(GPTDataset, tmp_path / "cache", options, other), expected)
    write_word(tmp_path / "1", "megatron", draw_documents(1, 30))
    expected = megatron_build(config_of(tmp_path / "back", **options), SIZES)
    check(build(GPTDataset, tmp_path / "cache", options), expected)


def test_a_build_that_fails_leaves_nothing_outdated(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    build(GPTDataset, cache, options)
    rewrite(tmp_path / "1", 2)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_cache, "build_share", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(config_of(cache, **options), SIZES)
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    # Megatron takes what is there
    check(megatron_build(config_of(cache, **options), SIZES), expected)
    check(build(GPTDataset, cache, options), expected)


def fill_until_the_marker(cache: Path, options: dict[str, Any]) -> None:
    """A build that is killed when all arrays are there."""

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_cache, "write_marker", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(config_of(cache, **options), SIZES)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_killed_build_says_what_it_read(
    tmp_path: Path, options: dict[str, Any], is_first: bool
) -> None:
    """Its arrays are not taken for those of other data."""
    cache = tmp_path / "cache"
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    if not is_first:
        build(GPTDataset, cache, options)
    rewrite(tmp_path / "1", 5)
    fill_until_the_marker(cache, options)
    # A second build makes what the first one had left
    for path in sorted(cache.glob("*-train-description.txt"))[:2]:
        path.unlink()
    fill_until_the_marker(cache, options)
    write_word(tmp_path / "1", "megatron", draw_documents(1, 30))
    check(build(GPTDataset, cache, options), expected)


def test_a_killed_build_is_continued(tmp_path: Path, options: dict[str, Any]) -> None:
    fill_until_the_marker(tmp_path / "cache", options)
    assert prepare(config_of(tmp_path / "cache", **options), SIZES).missing == frozenset()


def test_a_marker_does_not_outlive_arrays_that_were_built_again(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Descriptions were lost, and another request has built the arrays out of other data meanwhile."""
    cache = tmp_path / "cache"
    other = [SIZES[0], SIZES[1] + 2, 0]
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    build(GPTDataset, cache, options)
    for path in cache.glob("*-train-description.txt"):
        path.unlink()
    rewrite(tmp_path / "1", 6)
    build(GPTDataset, cache, options, other)
    write_word(tmp_path / "1", "megatron", draw_documents(1, 30))
    check(build(GPTDataset, cache, options), expected)


def test_a_marker_that_does_not_say_what_arrays_were_made_of(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    cache = tmp_path / "cache"
    build(GPTDataset, cache, options)
    (marker,) = (cache / ".megablend").glob("whole-*.json")
    content = json.loads(marker.read_text().rpartition("\n")[0])
    del content["made_of"]
    completion_marker._write_content(marker, content)
    assert prepare(config_of(cache, **options), SIZES).missing == frozenset()
    completion_marker._write_content(marker, content)
    rewrite(tmp_path / "1", 7)
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    check(build(GPTDataset, cache, options), expected)


@pytest.mark.parametrize("extra", [False, True])
def test_settings_that_megatrons_names_leave_out(
    tmp_path: Path, options: dict[str, Any], extra: bool
) -> None:
    build(GPTDataset, tmp_path / "cache", options, add_extra_token_to_sequence=extra)
    found = build(GPTDataset, tmp_path / "cache", options, add_extra_token_to_sequence=not extra)
    expected = megatron_build(
        config_of(tmp_path / "expected", **options, add_extra_token_to_sequence=not extra), SIZES
    )
    check(found, expected)
    for path in (tmp_path / "expected").glob("*.npy"):
        assert (tmp_path / "cache" / path.name).read_bytes() == path.read_bytes()


def test_what_is_not_outdated_stays(tmp_path: Path, options: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    prepare(config_of(cache, **options), SIZES)
    before = {path.name: path.stat().st_ino for path in cache.glob("*_index.npy")}
    rewrite(tmp_path / "1", 3)
    done = prepare(config_of(cache, **options), SIZES)
    assert any("indices were built from other data or settings" in note for note in done.notes)
    after = {path.name: path.stat().st_ino for path in cache.glob("*_index.npy")}
    same = {name for name, inode in before.items() if after.get(name) == inode}
    assert same
    assert {name.partition("-")[0] for name in after.keys() - same} == {
        base.partition("-")[0] for base in done.missing
    }
    assert prepare(config_of(cache, **options), SIZES).missing == frozenset()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(("number", "suffix"), [(0, ".bin"), (1, ".bin"), (1, ".idx"), (2, ".bin")])
def test_a_file_that_is_missing(
    tmp_path: Path, options: dict[str, Any], cls: type[Any], number: int, suffix: str
) -> None:
    build(cls, tmp_path / "cache", options)
    path = Path(f"{options['blend'][0][number]}{suffix}")
    away = path.rename(f"{path}.away")
    with pytest.raises(MissingFileError, match=f"{path}: no such file"):
        build(cls, tmp_path / "cache", options)
    away.rename(path)
    build(cls, tmp_path / "cache", options)


def rewrite_and_stop(cache: Path, options: dict[str, Any], folder: Path, name: str) -> None:
    """A build out of other data that is killed when `completion_marker` has called a function the first time."""
    rewrite(folder, 2)
    function = getattr(completion_marker, name)

    def stop(*args: Any) -> None:
        function(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion_marker, name, stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config_of(cache, **options), SIZES)


@pytest.mark.parametrize("name", ["_write_content", "flush_folder"])
def test_a_build_that_is_killed_when_it_begins(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    cache = tmp_path / "cache"
    prepare(config_of(cache, **options), SIZES)
    rewrite_and_stop(cache, options, tmp_path / "1", name)
    check_arrays(cache, tmp_path / "expected", options)


def check_arrays(cache: Path, expected: Path, options: dict[str, Any]) -> None:
    """After another build, the arrays are those that Megatron makes of the data."""
    build(GPTDataset, cache, options)
    megatron_build(config_of(expected, **options), SIZES)
    for path in expected.glob("*.npy"):
        assert (cache / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_copy_whose_files_have_other_times(
    tmp_path: Path, options: dict[str, Any], reverse: bool
) -> None:
    """Which marker is the newest one does not depend on the order in which `cp -r` has copied them."""
    cache = tmp_path / "cache"
    other = [SIZES[0], SIZES[1] + 2, 0]
    prepare(config_of(cache, **options), SIZES)
    rewrite(tmp_path / "1", 2)
    prepare(config_of(cache, **options), SIZES)
    prepare(config_of(cache, **options), other)
    markers = sorted(
        (cache / ".megablend").glob("whole-*"),
        key=lambda path: path.stat().st_mtime_ns,
        reverse=reverse,
    )
    assert len(markers) > 1
    for time, path in enumerate(markers):
        os.utime(path, (time, time))
    write_word(tmp_path / "1", "megatron", draw_documents(1, 30))
    check_arrays(cache, tmp_path / "expected", options)


def run_before(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Run something once, before `build_cache` calls a function the next time."""
    function = getattr(build_cache, name)

    def both(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(build_cache, name, function)
        act()
        return function(*args, **options)

    monkeypatch.setattr(build_cache, name, both)


def test_data_that_is_replaced_during_a_build(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker does not count: it was made of the files that were counted."""
    run_before(monkeypatch, "write_marker", lambda: rewrite(tmp_path / "1", 2))
    prepare(config_of(tmp_path / "cache", **options), SIZES)
    check_arrays(tmp_path / "cache", tmp_path / "expected", options)


def test_another_build_while_this_one_waits(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found out before the lock was held is found out again."""
    cache = tmp_path / "cache"
    prepare(config_of(cache, **options), SIZES)
    next(cache.glob("*-BlendedDataset-train-description.txt")).unlink()

    def act() -> None:
        rewrite(tmp_path / "1", 2)
        prepare(config_of(cache, **options), SIZES)

    run_before(monkeypatch, "_open_cache", act)
    assert prepare(config_of(cache, **options), SIZES).missing == frozenset()
    write_word(tmp_path / "1", "megatron", draw_documents(1, 30))
    check_arrays(cache, tmp_path / "expected", options)


def test_a_marker_is_written_before_another_build_begins(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    others = {"add_extra_token_to_sequence": False}
    monkeypatch.setattr(build_lock, "WAIT_SECONDS", 0.0)

    def act() -> None:
        with pytest.raises(CacheError, match="another build holds the cache"):
            prepare(config_of(cache, **options, **others), SIZES)

    run_before(monkeypatch, "write_marker", act)
    prepare(config_of(cache, **options), SIZES)


def test_what_is_found_complete_is_not_vouched_for_once_another_build_has_begun(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one may replace the arrays that were found."""
    cache = tmp_path / "cache"
    prepare(config_of(cache, **options), SIZES)
    for path in (cache / ".megablend").glob("whole-*"):
        path.unlink()
    begun = cache / ".megablend" / "whole-other.json.begun"
    run_before(
        monkeypatch,
        "find_outdated",
        lambda: completion_marker._write_content(
            begun, {"artefacts": [], "made_of": [], "number": 7}
        ),
    )
    prepare(config_of(cache, **options), SIZES)
    assert list((cache / ".megablend").glob("whole-*")) == [begun]

"""When the builder builds, when it only opens, and when it leaves the work to Megatron."""

from __future__ import annotations

import os
import random
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from megablend.errors import CacheError, ConfigError, CorruptFileError, MissingFileError
from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset, compat, prepare
from megablend.megatron.plugin import probe
from megablend.storage.descriptors import shared_pool
from tests.megatron.plugin_data import (
    assert_same_samples,
    draw_documents,
    environment,
    known,
    plugin_config,
    write_word,
)
from tests.megatron.reference import config_of, megatron_build
from tests.pairs import contents, write_pair
from tests.preloaded import python

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.filterwarnings("ignore:The pad token id:UserWarning"),
]
SIZES = [200, 20, 10]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    words = [
        write_word(tmp_path / str(seed), "megatron", draw_documents(seed, 60)) for seed in range(2)
    ]
    return {"blend": (words, [0.4, 0.6]), "split": "80,15,5"}


def build(cls: type[Any], config: Any, sizes: Any = SIZES) -> list[Any]:
    return MegablendDatasetBuilder(cls, sizes, lambda: True, config).build()


def test_what_prepare_has_filled_is_only_opened(tmp_path: Path, options: dict[str, Any]) -> None:
    config = config_of(tmp_path / "cache", **options)
    prepare(config, SIZES)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    build(GPTDataset, config)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before
    (tmp_path / "cache").rename(tmp_path / "moved")
    build(GPTDataset, config_of(tmp_path / "moved", **options))
    moved = {
        tmp_path / "cache" / path.relative_to(tmp_path / "moved"): path
        for path in (tmp_path / "moved").rglob("*")
    }
    assert {path: now.stat().st_mtime_ns for path, now in moved.items()} == before


FORTRAN = np.asfortranarray(np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda path: path.write_bytes(b"x" * 300),
            r"not a \.npy file \(.*\); remove it and rebuild the cache",
        ),
        (
            lambda path: np.save(path, FORTRAN),
            r"Fortran order .*expected .* C order and 128: remove it and rebuild the",
        ),
    ],
)
def test_an_array_that_is_damaged_while_it_is_used(
    tmp_path: Path, options: dict[str, Any], damage: Callable[[Path], Any], says: str
) -> None:
    config = plugin_config(tmp_path / "cache", **options)

    def read(opened: list[Any]) -> list[list[int]]:
        return [dataset[0]["tokens"].tolist() for dataset in opened[0].datasets]

    expected = read(build(MegablendGPTDataset, config))
    opened = build(MegablendGPTDataset, config)
    path = next((tmp_path / "cache").glob("*-MegablendGPTDataset-train-shuffle_index.npy"))
    damage(path)
    with pytest.raises(CorruptFileError, match=says) as caught:
        read(opened)
    Path(str(caught.value).partition(":")[0]).unlink()
    assert read(build(MegablendGPTDataset, config)) == expected


def test_no_idx_is_read_twice(tmp_path: Path, options: dict[str, Any]) -> None:
    """On a hit the lengths are not even looked at."""
    config = plugin_config(tmp_path / "cache", **options)
    build(MegablendGPTDataset, config)
    for prefix in options["blend"][0]:
        path = Path(f"{prefix}.idx")
        state = path.stat()
        path.write_bytes(bytes(state.st_size))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    shared_pool("local", 0)
    train = build(MegablendGPTDataset, config)[0]
    with pytest.raises(CorruptFileError, match=r"\.idx at byte 0: "):
        train[0]


@pytest.mark.parametrize("num_documents", [30, 60, 90])
def test_a_cache_of_data_that_was_replaced_is_built_again(
    tmp_path: Path, options: dict[str, Any], num_documents: int
) -> None:
    config = config_of(tmp_path / "cache", **options)
    build(GPTDataset, config)
    write_word(tmp_path / "1", "megatron", draw_documents(7, num_documents))
    expected = megatron_build(config_of(tmp_path / "expected", **options), SIZES)
    for found, split in zip(build(GPTDataset, config), expected, strict=True):
        assert_same_samples(found, split)


@pytest.mark.parametrize(
    ("cls", "harm"),
    [(GPTDataset, "truncated"), (GPTDataset, "removed"), (MegablendGPTDataset, "removed")],
)
def test_a_damaged_cache_is_mended(
    tmp_path: Path, options: dict[str, Any], cls: type[Any], harm: str
) -> None:
    make = config_of if cls is GPTDataset else plugin_config
    expected = build(cls, make(tmp_path / "expected", **options))
    whole = {path.name: path.read_bytes() for path in (tmp_path / "expected").glob("*.npy")}
    build(cls, make(tmp_path / "cache", **options))
    victims = sorted((tmp_path / "cache").glob("*sample_index.npy"))
    for path in victims:
        if harm == "removed":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-3])
    found = build(cls, make(tmp_path / "cache", **options))
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.npy")} == whole
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_samples(ours, theirs)


def test_flags_that_megatrons_names_leave_out_are_told_apart(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    options["blend"] = (options["blend"][0][:1], None)
    first = build(GPTDataset, config_of(tmp_path / "cache", **options), [200, None, 0])[1]
    kept = {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False}
    second = build(GPTDataset, config_of(tmp_path / "cache", **options, **kept), [200, None, 0])[1]
    theirs = megatron_build(config_of(tmp_path / "theirs", **options, **kept), [200, None, 0])[1]
    assert len(first) < len(second)
    assert_same_samples(second, theirs)


def test_a_whole_cache_may_be_read_only(tmp_path: Path, options: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    build(GPTDataset, config_of(cache, **options))
    for marker in (cache / ".megablend").glob("whole-*"):
        marker.unlink()
    mount = f"mount --make-rprivate / && mount --bind {cache} {cache} && mount -o remount,ro,bind {cache}"
    code = f"""
import ctypes, subprocess, sys, warnings
if ctypes.CDLL(None).unshare(0x20000) or subprocess.run({mount!r}, shell=True).returncode:  # CLONE_NEWNS
    sys.exit(77)
warnings.simplefilter("ignore")
import tests.eager
from pathlib import Path
from megatron.core.datasets.gpt_dataset import GPTDataset
from megablend.errors import CacheError
from megablend.megatron import MegablendDatasetBuilder
from tests.megatron.reference import config_of
cache = Path({str(cache)!r})
try:
    (cache / "file").touch()
    sys.exit("the cache is not read-only")
except OSError:
    pass
for sizes in ({SIZES}, [201, 20, 10]):
    config = config_of(cache, **{options!r})
    try:
        print(len(MegablendDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]))
    except CacheError as error:
        print(error)
"""
    command = [*python("megatron"), "-c", code]
    result = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    if result.returncode == 77:
        pytest.skip("no right to mount")
    length, complaint = result.stdout.splitlines()
    assert length == "200"
    assert "cannot write the cache (Read-only file system)" in complaint


def test_an_unknown_version_that_fits_is_used_and_named_in_the_log(
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("megablend.megatron.plugin.builder.installed_version", lambda: "0.99.0")
    build(GPTDataset, config_of(tmp_path / "ours", **options))
    assert (tmp_path / "ours" / ".megablend").exists()
    assert [
        record.name
        for record in caplog.records
        if "has not been tested with megatron-core 0.99.0" in record.message
    ] == ["megablend"]
    caplog.clear()
    monkeypatch.undo()
    build(GPTDataset, config_of(tmp_path / "ours", **options))
    assert not [record for record in caplog.records if record.name == "megablend"]


def test_a_version_that_does_not_fit_goes_megatrons_way(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "megablend.megatron.plugin.probe.known_misfit", lambda builder: "GPTDataset has no __len__"
    )
    for fast in (False, True):
        monkeypatch.setattr(
            "megablend.megatron.plugin.builder.assumes_whole_cache", lambda config, fast=fast: fast
        )
        with pytest.warns(
            RuntimeWarning, match=r"GPTDataset has no __len__: Megatron builds the datasets itself"
        ):
            found = build(GPTDataset, config_of(tmp_path / "ours", **options))
        with pytest.raises(
            ConfigError,
            match=r"MegablendGPTDataset does not work with megatron-core .*no __len__; use",
        ):
            build(MegablendGPTDataset, plugin_config(tmp_path / "tried", **options))
    theirs = megatron_build(config_of(tmp_path / "theirs", **options), SIZES)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert not (tmp_path / "ours" / ".megablend").exists()
    for one, other in zip(found, theirs, strict=True):
        assert_same_samples(one, other)


@pytest.mark.parametrize("order", ["megatron", "block"])
def test_a_setting_that_is_not_known_and_on_is_left_to_megatron(
    order: str, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error where Megatron cannot read the data."""
    monkeypatch.setattr(compat, "_OTHERS", compat._OTHERS - {"num_dataset_builder_threads"})
    build(GPTDataset, config_of(tmp_path / "off", **options))
    build(MegablendGPTDataset, plugin_config(tmp_path / "off", **options, order=order))
    with pytest.warns(
        RuntimeWarning, match=r"settings that megablend does not know: num_dataset_builder_threads"
    ):
        build(GPTDataset, config_of(tmp_path / "on", **options, num_dataset_builder_threads=2))
    with pytest.raises(
        ConfigError,
        match=r"MegablendGPTDataset: megatron-core \S+ has settings that megablend does not know: "
        "num_dataset_builder_threads; leave them at their defaults",
    ):
        build(
            MegablendGPTDataset,
            plugin_config(tmp_path / "ours", **options, order=order, num_dataset_builder_threads=2),
        )
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("change", "message"), [(-1, "says 59: make that file"), (None, "not list")]
)
def test_numbers_of_sequences_agree_with_the_files(
    tmp_path: Path, options: dict[str, Any], change: int | None, message: str
) -> None:
    """Those of the second prefix, which is opened when it is first used."""
    first, second = options["blend"][0]
    counts = {first: [60, 61], second: [60, 61]}
    given = known({**options, "sequences_per_dataset": counts})
    build(MegablendGPTDataset, plugin_config(tmp_path / "cache", **given))
    del counts[second]
    if change is not None:
        counts[second] = [60 + change, 61 + change]
    with pytest.raises(ConfigError, match=rf"{second}\.idx has 60 sequences, but .* {message}"):
        build(MegablendGPTDataset, plugin_config(tmp_path / "cache", **given))


class OtherDataset(GPTDataset):  # type: ignore[misc]
    """A class of the user's own."""


@pytest.mark.parametrize("cls", [GPTDataset, OtherDataset])
def test_optional_arguments_of_newer_builders_are_passed_on(
    cls: type[Any], tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By us and, where the datasets are left to it, to Megatron's own builder."""
    stages = []
    made = BlendedMegatronDatasetBuilder.__init__

    def init(
        self: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any, stage: int = 0
    ) -> None:
        stages.append(stage)
        made(self, cls, sizes, is_built_on_rank, config)

    monkeypatch.setattr(BlendedMegatronDatasetBuilder, "__init__", init)
    config = config_of(tmp_path / "cache", **options)
    builders = [
        MegablendDatasetBuilder(cls, SIZES, lambda: True, config, stage=5),
        MegablendDatasetBuilder(cls, SIZES, lambda: True, config, 5),
    ]
    for builder in builders:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "OtherDataset", RuntimeWarning)
            assert len(builder.build()[0]) >= SIZES[0]
    assert stages == [5] * (2 if cls is GPTDataset else 4)
    assert probe.find_misfit(MegablendDatasetBuilder) is None


def test_what_is_not_ours_goes_megatrons_way(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.warns(RuntimeWarning, match="OtherDataset is not a class that megablend builds"):
        assert (
            type(build(OtherDataset, config_of(tmp_path / "a", **options))[0].datasets[0])
            is OtherDataset
        )
    with pytest.warns(RuntimeWarning, match="path_to_cache"):
        assert (
            len(build(GPTDataset, config_of(tmp_path / "b", **options, path_to_cache=None))[0])
            >= 200
        )
    with pytest.raises(ConfigError, match="path_to_cache"):
        build(MegablendGPTDataset, plugin_config(tmp_path / "c", **options, path_to_cache=None))


def test_what_cannot_be_built_is_told(tmp_path: Path, options: dict[str, Any]) -> None:
    blend = ([*options["blend"][0], str(tmp_path / "nowhere")], None)
    with pytest.raises(MissingFileError, match=r"nowhere\.bin: no such file"):
        build(GPTDataset, config_of(tmp_path / "cache", **options | {"blend": blend}))
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot write the cache"):
        build(GPTDataset, config_of(tmp_path / "file", **options))
    with pytest.raises(ConfigError, match="matches no file"):
        build(
            MegablendGPTDataset,
            plugin_config(tmp_path / "d", **options | {"blend": (["parquet:/no/*.parquet"], None)}),
        )


CLASSES = [(GPTDataset, config_of), (MegablendGPTDataset, plugin_config)]


@pytest.mark.parametrize(("cls", "make"), CLASSES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"blend": ([Path("/a")], None)},
            r"a blend has the entry .*Path\('/a'\); expected a string",
        ),
        ({"blend": (["/a.bin"], None)}, r"/a\.bin: Megatron adds \.bin and \.idx itself"),
        ({"weights": ["x", 1]}, r"a blend has the weights \['x', 1\]; expected numbers"),
        ({"weights": [1, None]}, r"a blend has the weights \[1, None\]; expected numbers"),
        ({"sequence_length": 16.0}, r"sequence_length is 16\.0; expected a whole number"),
        ({"random_seed": None}, r"random_seed is None; expected a whole number"),
        ({"mid_level_dataset_surplus": "0.1"}, r"surplus is '0\.1'; expected 0 or more"),
    ],
)
def test_settings_of_wrong_types_are_named(
    tmp_path: Path,
    options: dict[str, Any],
    cls: type[Any],
    make: Callable[..., Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    blend = (options["blend"][0], changes.get("weights"))
    others = {name: value for name, value in changes.items() if name != "weights"}
    config = make(tmp_path / "cache", **{**options, "blend": blend, **others})
    with pytest.raises(ConfigError, match=message):
        build(cls, config)


@pytest.mark.parametrize(("cls", "make"), CLASSES)
def test_sizes_are_whole_numbers_of_any_type(
    tmp_path: Path, options: dict[str, Any], cls: type[Any], make: Callable[..., Any]
) -> None:
    """Megatron writes the size of a prefix by itself into its description, by which files are named."""
    single = {**options, "blend": (options["blend"][0][:1], None)}
    expected = megatron_build(config_of(tmp_path / "theirs", **single), SIZES)
    config = make(tmp_path / "cache", **single)
    for sizes in (list(map(float, SIZES)), list(np.array(SIZES))):
        for ours, theirs in zip(build(cls, config, sizes), expected, strict=True):
            assert_same_samples(ours, theirs)
    for size in (200.5, "200", float("nan")):
        with pytest.raises(ConfigError, match=r"train: .* samples requested; expected a whole"):
            build(cls, config, [size, 20, 10])


@pytest.mark.parametrize("num_prefixes", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_many_prefixes_take_few_descriptors(tmp_path: Path, num_prefixes: int) -> None:
    rng = np.random.default_rng(0)
    prefixes = [
        write_pair(tmp_path / "data" / f"{i}_text", rng.integers(1, 9, 30))
        for i in range(num_prefixes)
    ]
    weights = rng.uniform(1, 10, num_prefixes).tolist()
    config = plugin_config(
        tmp_path / "cache", blend=(prefixes, weights), split="1", max_open_files=16
    )
    pool = shared_pool("local")
    before = len(list(Path("/proc/self/fd").iterdir())) - len(pool), _num_maps(tmp_path)
    train = build(MegablendGPTDataset, config, [4 * num_prefixes, 0, 0])[0]
    for k in random.Random(0).sample(range(len(train)), 2 * num_prefixes):
        assert torch.equal(train[k]["tokens"][1:], train[k]["labels"][:-1])
        assert len(list(Path("/proc/self/fd").iterdir())) - before[0] <= 16 + 4
    assert _num_maps(tmp_path) - before[1] <= 4
    assert len(pool) <= 16


def _num_maps(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))

"""Datasets of a blend that are opened on first use: Megatron's own from then on."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset

from megablend.errors import ChangedFileError, MissingFileError
from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset
from megablend.megatron.plugin import deferred
from tests.megatron.plugin_data import assert_same_samples, plugin_config
from tests.megatron.reference import config_of, megatron_build
from tests.pairs import write_pair
from tests.reader.test_forks import run_in_child

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.filterwarnings("ignore:The pad token id:UserWarning"),
]
SIZES = [200, 20, 10]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prefixes = [
        write_pair(tmp_path / "data" / f"{i}_text", rng.integers(0, 60, 100)) for i in range(4)
    ]
    return {"blend": (prefixes, [0.4, 0.3, 0.2, 0.1]), "split": "80,15,5"}


@pytest.fixture
def opened(tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The datasets on a hit, and `opened.calls`: how often Megatron's constructor ran since."""
    MegablendDatasetBuilder(
        GPTDataset, SIZES, lambda: True, config_of(tmp_path / "cache", **options)
    ).build()
    return MegablendDatasetBuilder(
        GPTDataset, SIZES, lambda: True, config_of(tmp_path / "cache", **options)
    ).build()


def count_opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls = []
    real = GPTDataset.build_low_level_dataset

    def counted(path: str, config: Any) -> Any:
        calls.append(path)
        return real(path, config)

    monkeypatch.setattr(GPTDataset, "build_low_level_dataset", staticmethod(counted))
    return calls


def test_a_hit_opens_one_prefix_and_the_others_when_they_are_used(
    tmp_path: Path, options: dict[str, Any], opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_opens(monkeypatch)
    config = config_of(tmp_path / "cache", **options)
    train, valid, test = MegablendDatasetBuilder(GPTDataset, SIZES, lambda: True, config).build()
    prefixes = options["blend"][0]
    assert calls == prefixes[:1]
    assert [len(each) for each in train.datasets] == [len(each) for each in opened[0].datasets]
    assert calls == prefixes[:1]
    third = train.datasets[2]
    assert isinstance(third, GPTDataset)
    assert third.dataset_path == prefixes[2]
    assert type(third) is not GPTDataset
    third[0]
    assert type(third) is GPTDataset
    assert calls == [prefixes[0], prefixes[2]]
    valid.datasets[2][0], test.datasets[2][0]
    assert calls == [prefixes[0], prefixes[2]]  # splits share their documents


@pytest.mark.parametrize("per_split", [False, True])
def test_samples_and_attributes_are_megatrons(
    tmp_path: Path, options: dict[str, Any], per_split: bool
) -> None:
    if per_split:
        options = {"blend_per_split": [options["blend"], (options["blend"][0][:2], None), None]}
    theirs = megatron_build(config_of(tmp_path / "theirs", **options), SIZES)
    for _ in range(2):  # built, then found
        config = config_of(tmp_path / "cache", **options)
        ours = MegablendDatasetBuilder(GPTDataset, SIZES, lambda: True, config).build()
        for found, expected in zip(ours, theirs, strict=True):
            if expected is None:
                assert found is None
                continue
            assert found.unique_description == expected.unique_description
            for one, other in zip(found.datasets, expected.datasets, strict=True):
                assert one.unique_identifiers.keys() == other.unique_identifiers.keys()
                assert len(one) == len(other)
                assert one.unique_description_hash == other.unique_description_hash
                assert vars(one).keys() == vars(other).keys()
                np.testing.assert_array_equal(one.indices, other.indices, strict=True)
            assert_same_samples(found, expected)


def test_many_threads_open_a_dataset_once(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_opens(monkeypatch)
    dataset = opened[0].datasets[1]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: dataset[k % 3]["tokens"].tolist(), range(64)))
    assert found == [dataset[k % 3]["tokens"].tolist() for k in range(64)]
    assert len(calls) == 1


def test_a_forked_child_opens_what_another_thread_was_opening(opened: list[Any]) -> None:
    dataset = opened[0].datasets[1]
    is_held = threading.Event()
    is_over = threading.Event()

    def hold() -> None:
        with deferred._opening.lock:
            is_held.set()
            is_over.wait()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        is_held.wait()
        try:
            assert run_in_child(lambda: "tokens" in dataset[0]) == 0
        finally:
            is_over.set()


@pytest.mark.parametrize("use_first", [False, True])
def test_spawned_workers_get_the_same(opened: list[Any], use_first: bool) -> None:
    dataset = opened[0].datasets[3]
    if use_first:
        dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert type(copy) is GPTDataset or not use_first
    assert_same_samples(copy, dataset)
    assert type(copy) is type(dataset) is GPTDataset


def test_what_the_class_lacks_is_an_attribute_error(opened: list[Any]) -> None:
    dataset = opened[0].datasets[3]
    assert not hasattr(dataset, "__array__")
    assert type(dataset) is not GPTDataset
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        dataset.no_such  # noqa: B018


def test_what_is_set_before_the_first_sample_is_kept(
    tmp_path: Path, options: dict[str, Any], opened: list[Any]
) -> None:
    """Samples are made with it, too; the class, attributes that are properties until then, and deletion are no exceptions."""

    class Own(GPTDataset):  # type: ignore[misc]
        """A class of the user's."""

    first, expected = (
        megatron_build(config_of(tmp_path / "theirs", **options), SIZES)[0].datasets
        for _ in range(2)
    )
    datasets = opened[0].datasets
    pad = int(first[1][0]["labels"][0])
    assert type(datasets[1]) is not GPTDataset
    for dataset in (datasets[1], expected[1]):
        dataset._pad_token_id = pad
        dataset.tag = "x"
        assert (dataset[0]["loss_mask"] == 0).any()
        assert (dataset._pad_token_id, dataset.tag) == (pad, "x")
    assert_same_samples(datasets[1], expected[1])
    datasets[2].unique_identifiers = {}
    assert datasets[2].unique_identifiers == {}
    datasets[3].__class__ = Own
    assert type(datasets[3]) is Own
    assert_same_samples(datasets[3], expected[3])
    del opened[1].datasets[2].num_samples
    assert not hasattr(opened[1].datasets[2], "num_samples")


def test_what_is_put_into_its_dict_before_the_first_sample_is_kept(opened: list[Any]) -> None:
    dataset = opened[0].datasets[3]
    vars(dataset)["tag"] = "x"
    dataset[0]
    assert dataset.tag == "x"
    assert not vars(dataset).keys() & {"_opener", "_length"}


def test_other_identifiers_are_opened_at_once(
    tmp_path: Path, options: dict[str, Any], opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a version of Megatron that identifies datasets in another way."""
    monkeypatch.setattr("megablend.megatron.plugin.builder.identifiers", lambda dataset: {})
    config = config_of(tmp_path / "cache", **options)
    train = MegablendDatasetBuilder(GPTDataset, SIZES, lambda: True, config).build()[0]
    assert {type(each) for each in train.datasets} == {GPTDataset}


def test_our_own_class(tmp_path: Path, options: dict[str, Any]) -> None:
    for _ in range(2):
        config = plugin_config(tmp_path / "cache", **options)
        ours = MegablendDatasetBuilder(MegablendGPTDataset, SIZES, lambda: True, config).build()[0]
    assert type(ours.datasets[2]) is not MegablendGPTDataset
    theirs = megatron_build(config_of(tmp_path / "theirs", **options), SIZES)[0]
    assert_same_samples(ours, theirs)
    assert type(ours.datasets[2]) is MegablendGPTDataset


def test_numbers_are_shared() -> None:
    few = deferred._numbers(5)
    many = deferred._numbers(9)
    assert many[:9].tolist() == list(range(9))
    assert few[:5].tolist() == list(range(5))
    assert np.shares_memory(deferred._numbers(3), many)


@pytest.mark.parametrize("copies", [False, True], ids=["same process", "sent to a worker"])
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            "rewritten",
            ChangedFileError,
            r"2_text\.bin: was replaced or written to after this job began .*modified since.*restart",
        ),
        (
            "longer",
            ChangedFileError,
            r"2_text\.idx: was replaced or written to .* bytes now, [\d,]+ before\): restart the job",
        ),
        (
            "removed",
            MissingFileError,
            r"2_text\.idx: is missing, but existed when this job built its datasets: restore",
        ),
    ],
)
def test_a_pair_that_is_replaced_before_its_first_sample_is_refused(
    tmp_path: Path,
    options: dict[str, Any],
    opened: list[Any],
    copies: bool,
    change: str,
    error: type,
    says: str,
) -> None:
    prefix = options["blend"][0][2]
    dataset = opened[0].datasets[2]
    if copies:
        dataset = pickle.loads(pickle.dumps(dataset))
    kept = {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (Path(f"{prefix}{end}") for end in (".idx", ".bin"))
    }
    for path, (content, _) in kept.items():
        if change == "removed":
            path.unlink()
        elif path.suffix == ".bin":
            path.write_bytes(bytes(len(content)))
    if change == "longer":
        write_pair(Path(prefix), [9] * 150)
    with pytest.raises(error, match=says):
        dataset[0]
    with pytest.raises(error, match=says):  # again
        dataset[0]
    for path, (content, modified) in kept.items():  # "restore the file"
        path.write_bytes(content)
        os.utime(path, ns=(modified, modified))
    dataset[0]
    assert type(dataset) is GPTDataset


def test_a_pair_that_is_replaced_while_it_is_opened_is_refused(
    options: dict[str, Any], opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GPTDataset.build_low_level_dataset

    def replaced_and_opened(path: str, config: Any) -> Any:
        write_pair(Path(path), [9] * 150)
        return real(path, config)

    monkeypatch.setattr(GPTDataset, "build_low_level_dataset", staticmethod(replaced_and_opened))
    with pytest.raises(
        ChangedFileError, match=r"2_text\.idx: was replaced or written to after this job began"
    ):
        opened[0].datasets[2][0]


def test_a_pair_that_is_replaced_while_the_cache_is_built_is_refused(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = options["blend"][0][1]
    real = MegablendDatasetBuilder._build_together

    def build_and_replace(self: Any, *args: Any) -> None:
        real(self, *args)
        write_pair(Path(prefix), [9] * 150)

    monkeypatch.setattr(MegablendDatasetBuilder, "_build_together", build_and_replace)
    with pytest.raises(
        ChangedFileError, match=r"1_text\.idx: was replaced or written to after this job began"
    ):
        MegablendDatasetBuilder(
            GPTDataset, SIZES, lambda: True, config_of(tmp_path / "cache", **options)
        ).build()
    monkeypatch.undo()
    ours = MegablendDatasetBuilder(
        GPTDataset, SIZES, lambda: True, config_of(tmp_path / "cache", **options)
    ).build()
    theirs = megatron_build(config_of(tmp_path / "theirs", **options), SIZES)
    assert_same_samples(ours[0], theirs[0])  # "restart the job"

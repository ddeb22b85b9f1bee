"""What the probe finds of the installed megatron-core, of it with something changed, and how long an outcome is kept."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from megablend.errors import CacheError
from megablend.megatron import MegablendDatasetBuilder, core
from megablend.megatron.plugin import megatron_code, probe
from megablend.megatron.plugin.documents import PairDocuments
from megablend.megatron.plugin.megatron_code import find_replaced_function

Change = Callable[[pytest.MonkeyPatch], None]


def test_the_installed_version_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert probe.find_misfit(MegablendDatasetBuilder) is None
    assert list(tmp_path.iterdir()) == []


def another_parameter(patch: pytest.MonkeyPatch) -> None:
    def build(
        self: Any, dataset_path: str, split: Any, sizes: Any, synchronize_ranks: bool, comm: Any
    ) -> None: ...

    patch.setattr(BlendedMegatronDatasetBuilder, "_build_megatron_dataset_splits", build)


def a_method_less(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(BlendedMegatronDatasetBuilder, "_build_megatron_dataset_splits")


def another_method(patch: pytest.MonkeyPatch) -> None:
    """Datasets are opened by one that the comparison does not override."""

    def get(self: Any, name: str) -> Any:
        if name == "build_generic_dataset":
            return MegablendDatasetBuilder.build_generic_dataset
        return object.__getattribute__(self, name)

    patch.setattr(BlendedMegatronDatasetBuilder, "__getattribute__", get)


def another_barrier(patch: pytest.MonkeyPatch) -> None:
    def _load(self: Any) -> None:
        torch.distributed.barrier()

    _load.__module__ = gpt_dataset.__name__
    patch.setattr(GPTDataset, "_load", _load, raising=False)


def a_wrapped_barrier(patch: pytest.MonkeyPatch) -> None:
    """Put there by another package."""
    query = GPTDataset._query_document_sample_shuffle_indices

    @functools.wraps(query)
    def wait(self: Any, idx: int) -> Any:
        torch.distributed.barrier()
        return query(self, idx)

    patch.setattr(GPTDataset, "_query_document_sample_shuffle_indices", wait)


def a_barrier_of_another_package(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GPTDataset, "__len__", lambda self: torch.distributed.barrier() or 7)


def another_shuffle(patch: pytest.MonkeyPatch) -> None:
    made = gpt_dataset._build_shuffle_index
    patch.setattr(gpt_dataset, "_build_shuffle_index", lambda *args: np.flip(made(*args)))


def another_name(patch: pytest.MonkeyPatch) -> None:
    keys = GPTDataset._key_config_attributes()
    patch.setattr(
        GPTDataset, "_key_config_attributes", staticmethod(lambda: [*keys, "eod_mask_loss"])
    )


def another_token(patch: pytest.MonkeyPatch) -> None:
    get = PairDocuments.get
    patch.setattr(
        PairDocuments,
        "get",
        lambda self, *args, **options: get(self, *args, **options) + np.uint16(1),
    )


def an_error(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, tokens: int) -> int:
        raise KeyError("epochs")

    patch.setattr(GPTDataset, "_get_num_epochs", fail)


@pytest.mark.usefixtures("distributed")
@pytest.mark.parametrize(
    ("change", "misfit"),
    [
        (
            another_parameter,
            r"^tiny datasets \(several_epochs\): TypeError: .* missing 1 required positional argument: 'comm'$",
        ),
        (
            a_method_less,
            r"^tiny datasets \(several_epochs\): AttributeError: .* no attribute '_build_megatron_dataset_splits'$",
        ),
        (
            another_method,
            r"^tiny datasets \(several_epochs\): Megatron does not open datasets by build_generic_dataset$",
        ),
        (another_barrier, r"^gpt_dataset\._load waits for other ranks$"),
        (
            a_wrapped_barrier,
            r"^gpt_dataset\._query_document_sample_shuffle_indices waits for other ranks$",
        ),
        (a_barrier_of_another_package, r"^gpt_dataset\.__len__ waits for other ranks$"),
        (
            another_shuffle,
            r"^tiny datasets \(several_epochs\): Megatron builds a different shuffle_index for GPTDataset$",
        ),
        (
            another_name,
            r"^tiny datasets \(several_epochs\): Megatron looks for \w+-(GPT|Blended)Dataset-(train|valid|test)-\S+ in addition",
        ),
        (
            another_token,
            r"^tiny datasets \(several_epochs\): sample 0 differs between MegablendGPTDataset",
        ),
        (an_error, r"^tiny datasets \(several_epochs\): KeyError: 'epochs'$"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_differs_is_named(
    change: Change, misfit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        change(patch)
        found = probe.find_misfit(MegablendDatasetBuilder)
    assert re.search(misfit, found or ""), found


@pytest.mark.usefixtures("distributed")
def test_ranks_that_may_not_write_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron builds on rank 0 alone."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    assert probe.find_misfit(MegablendDatasetBuilder) is None
    another_name(monkeypatch)
    found = probe.find_misfit(MegablendDatasetBuilder)
    assert re.fullmatch(
        r"tiny datasets \(several_epochs\): Megatron looks for \S+\.npy, which megablend does not write",
        found or "",
    )


def test_a_folder_that_cannot_be_written_is_no_misfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(CacheError, match="nowhere"):
        probe.find_misfit(MegablendDatasetBuilder)


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The probe's calls; outcomes are kept in a folder of the test."""
    calls: list[Any] = []
    monkeypatch.setattr(probe, "cache_dir", lambda: tmp_path)

    def find(builder: Any) -> None:
        calls.append(builder)

    monkeypatch.setattr(probe, "find_misfit", find)
    probe.known_misfit.cache_clear()
    yield calls
    probe.known_misfit.cache_clear()


def ask() -> str | None:
    """As another process of the node would."""
    probe.known_misfit.cache_clear()
    builder: Any = MegablendDatasetBuilder
    return probe.known_misfit(builder)


def test_an_outcome_is_kept_as_long_as_nothing_changes(
    tmp_path: Path, probed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [ask(), ask()] == [None] * 2
    assert len(probed) == 1
    (kept,) = tmp_path.iterdir()
    for damaged in (b"", b"[]", b"{}", kept.read_bytes()[:-9]):
        kept.write_bytes(damaged)
        assert ask() is None
    assert len(probed) == 5
    with monkeypatch.context() as patch:
        patch.setattr(probe, "installed_version", lambda: "0.99.0")
        assert [ask(), ask()] == [None] * 2
    assert len(probed) == 6
    copied = tmp_path / "source"
    copied.mkdir()
    (copied / "gpt_dataset.py").write_text("changed = True")
    with monkeypatch.context() as patch:
        patch.setattr(
            sys.modules[GPTDataset.__module__], "__file__", str(copied / "gpt_dataset.py")
        )
        assert [ask(), ask()] == [None] * 2
    assert len(probed) == 7
    assert ask() is None
    assert len(probed) == 7


def test_an_outcome_is_for_megatrons_own_functions(
    tmp_path: Path, probed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other packages replace is in no file of Megatron's: it is looked at in each process."""
    for number in (1, 2):
        with monkeypatch.context() as patch:
            another_name(patch)
            assert ask() is None
        assert len(probed) == number
        assert list(tmp_path.iterdir()) == []
    assert [ask(), ask()] == [None] * 2
    assert len(probed) == 3
    with monkeypatch.context() as patch:
        another_name(patch)
        assert ask() is None
    assert len(probed) == 4


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (a_wrapped_barrier, "gpt_dataset.GPTDataset._query_document_sample_shuffle_indices"),
        (another_name, "gpt_dataset.GPTDataset._key_config_attributes"),
        (another_shuffle, "gpt_dataset._build_shuffle_index"),
        (another_barrier, "gpt_dataset.GPTDataset._load"),
        (
            a_method_less,
            "blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder._build_megatron_dataset_splits",
        ),
    ],
)
def test_functions_that_were_replaced_are_found(
    change: Change, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_replaced_function() is None
    with monkeypatch.context() as patch:
        change(patch)
        assert find_replaced_function() == name
    assert find_replaced_function() is None


def test_a_module_without_its_file_is_not_known_to_be_megatrons_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for loader in (
        None,
        types.SimpleNamespace(get_code=lambda name: Path("/nowhere").read_bytes()),
    ):
        monkeypatch.setattr(gpt_dataset, "__loader__", loader)
        megatron_code._codes_of_file.cache_clear()
        assert find_replaced_function() == "gpt_dataset"
    monkeypatch.undo()
    megatron_code._codes_of_file.cache_clear()
    assert find_replaced_function() is None


def test_a_misfit_is_looked_for_again_by_the_next_process(
    tmp_path: Path, probed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have had a passing cause, such as a package that was being updated."""
    misfits = iter(["ImportError", None])
    monkeypatch.setattr(probe, "find_misfit", lambda builder: next(misfits))
    builder: Any = MegablendDatasetBuilder
    assert [ask(), probe.known_misfit(builder)] == ["ImportError"] * 2
    assert not list(tmp_path.iterdir())
    assert [ask(), ask()] == [None] * 2


def test_an_outcome_that_cannot_be_kept_serves_the_process(
    tmp_path: Path, probed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(probe, "cache_dir", lambda: tmp_path / "file")
    builder: Any = MegablendDatasetBuilder
    assert [probe.known_misfit(builder), probe.known_misfit(builder)] == [None] * 2
    assert len(probed) == 1


@pytest.fixture
def versions() -> Iterator[None]:
    core.installed_version.cache_clear()
    yield
    core.installed_version.cache_clear()


@pytest.mark.usefixtures("versions")
def test_a_source_checkout_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["megatron.core"], "__version__", "0.20.0")
    assert core.installed_version() == "0.20.0"


@pytest.mark.usefixtures("versions")
def test_a_version_that_nothing_tells_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delattr(sys.modules["megatron.core"], "__version__")
    monkeypatch.setattr(metadata, "version", none)
    assert core.installed_version() == "of unknown version"


def test_what_was_found_is_kept_for_this_code_alone() -> None:
    names = {f"{path.parent.name}/{path.name}" for path in probe._list_code()}
    assert {
        "datasets/gpt_dataset.py",
        "plugin/probe.py",
        "cache_builder/work_plan.py",
        "exact/shuffle.py",
    } <= names

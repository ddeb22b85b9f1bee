"""Samples through the plugin are those of Megatron's own builder, bit for bit, whatever the files' format."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset

from megablend.errors import CorruptFileError
from megablend.megatron import MegablendDatasetBuilder
from megablend.megatron.plugin.dataset import MegablendGPTDataset
from tests.megatron.plugin_data import assert_same_samples, draw_documents, known, plugin_config, write_word
from tests.megatron.reference import config_of, draw_case, megatron_build
from tests.pairs import contents

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.filterwarnings("ignore:The pad token id:UserWarning"),
]

EOD = 0
KINDS = ["megatron", "parquet", "arrow-lz4"]
FLAGS: list[dict[str, Any]] = [
    {},
    {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True, "create_attention_mask": True},
    {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False},
    {"drop_last_partial_validation_sequence": False, "create_attention_mask": True, "mmap_bin_files": False},
]


def build(cls: type[Any], config: Any, sizes: Sequence[int | None]) -> list[Any]:
    return MegablendDatasetBuilder(cls, sizes, lambda: True, config).build()


@pytest.mark.parametrize(
    "seed", [seed if seed < 12 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(100)]
)
def test_pairs_are_served_unchanged(tmp_path: Path, seed: int) -> None:
    case = draw_case(tmp_path / "data", seed)
    options = known(case.options)
    expected = megatron_build(config_of(tmp_path / "theirs", **options), case.sizes)
    found = build(GPTDataset, config_of(tmp_path / "ours", **options), case.sizes)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    pooled = build(MegablendGPTDataset, plugin_config(tmp_path / "ours", **options), case.sizes)
    for theirs, ours, bounded in zip(expected, found, pooled, strict=True):
        assert type(theirs) is type(ours)
        every = zip(theirs, ours, bounded, strict=True) if isinstance(theirs, list) else [(theirs, ours, bounded)]
        for one, other, third in every:
            if one is not None and len(one):
                assert_same_samples(other, one)
                assert_same_samples(third, one)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_samples(tmp_path: Path, kind: str, flags: dict[str, Any]) -> None:
    documents = [draw_documents(seed, 45) for seed in range(3)]
    if "drop_last_partial_validation_sequence" in flags:  # Megatron fails where empty documents follow the last token
        documents = [[document or [7] for document in each] for each in documents]
    pairs = [write_word(tmp_path / f"pair{i}", "megatron", each, EOD) for i, each in enumerate(documents)]
    words = [write_word(tmp_path / f"word{i}", kind, each, EOD) for i, each in enumerate(documents)]
    # Megatron makes a mask of a sample in a loop over its documents, which takes milliseconds; the other flags have many epochs.
    sizes, split = [150 if "reset_attention_mask" in flags else 400, 30, None], "80,15,5"
    for prefixes, blended in ((pairs, words), (pairs[:1], words[:1])):
        expected = megatron_build(config_of(tmp_path / "theirs", blend=(prefixes, None), split=split, **flags), sizes)
        config = plugin_config(tmp_path / "ours", blend=(blended, None), split=split, **flags)
        found = build(MegablendGPTDataset, config, sizes)
        assert [isinstance(each, BlendedDataset) for each in found] == [len(prefixes) > 1] * 3
        for theirs, ours in zip(expected, found, strict=True):
            assert_same_samples(ours, theirs)
            assert_same_samples(pickle.loads(pickle.dumps(ours)), theirs, step=11)


@pytest.mark.parametrize("option", [{"defer_npy_index_mmap": True}, {"fast_cache_load": True}])
@pytest.mark.parametrize("cls", [GPTDataset, MegablendGPTDataset])
def test_a_whole_cache_may_be_opened_without_a_look(tmp_path: Path, cls: type[Any], option: dict[str, bool]) -> None:
    prefix, sizes = write_word(tmp_path / "pair", "megatron", draw_documents(5)), [300, 20, 0]
    blends = {"blend_per_split": [([prefix, prefix], [0.3, 0.7]), ([prefix], None), None]}
    make = config_of if cls is GPTDataset else plugin_config
    expected = build(cls, make(tmp_path / "cache", **blends), sizes)
    found = build(cls, make(tmp_path / "cache", **blends, **known(option)), sizes)
    for theirs, ours in zip(expected[:2], found[:2], strict=True):
        assert_same_samples(ours, theirs)


def test_deferred_arrays_are_not_there_before_the_first_sample(tmp_path: Path) -> None:
    prefix, sizes = write_word(tmp_path / "pair", "megatron", draw_documents(6)), [30, 0, 0]
    blend: dict[str, Any] = {"blend_per_split": [([prefix], None), None, None]}
    config = plugin_config(tmp_path / "cache", **blend, **known({"defer_npy_index_mmap": True}))
    eager = build(MegablendGPTDataset, plugin_config(tmp_path / "cache", **blend), sizes)[0]
    dataset = build(MegablendGPTDataset, config, sizes)[0]
    names = ("document_index", "sample_index", "shuffle_index")
    assert [getattr(dataset, name) for name in names] == [None] * 3
    assert len(dataset) == len(eager)
    for used in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert used[-1]["tokens"].tolist() == eager[-1]["tokens"].tolist()
        for name in names:
            assert np.array_equal(getattr(used, name), getattr(eager, name))
            assert np.array_equal(np.load(getattr(used, f"path_to_{name}")), getattr(eager, name))


def test_a_cache_that_is_built_anew_in_its_old_place_is_read_anew(tmp_path: Path) -> None:
    """By one process, over other documents of the same name."""
    for seed in (7, 8):
        documents = draw_documents(seed)
        prefix = write_word(tmp_path / "pair", "megatron", documents)
        config = plugin_config(tmp_path / "cache", blend=([prefix], None), split="1")
        dataset = build(MegablendGPTDataset, config, [30, 0, 0])[0]
        expected = megatron_build(config_of(tmp_path / f"theirs{seed}", blend=([prefix], None), split="1"), [30, 0, 0])
        assert_same_samples(dataset, expected[0])
        shutil.rmtree(tmp_path / "cache")
        shutil.rmtree(tmp_path / "pair")


@pytest.mark.parametrize(
    "damaged", ["pair.bin", "pair.idx", "document_index.npy", "sample_index.npy", "shuffle_index.npy"]
)
def test_samples_that_are_read_together_report_a_file_that_ends_early(tmp_path: Path, damaged: str) -> None:
    prefix = write_word(tmp_path / "pair", "megatron", draw_documents(9))
    config = plugin_config(tmp_path / "cache", blend=([prefix], None), split="1")
    dataset = build(MegablendGPTDataset, config, [60, 0, 0])[0]
    numbers = list(range(60))
    assert len(dataset.__getitems__(numbers)) == 60
    assert dataset._plain
    (path,) = (each for each in tmp_path.rglob("*") if each.name.endswith(damaged))
    os.truncate(path, path.stat().st_size // 8)
    with pytest.raises(CorruptFileError, match=damaged):
        dataset.__getitems__(numbers)
    with pytest.raises(IndexError, match="shuffle_index"):
        dataset.__getitems__([len(dataset.shuffle_index)])


def test_samples_are_the_users_own_and_pads_are_masked(tmp_path: Path) -> None:
    documents = [[*document, 49_999, 5] for document in draw_documents(10)]  # a pad token in nearly every sample
    prefix = write_word(tmp_path / "pair", "megatron", documents)
    theirs = megatron_build(config_of(tmp_path / "theirs", blend=([prefix], None), split="1"), [60, 0, 0])[0]
    ours = build(MegablendGPTDataset, plugin_config(tmp_path / "ours", blend=([prefix], None), split="1"), [60, 0, 0])[
        0
    ]
    assert_same_samples(ours, theirs)
    assert ours._plain
    for sample in ours.__getitems__([3, 4, 3]):
        for name in ("tokens", "labels", "loss_mask"):
            sample[name].fill_(9)
    assert_same_samples(ours, theirs)

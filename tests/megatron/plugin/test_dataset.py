"""Samples through the plugin are those of Megatron's own builder, bit for bit, whatever the files' format."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset

from megablend.errors import CorruptFileError
from megablend.megatron import MegablendDatasetBuilder
from megablend.megatron.plugin.dataset import MegablendGPTDataset
from tests.cases import chequered
from tests.formats.writers import write_megatron
from tests.megatron.plugin_data import (
    assert_same_samples,
    draw_documents,
    known,
    plugin_config,
    write_word,
)
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
    {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "create_attention_mask": True,
    },
    {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False},
    {
        "drop_last_partial_validation_sequence": False,
        "create_attention_mask": True,
        "mmap_bin_files": False,
    },
]


def build(cls: type[Any], config: Any, sizes: Sequence[int | None]) -> list[Any]:
    return MegablendDatasetBuilder(cls, sizes, lambda: True, config).build()


@pytest.mark.parametrize(
    "seed",
    [seed if seed < 6 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(100)],
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
        every = (
            zip(theirs, ours, bounded, strict=True)
            if isinstance(theirs, list)
            else [(theirs, ours, bounded)]
        )
        for one, other, third in every:
            if one is not None and len(one):
                assert_same_samples(other, one)
                assert_same_samples(third, one)


@pytest.mark.parametrize(("kind", "flags"), chequered(list(KINDS), FLAGS))
def test_every_format_gives_the_same_samples(
    tmp_path: Path, kind: str, flags: dict[str, Any]
) -> None:
    documents = [draw_documents(seed, 45) for seed in range(3)]
    # Megatron fails where empty documents follow the last token
    if "drop_last_partial_validation_sequence" in flags:
        documents = [[document or [7] for document in each] for each in documents]
    pairs = [
        write_word(tmp_path / f"pair{i}", "megatron", each, EOD) for i, each in enumerate(documents)
    ]
    words = [write_word(tmp_path / f"word{i}", kind, each, EOD) for i, each in enumerate(documents)]
    # Megatron makes a mask of a sample in a loop over its documents, which takes milliseconds; the other flags have many epochs.
    sizes = [150 if "reset_attention_mask" in flags else 400, 30, None]
    split = "80,15,5"
    for prefixes, blended in ((pairs, words), (pairs[:1], words[:1])):
        expected = megatron_build(
            config_of(tmp_path / "theirs", blend=(prefixes, None), split=split, **flags), sizes
        )
        config = plugin_config(tmp_path / "ours", blend=(blended, None), split=split, **flags)
        found = build(MegablendGPTDataset, config, sizes)
        assert [isinstance(each, BlendedDataset) for each in found] == [len(prefixes) > 1] * 3
        for theirs, ours in zip(expected, found, strict=True):
            assert_same_samples(ours, theirs)
            assert_same_samples(pickle.loads(pickle.dumps(ours)), theirs, step=11)


@pytest.mark.parametrize("option", [{"defer_npy_index_mmap": True}, {"fast_cache_load": True}])
@pytest.mark.parametrize("cls", [GPTDataset, MegablendGPTDataset])
def test_a_whole_cache_may_be_opened_without_a_look(
    tmp_path: Path, cls: type[Any], option: dict[str, bool]
) -> None:
    prefix = write_word(tmp_path / "pair", "megatron", draw_documents(5))
    sizes = [300, 20, 0]
    blends = {"blend_per_split": [([prefix, prefix], [0.3, 0.7]), ([prefix], None), None]}
    make = config_of if cls is GPTDataset else plugin_config
    expected = build(cls, make(tmp_path / "cache", **blends), sizes)
    found = build(cls, make(tmp_path / "cache", **blends, **known(option)), sizes)
    for theirs, ours in zip(expected[:2], found[:2], strict=True):
        assert_same_samples(ours, theirs)


def test_deferred_arrays_are_not_there_before_the_first_sample(tmp_path: Path) -> None:
    prefix = write_word(tmp_path / "pair", "megatron", draw_documents(6))
    sizes = [30, 0, 0]
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
        expected = megatron_build(
            config_of(tmp_path / f"theirs{seed}", blend=([prefix], None), split="1"), [30, 0, 0]
        )
        assert_same_samples(dataset, expected[0])
        shutil.rmtree(tmp_path / "cache")
        shutil.rmtree(tmp_path / "pair")


@pytest.mark.parametrize(
    "damaged",
    ["pair.bin", "pair.idx", "document_index.npy", "sample_index.npy", "shuffle_index.npy"],
)
def test_samples_that_are_read_together_report_a_file_that_ends_early(
    tmp_path: Path, damaged: str
) -> None:
    prefix = write_word(tmp_path / "pair", "megatron", draw_documents(9))
    config = plugin_config(tmp_path / "cache", blend=([prefix], None), split="1")
    dataset = build(MegablendGPTDataset, config, [60, 0, 0])[0]
    numbers = list(range(60))
    assert len(dataset.__getitems__(numbers)) == 60
    assert dataset._reads_fast
    (path,) = (each for each in tmp_path.rglob("*") if each.name.endswith(damaged))
    os.truncate(path, path.stat().st_size // 8)
    with pytest.raises(CorruptFileError, match=damaged):
        dataset.__getitems__(numbers)
    with pytest.raises(IndexError, match="shuffle_index"):
        dataset.__getitems__([len(dataset.shuffle_index)])


def test_samples_are_the_users_own_and_pads_are_masked(tmp_path: Path) -> None:
    # A pad token in nearly every sample
    documents = [[*document, 49_999, 5] for document in draw_documents(10)]
    prefix = write_word(tmp_path / "pair", "megatron", documents)
    theirs = megatron_build(
        config_of(tmp_path / "theirs", blend=([prefix], None), split="1"), [60, 0, 0]
    )[0]
    ours = build(
        MegablendGPTDataset,
        plugin_config(tmp_path / "ours", blend=([prefix], None), split="1"),
        [60, 0, 0],
    )[0]
    assert_same_samples(ours, theirs)
    assert ours._reads_fast
    for several in (ours.__getitems__([3, 4, 3]), [ours[3], ours[3]]):
        own = [sample[name] for sample in several for name in ("tokens", "labels", "loss_mask")]
        for number, tensor in enumerate(own):
            tensor.fill_(number)
        assert [tensor.unique().tolist() for tensor in own] == [
            [number] for number in range(len(own))
        ]
    assert_same_samples(ours, theirs)


def test_samples_without_an_extra_token_have_no_last_label(tmp_path: Path) -> None:
    """Also where the first one that is read is followed by token 0, the label that is put there."""
    length = 16
    tokens = list(range(1, 10 * length))
    tokens[3 * length] = 0
    prefix = write_word(tmp_path / "pair", "megatron", [tokens])
    options: dict[str, Any] = {
        "blend": ([prefix], None),
        "split": "1",
        "add_extra_token_to_sequence": False,
    }
    theirs = megatron_build(config_of(tmp_path / "theirs", **options), [9, 0, 0])[0]
    ours = build(MegablendGPTDataset, plugin_config(tmp_path / "ours", **options), [9, 0, 0])[0]
    followed_by_0 = next(k for k in range(9) if theirs[k]["tokens"][-1] == 3 * length)
    assert ours[followed_by_0]["labels"][-1] == 0
    assert_same_samples(ours, theirs)


@pytest.mark.parametrize("second", ["uint16", "int16", "int32", "parquet"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_batches_of_a_blend(tmp_path: Path, second: str, has_mask: bool) -> None:
    """Of pairs of one token type, and not, and of a pair and another format."""
    most = 30_000 if second == "int16" else 50_000
    documents = [
        [[*document, 49_999, 5] for document in draw_documents(seed, 60)] for seed in (11, 12)
    ]
    documents[1] = [[token % most for token in document] for document in documents[1]]
    pairs = [
        write_word(tmp_path / f"{number}", "megatron", each)
        for number, each in enumerate(documents)
    ]
    write_megatron(tmp_path / "0" / "pair.bin", documents[0], dtype="uint16")
    words = list(pairs)
    if second == "parquet":
        words[1] = write_word(tmp_path / "other", second, documents[1])
    else:
        write_megatron(tmp_path / "1" / "pair.bin", documents[1], dtype=second)
    options: dict[str, Any] = {"split": "1", "create_attention_mask": has_mask}
    theirs = megatron_build(
        config_of(tmp_path / "theirs", blend=(pairs, [0.3, 0.7]), **options), [200, 0, 0]
    )[0]
    config = plugin_config(tmp_path / "ours", blend=(words, [0.3, 0.7]), **options)
    ours = build(MegablendGPTDataset, config, [200, 0, 0])[0]
    assert_same_samples(ours, theirs)
    assert [each._reads_fast for each in ours.datasets] == [True, second != "parquet"]
    assert all(len(ours.__getitems__([k, k + 1])) == 2 for k in range(0, 100, 2))
    assert [type(each["dataset_id"]) for each in ours.__getitems__([0, 1])] == [
        type(theirs[0]["dataset_id"])
    ] * 2


def test_the_first_request_of_a_blend_may_be_a_batch(tmp_path: Path) -> None:
    """Of none, too; and of a dataset it may be the padding sample."""
    words = [
        write_word(tmp_path / f"{number}", "megatron", draw_documents(number))
        for number in (16, 17)
    ]
    options: dict[str, Any] = {
        "blend": (words, None),
        "split": "1",
        **known({"defer_npy_index_mmap": True}),
    }
    blend = build(MegablendGPTDataset, plugin_config(tmp_path / "cache", **options), [60, 0, 0])[0]
    assert (blend.dataset_index, blend.__getitems__([])) == (None, [])
    assert [len(each["tokens"]) for each in blend.__getitems__([3, 4])] == [16, 16]
    assert blend.__getitems__([]) == []
    dataset = build(MegablendGPTDataset, plugin_config(tmp_path / "cache", **options), [60, 0, 0])[
        0
    ].datasets[1]
    assert not dataset[None]["loss_mask"].any()
    assert len(dataset[2]) == 4
    assert dataset._reads_fast


def test_numbers_of_samples_are_as_gptdataset_takes_them(tmp_path: Path) -> None:
    prefix = write_word(tmp_path / "pair", "megatron", draw_documents(13))
    dataset = build(
        MegablendGPTDataset,
        plugin_config(tmp_path / "cache", blend=([prefix], None), split="1"),
        [60, 0, 0],
    )[0]
    expected = dataset[7]["tokens"]
    for number in (
        7,
        np.int32(7),
        np.int64(7),
        np.uint64(7),
        7 - len(dataset.shuffle_index),
        torch.tensor(7),
    ):
        assert torch.equal(dataset[number]["tokens"], expected)
        assert torch.equal(dataset.__getitems__([number, 3])[0]["tokens"], expected)
    assert dataset._reads_fast
    padding, sample = dataset.__getitems__([None, 7])
    assert (padding["loss_mask"].any(), torch.equal(sample["tokens"], expected)) == (False, True)
    assert dataset.__getitems__([]) == []
    with pytest.raises(IndexError, match="only integers"):
        dataset.__getitems__([0.5, 1.5])


@pytest.mark.parametrize("kind", KINDS)
def test_megatrons_own_config_has_the_defaults_of_ours(tmp_path: Path, kind: str) -> None:
    """Training scripts and packages have config classes of their own."""
    blend = ([write_word(tmp_path / "words", kind, draw_documents(3))], None)
    own, ours = (
        build(MegablendGPTDataset, make(tmp_path / name, blend=blend, split="1"), [60, 0, 0])[0]
        for name, make in (("own", config_of), ("ours", plugin_config))
    )
    assert_same_samples(own, ours)


class Doubled(MegablendGPTDataset):
    """A user's own dataset."""

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        found = super().__getitem__(idx)
        return found | {"tokens": 2 * found["tokens"]}


class Shifted(MegablendGPTDataset):
    """Another."""

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        tokens, *others = super()._query_document_sample_shuffle_indices(idx)
        return (tokens + 1, *others)


@pytest.mark.parametrize(
    ("cls", "change"), [(Doubled, lambda tokens: 2 * tokens), (Shifted, lambda tokens: tokens + 1)]
)
def test_classes_of_the_user_are_asked_for_each_sample(
    tmp_path: Path, cls: type[Any], change: Any
) -> None:
    prefix = write_word(tmp_path / "pair", "megatron", draw_documents(14))
    plain, own = (
        build(
            each,
            plugin_config(tmp_path / each.__name__, blend=([prefix], None), split="1"),
            [60, 0, 0],
        )[0]
        for each in (MegablendGPTDataset, cls)
    )
    for _ in range(2):
        expected = [change(sample["tokens"]).tolist() for sample in plain.__getitems__([1, 5])]
        assert [sample["tokens"].tolist() for sample in own.__getitems__([1, 5])] == expected
        assert [own[k]["tokens"].tolist() for k in (1, 5)] == expected


def reversed_where_odd(tokens: Any) -> Any:
    """Reverse the tokens of some samples, as fill-in-the-middle changes some."""
    return tokens[::-1].copy() if tokens[0] % 2 else tokens


class Sometimes(MegablendGPTDataset):
    """A dataset that changes only some samples."""

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        tokens, *others = super()._query_document_sample_shuffle_indices(idx)
        return (reversed_where_odd(tokens), *others)


@pytest.mark.parametrize("how", ["subclass", "replaced method", "added method"])
def test_samples_are_asked_for_one_by_one_where_only_some_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    prefix = write_word(tmp_path / "pair", "megatron", draw_documents(14))
    config = plugin_config(tmp_path / "cache", blend=([prefix], None), split="1")
    plain = build(MegablendGPTDataset, config, [60, 0, 0])[0]
    texts = [plain._query_document_sample_shuffle_indices(k)[0] for k in range(60)]
    cls: type[Any] = MegablendGPTDataset
    if how == "subclass":
        cls = Sometimes
    elif how == "replaced method":
        query = GPTDataset._query_document_sample_shuffle_indices

        def _query(self: Any, idx: int) -> tuple[Any, ...]:
            tokens, *others = query(self, idx)
            return (reversed_where_odd(tokens), *others)

        monkeypatch.setattr(GPTDataset, "_query_document_sample_shuffle_indices", _query)
    else:

        def _getattribute(self: Any, name: str) -> Any:
            found = object.__getattribute__(self, name)
            if name != "_query_document_sample_shuffle_indices":
                return found
            return lambda idx: (reversed_where_odd(found(idx)[0]), *found(idx)[1:])

        monkeypatch.setattr(GPTDataset, "__getattribute__", _getattribute, raising=False)
    own = build(cls, config, [60, 0, 0])[0]
    unchanged_first = sorted(range(60), key=lambda k: int(texts[k][0]) % 2)
    assert {int(text[0]) % 2 for text in texts} == {0, 1}
    for k in unchanged_first:
        expected = reversed_where_odd(texts[k])[:-1].tolist()
        assert own[k]["tokens"].tolist() == expected
        assert own.__getitems__([k])[0]["tokens"].tolist() == expected


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("megablend.megatron.plugin.dataset", "installed_version", lambda: "0.99.0"),
        ("config", "inter_document_masking", True),
    ],
)
def test_samples_that_an_unknown_megatron_may_make_otherwise_are_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str, value: Any
) -> None:
    prefix = write_word(tmp_path / "pair", "megatron", draw_documents(15))
    config = plugin_config(tmp_path / "cache", blend=([prefix], None), split="1")
    dataset, other = (build(MegablendGPTDataset, config, [60, 0, 0])[0] for _ in range(2))
    if where == "config":
        other.config = copy.copy(config)
        setattr(other.config, name, value)
    else:
        monkeypatch.setattr(f"{where}.{name}", value)
    assert {"tokens", "labels", "loss_mask", "position_ids"} <= other[5].keys()
    assert other._reads_fast is False
    monkeypatch.undo()
    assert torch.equal(dataset[5]["tokens"], other[5]["tokens"])
    assert dataset._reads_fast

"""Page and row order behind GPTDataset's dict: megablend's own samples, with masks and padding of the installed GPTDataset."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megablend
from megablend.errors import ConfigError, DamagedCacheError, DataError, PlanError
from megablend.megatron import MegablendDatasetBuilder
from megablend.megatron.core import GPTDataset
from megablend.megatron.plugin.dataset import MegablendGPTDataset
from tests.megatron.plugin_data import draw_documents, known, plugin_config, write_word

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.filterwarnings("ignore:The pad token id:UserWarning"),
]

EOD = 0
SIZES: list[int | None] = [400, 30, 10]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    kinds = ["parquet", "arrow", "megatron"]
    return [
        write_word(tmp_path / kind, kind, draw_documents(seed), EOD)
        for seed, kind in enumerate(kinds)
    ]


def build(config: Any, sizes: list[int | None] = SIZES) -> list[Any]:
    return MegablendDatasetBuilder(MegablendGPTDataset, sizes, lambda: True, config).build()


def options(words: list[str], **others: Any) -> dict[str, Any]:
    common = {
        "blend": (words, [0.5, 0.2, 0.3]),
        "split": "80,15,5",
        "order": "page",
        "lanes": 4,
        "shuffle_window": 8,
    }
    return common | others


def expected(cache: Path, words: list[str], **others: Any) -> dict[str, Any]:
    """The same run as megablend's config."""
    paths = [word.partition("?")[0].partition(":")[2] or word for word in words]
    sources = [
        {
            "name": f"{i}",
            "path": path,
            "weight": weight,
            **({} if path in words else {"column": "ids", "append_eod": EOD}),
        }
        for i, (path, weight) in enumerate(zip(paths, ("0.5", "0.2", "0.3"), strict=True))
    ]
    return {
        "cache": str(cache),
        "sequence_length": 16,
        "seed": 1234,
        "samples": 400,
        "valid_samples": 30,
        "split": "80,15,5",
        "lanes": 4,
        "shuffle_window": 8,
        "sources": sources,
        **others,
    }


@pytest.mark.parametrize(
    ("refused", "says", "instead"),
    [
        (
            {"multiple_validation_sets": True},
            "order: page supports a single validation set; leave out multiple_validation_sets, or choose order: megatron",
            {},
        ),
        (
            {"drop_last_partial_validation_sequence": False},
            "order: page never makes partial sequences; leave drop_last_partial_validation_sequence at True, or choose order: m",
            {"drop_last_partial_validation_sequence": True},
        ),
    ],
)
def test_what_these_orders_do_not_have(
    tmp_path: Path, words: list[str], refused: dict[str, Any], says: str, instead: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=says):
        build(plugin_config(tmp_path / "cache", **options(words, **refused)))
    others: list[dict[str, Any]] = [instead, refused | {"order": "megatron", "random_seed": 3}]
    for number, each in enumerate(others):
        assert len(build(plugin_config(tmp_path / f"{number}", **options(words, **each)))[0]) >= 400


def test_a_class_of_the_user_is_refused(tmp_path: Path, words: list[str]) -> None:
    """It would not be asked for any sample."""

    class Own(MegablendGPTDataset): ...

    says = (
        "order: page makes the samples of MegablendGPTDataset, and Own would not be asked for any"
    )
    config = plugin_config(tmp_path / "cache", **options(words))
    with pytest.raises(ConfigError, match=says):
        MegablendDatasetBuilder(Own, SIZES, lambda: True, config).build()


def test_a_partial_sequence_that_megatron_cannot_keep(tmp_path: Path, words: list[str]) -> None:
    partial = options(
        words, order="megatron", random_seed=1, drop_last_partial_validation_sequence=False
    )
    says = r"cannot keep a partial sample after it: drop the last partial sequence, or use another seed$"
    with pytest.raises(PlanError, match=says):
        build(plugin_config(tmp_path / "cache", **partial))
    for change in ({"drop_last_partial_validation_sequence": True}, {"random_seed": 3}):
        assert build(plugin_config(tmp_path / "cache", **partial | change))[1]


@pytest.mark.parametrize("order", ["page", "row"])
def test_samples_are_megablends_own(tmp_path: Path, words: list[str], order: str) -> None:
    train, valid, _ = build(
        plugin_config(tmp_path / "cache", **options(words, order=order)), [400, 30, 0]
    )
    config = expected(tmp_path / "own", words, order=order)
    megablend.build(config)
    for found, split in ((train, "train"), (valid, "valid")):
        own = megablend.open(config, split)
        assert isinstance(found, GPTDataset)
        assert len(found) == len(own)
        for k in range(len(own)):
            ours = found[k]
            theirs = own[k]
            assert ours["dataset_id"] == theirs["dataset_id"]
            for name in ("tokens", "labels", "position_ids", "loss_mask"):
                assert torch.equal(ours[name], theirs[name]), (k, name)


@pytest.mark.parametrize("order", ["page", "row"])
def test_samples_that_are_asked_for_together(tmp_path: Path, words: list[str], order: str) -> None:
    config = plugin_config(
        tmp_path / "cache", **options(words, order=order), reset_position_ids=True
    )
    build(config)
    megablend.skip(tmp_path / "cache" / "megablend", 90, 110, batch_size=8, run="default")
    train = build(config)[0]
    reads = list[int]()
    read = train.dataset.sample

    def count_read(k: int) -> Any:
        reads.append(k)
        return read(k)

    train.dataset.sample = count_read
    questions: list[list[Any]] = [
        [0, 1, 2, 3],
        [87, 88, 399, 5, 5],
        [np.int64(7), None, 3],
        [None],
        [],
    ]
    for asked in questions:
        found = train.__getitems__(asked)
        assert reads == [0] * asked.count(None)
        for idx, sample in zip(asked, found, strict=True):
            expected = train[idx]
            assert sample.keys() == expected.keys()
            assert all(
                torch.equal(torch.as_tensor(sample[name]), torch.as_tensor(expected[name]))
                for name in expected
            )
        reads.clear()
    with pytest.raises(IndexError):
        train.__getitems__([0, 400])


def read_train(config: Any) -> list[list[int]]:
    train = build(config)[0]
    return [train[k]["tokens"].tolist() for k in range(0, len(train), 17)]


def flip_rows(path: Path) -> None:
    """Change rows of a table that is opened nevertheless, since only rows that are read are compared."""
    data = bytearray(path.read_bytes())
    for place in range(len(data) * 2 // 5, len(data) * 3 // 5):
        data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")])
@pytest.mark.parametrize(
    ("order", "table"),
    [
        ("row", "documents/*/starts.arrow"),
        ("row", "documents/*/manifest.json"),
        ("row", "generations/*/blocks.arrow"),
        ("page", "generations/*/files.arrow"),
        ("megatron", "generations/*/files.arrow"),
        ("megatron", "generations/*/blocks.arrow"),
        ("megatron", "generations/*/manifest.json"),
    ],
)
def test_a_job_builds_damaged_tables_again(
    tmp_path: Path, words: list[str], order: str, table: str, damage: Callable[[Path], Any]
) -> None:
    """In a copy of the cache, since this process keeps what it has opened."""
    before = read_train(plugin_config(tmp_path / "cache", **options(words, order=order)))
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    damaged = list((tmp_path / "copy" / "megablend").glob(table))
    for path in damaged:
        damage(path)
    assert damaged
    assert read_train(plugin_config(tmp_path / "copy", **options(words, order=order))) == before


def test_an_index_that_cannot_be_built_again(tmp_path: Path, words: list[str]) -> None:
    """A file is no longer what it was when its index was made, and the index is damaged."""
    config = plugin_config(tmp_path / "cache", **options(words, order="megatron"))
    before = read_train(config)
    data = next((tmp_path / "arrow").glob("*.arrow"))
    kept = data.read_bytes()
    shutil.copy(next((tmp_path / "arrow").glob("*.arrow")), tmp_path / "arrow" / "added.arrow")
    for path in (tmp_path / "cache" / "megablend" / "generations").glob("*/blocks.arrow"):
        path.unlink()
    assert read_train(config) == before  # without the file that was added
    data.unlink()
    for path in (tmp_path / "cache" / "megablend" / "generations").glob("*/blocks.arrow"):
        path.unlink()
    with pytest.raises(DataError, match="no such file"):
        build(config)
    data.write_bytes(kept)
    assert read_train(config) == before


@pytest.mark.parametrize("order", ["page", "megatron"])
def test_damage_that_a_sample_meets_is_told_with_what_a_job_can_do(
    tmp_path: Path, words: list[str], order: str
) -> None:
    config = plugin_config(tmp_path / "cache", **options(words, order=order))
    before = read_train(config)
    for path in (tmp_path / "cache" / "megablend" / "generations").glob("*/blocks.arrow"):
        flip_rows(path)
    says = "; remove the folder of this index or table, and restart the job, which builds it again"
    with pytest.raises(DamagedCacheError, match=says):
        read_train(config)
    shutil.rmtree(tmp_path / "cache" / "megablend" / "generations")
    assert read_train(config) == before


def test_damage_that_a_dataset_meets_when_it_is_opened_is_told_so_too(
    tmp_path: Path, words: list[str]
) -> None:
    """A table of the right size, which is no Arrow file: a blend's datasets are opened with their first samples."""
    config = plugin_config(tmp_path / "cache", **options(words, order="megatron"))
    before = read_train(config)
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    config = plugin_config(tmp_path / "copy", **options(words, order="megatron"))
    for path in (tmp_path / "copy" / "megablend" / "generations").glob("*/blocks.arrow"):
        # The first dataset is opened at once
        (source,) = json.loads(path.with_name("manifest.json").read_text())["sources"]
        if source["format"] == "arrow":
            path.write_bytes(bytes(path.stat().st_size))
    says = "; remove the folder of this index or table, and restart the job, which builds it again"
    with pytest.raises(DamagedCacheError, match=says):
        read_train(config)
    shutil.rmtree(tmp_path / "copy" / "megablend" / "generations")
    assert read_train(config) == before


def test_masks_padding_and_pickling(tmp_path: Path, words: list[str]) -> None:
    flags = {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "create_attention_mask": True,
    }
    train, _, test = build(
        plugin_config(
            tmp_path / "cache", **options(words[:1]) | {"blend": (words[:1], None)}, **flags
        )
    )
    again = pickle.loads(pickle.dumps(train))
    for k in range(0, len(train), 7):
        sample = train[k]
        assert sample["attention_mask"].shape == (1, 16, 16)
        assert torch.equal(sample["loss_mask"] == 0, sample["tokens"] == EOD)
        starts = torch.nonzero(sample["tokens"][:-1] == EOD).flatten() + 1
        assert (sample["position_ids"][starts] == 0).all()
        assert all(torch.equal(again[k][name], value) for name, value in sample.items())
    assert train[None]["loss_mask"].sum() == 0
    assert torch.equal(train[None]["tokens"], train[0]["tokens"])
    assert len(test) > 0


def test_a_run_that_gets_samples_of_another_length_is_refused(
    tmp_path: Path, words: list[str]
) -> None:
    """Megatron's sample dicts all have the length that its config says."""
    plugin = plugin_config(tmp_path / "cache", **options(words))
    build(plugin, [400, 0, 0])
    config = expected(tmp_path / "cache" / "megablend", words, run=plugin.run)
    stages = [{"samples": config.pop("samples")}, {"samples": 480, "sequence_length": 8}]
    config.pop("valid_samples")
    found = megablend.amend(config | {"stages": stages}, at=100)
    with pytest.raises(
        PlanError, match=rf"from sample {found.at} on, sequence_length was 8 and is now 16"
    ):
        build(plugin, [400, 0, 0])


def test_a_run_is_opened_and_lengthened(tmp_path: Path, words: list[str]) -> None:
    first = build(plugin_config(tmp_path / "cache", **options(words)))[0]
    ledger = next((tmp_path / "cache" / "megablend" / "runs").iterdir())
    made = ledger.stat().st_mtime_ns
    again = build(plugin_config(tmp_path / "cache", **options(words)))[0]
    assert ledger.stat().st_mtime_ns == made
    longer = build(plugin_config(tmp_path / "cache", **options(words)), [600, 30, 10])[0]
    assert (len(first), len(again), len(longer)) == (400, 400, 600)
    for k in range(0, 400, 11):
        assert torch.equal(first[k]["tokens"], again[k]["tokens"])
        assert torch.equal(first[k]["tokens"], longer[k]["tokens"])
    with pytest.raises(PlanError, match="600"):
        build(plugin_config(tmp_path / "cache", **options(words)), [500, 30, 10])


def test_skipped_samples_are_left_out_and_made_up_for(tmp_path: Path, words: list[str]) -> None:
    config = plugin_config(tmp_path / "cache", **options(words))
    whole = build(config)[0]
    cache = tmp_path / "cache" / "megablend"
    (skipped,) = megablend.skip(cache, 90, 110, batch_size=8, run="default").to_dict()["skips"]
    assert (skipped["start"], skipped["stop"]) == (88, 112)
    train = build(config)[0]
    assert len(train) == 400
    assert megablend.list_runs(cache)[0].to_dict()["stages"] == [400, 424]
    own = megablend.open(expected(tmp_path / "cache" / "megablend", words, samples=424))
    for i in (0, 87, 88, 89, 375, 376, 399):
        k = own.position(i)
        assert k == (i if i < 88 else i + 24)
        assert (train[i]["dataset_id"], train[i]["tokens"].tolist()) == (
            own[k]["dataset_id"],
            own[k]["tokens"].tolist(),
        )
        if k < 400:
            assert torch.equal(train[i]["tokens"], whole[k]["tokens"])
    again = pickle.loads(pickle.dumps(train))
    assert torch.equal(again[88]["tokens"], train[88]["tokens"])
    assert len(build(config)[1]) == 30


@pytest.mark.parametrize(
    "option", ["multiple_validation_sets", "drop_last_partial_validation_sequence"]
)
def test_what_page_order_lacks_is_refused(tmp_path: Path, words: list[str], option: str) -> None:
    value = option == "multiple_validation_sets"
    with pytest.raises(ConfigError, match=option):
        build(plugin_config(tmp_path / "cache", **options(words, **known({option: value}))))

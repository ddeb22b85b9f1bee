"""Columns beside the tokens: each number with its token, over any pages, orders, ranks and restarts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.utils.data import default_collate

import megablend
from megablend.errors import ConfigError, CorruptFileError, PlanError
from tests.cases import chequered
from tests.examples import examples
from tests.formats.writers import KINDS
from tests.runs import EOD, documents, make_config, read_samples

Rows = list[list[int] | None]


def weight(token: int) -> float:
    return token / 7


def columns(listed: Rows, first_row: int = 0) -> dict[str, pa.Array]:
    """Columns that follow from the tokens: a mask, a weight, halves in lists; a number and a score of each row."""
    rows = range(first_row, first_row + len(listed))
    return {
        "mask": pa.array(
            [None if row is None else [token % 3 == 0 for token in row] for row in listed],
            pa.list_(pa.bool_()),
        ),
        "ids": pa.array(listed, pa.list_(pa.int32())),
        "weight": pa.array(
            [None if row is None else [weight(token) for token in row] for row in listed],
            pa.large_list(pa.float64()),
        ),
        "small": pa.array(
            [[token % 100 for token in row or []] for row in listed], pa.list_(pa.int8())
        ),
        "number": pa.array(rows, pa.int64()),
        "score": pa.array([row / 3 for row in rows], pa.float32()),
        "wide": pa.array([row + 40_000 for row in rows], pa.uint16()),
        "is_even": pa.array([row % 2 == 0 for row in rows], pa.bool_()),
        "text": pa.array([f"row {row}" for row in rows]),
    }


def write(path: Path, kind: str, made: dict[str, pa.Array], **options: Any) -> None:
    table = pa.table(made)
    if kind == "arrow":
        with pa.ipc.new_file(
            path, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
        ) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        settings = {
            "data_page_version": "1.0",
            "write_page_index": True,
            "use_dictionary": ["small"],
            "compression": "zstd",
        }
        pq.write_table(
            table,
            path,
            data_page_size=100,
            write_batch_size=5,
            row_group_size=40,
            **{**settings, **options},
        )


WRITERS = {
    "parquet": {},
    "parquet-v2": {"data_page_version": "2.0", "write_page_index": False, "use_dictionary": False},
    "arrow": {},
}
NAMES = ["mask", "weight", "small", "number", "score", "wide", "is_even"]


def write_source(
    folder: Path, number: int, kind: str, listed: Rows, *, files: int = 2
) -> dict[str, Any]:
    here = folder / f"source{number}"
    here.mkdir(parents=True)
    suffix = ".arrow" if kind == "arrow" else ".parquet"
    cut = -(-len(listed) // files)
    for i in range(files):
        part = listed[i * cut : (i + 1) * cut]
        write(here / f"{i}{suffix}", kind, columns(part, i * cut), **WRITERS[kind])
    return {
        "name": f"s{number}",
        "path": f"{here}/*{suffix}",
        "column": "ids",
        "extra_columns": NAMES,
    }


def check(samples: Iterable[Any], listed: Rows, eod: int | None) -> None:
    """Every number of a sample belongs to its token; those of an end-of-document token to the one before."""
    row_of = {token: row for row, document in enumerate(listed) for token in document or []}
    last_of = {row: document[-1] for row, document in enumerate(listed) if document}
    for sample in samples:
        extra = sample.extra
        assert list(extra) == sorted(NAMES)
        for at, token in enumerate(sample.tokens.tolist()):
            if token == eod:
                row = int(extra["number"][at])
                token = last_of[row]
                assert at == 0 or int(sample.tokens[at - 1]) == token
            else:
                row = row_of[token]
            assert bool(extra["mask"][at]) == (token % 3 == 0)
            assert extra["weight"][at] == weight(token)
            assert extra["small"][at] == token % 100
            assert (extra["number"][at], extra["wide"][at], bool(extra["is_even"][at])) == (
                row,
                row + 40_000,
                row % 2 == 0,
            )
            assert extra["score"][at] == np.float32(row / 3)


@pytest.mark.parametrize(("kind", "order"), chequered(list(WRITERS), ["page", "row", "sequential"]))
def test_every_number_comes_with_its_token(tmp_path: Path, kind: str, order: str) -> None:
    listed = [
        documents(d, size, longest, seed=3)
        for d, (size, longest) in enumerate([(90, 40), (25, 90)])
    ]
    eods = [None, EOD]
    sources = [write_source(tmp_path, d, kind, rows) for d, rows in enumerate(listed)]
    for source, share, eod in zip(sources, (2, 1), eods, strict=True):
        source |= {"weight": share, "append_eod": eod}
    config = make_config(tmp_path, sources, samples=240, order=order, split="90,10,0")
    megablend.build(config)
    for split in ("train", "valid"):
        dataset = megablend.open(config, split)
        samples: list[Any] = [
            *read_samples(dataset),
            *map(dataset.sample, range(0, len(dataset), 7)),
        ]
        for number, rows in enumerate(listed):
            check((sample for sample in samples if sample.source == number), rows, eods[number])


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(list(WRITERS)),
    st.sampled_from([None, EOD]),
    st.integers(1, 40),
    st.integers(0, 10**6),
)
def test_any_rows(
    tmp_path_factory: pytest.TempPathFactory, kind: str, eod: int | None, length: int, seed: int
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("run")
    listed = [*documents(0, rng.randrange(5, 80), rng.choice([2, 30, 300]), seed), [90_001, 90_002]]
    source = write_source(folder, 0, kind, listed, files=rng.choice([1, 3])) | {"append_eod": eod}
    config = make_config(folder, [source], samples=60, sequence_length=length, seed=seed)
    megablend.build(config)
    dataset = megablend.open(config)
    check([*read_samples(dataset), *map(dataset.sample, range(0, 60, 7))], listed, eod)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path, 0, "parquet", documents(0, 80, 30, 2)) | {"append_eod": EOD}
    config = make_config(tmp_path, [source], samples=96)
    megablend.build(config)
    return config


@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_batches_are_the_single_samples_collated(
    config: dict[str, Any], workers: int, masking: bool
) -> None:
    dataset = megablend.open(config | {"inter_document_masking": masking})
    types = {
        "mask": torch.bool,
        "weight": torch.float64,
        "small": torch.int8,
        "number": torch.int64,
    }
    types |= {"score": torch.float32, "wide": torch.int32, "is_even": torch.bool}
    for step, batch in enumerate(
        megablend.Loader(dataset, micro_batch_size=4, num_workers=workers)
    ):
        expected = default_collate([dataset[k] for k in range(4 * step, 4 * step + 4)])
        assert set(batch["extra"]) == set(NAMES)
        for name, numbers in batch["extra"].items():
            assert (numbers.dtype, numbers.shape) == (types[name], (4, 9))
            assert torch.equal(numbers, expected["extra"][name])
        assert torch.equal(batch["tokens"], expected["tokens"])


def test_a_transform_makes_a_loss_mask_of_one(config: dict[str, Any]) -> None:
    def masked(sample: dict[str, Any]) -> dict[str, Any]:
        sample["loss_mask"] *= sample.pop("extra")["mask"][1:]
        return sample

    dataset = megablend.open(config, transform=masked)
    for k, batch in enumerate(megablend.Loader(dataset, micro_batch_size=1)):
        sample = dataset.sample(k)
        assert batch["loss_mask"][0].tolist() == sample.extra["mask"][1:].astype(float).tolist()


def test_little_memory_reads_the_same(config: dict[str, Any]) -> None:
    expected = [
        batch["extra"]["weight"]
        for batch in megablend.Loader(megablend.open(config), micro_batch_size=4)
    ]
    small = megablend.Loader(megablend.open(config | {"memory": 60_000}), micro_batch_size=4)
    assert all(torch.equal(a["extra"]["weight"], b) for a, b in zip(small, expected, strict=True))


def test_describe_show_and_verify_know_them(config: dict[str, Any]) -> None:
    (source,) = megablend.describe(config).to_dict()["index"]["sources"]
    assert source["extra_columns"] == sorted(NAMES)
    shown = megablend.show(config, 3)
    assert (
        shown.to_dict()["extra"]["weight"]
        == megablend.open(config).sample(3).extra["weight"].tolist()
    )
    assert megablend.verify(config["cache"], data=True).problems == ()


def test_a_column_more_is_all_that_is_read(config: dict[str, Any]) -> None:
    (source,) = config["sources"]
    fewer = config | {"run": "fewer", "sources": [source | {"extra_columns": ["mask"]}]}
    assert megablend.build(fewer).index.read == 0
    plain = config | {
        "run": "plain",
        "sources": [{name: source[name] for name in source if name != "extra_columns"}],
    }
    megablend.build(plain)
    assert "extra" not in megablend.open(plain)[0]
    assert torch.equal(megablend.open(plain)[5]["tokens"], megablend.open(config)[5]["tokens"])
    with pytest.raises(PlanError, match="lacks extra column 'mask' of source 's0'"):
        megablend.build(plain | {"sources": [source | {"extra_columns": ["mask"]}]})


def damaged(folder: Path, **changed: pa.Array) -> dict[str, Any]:
    listed: Rows = [[row * 10 + i for i in range(row % 4)] for row in range(30)]
    folder.mkdir()
    write(folder / "x.parquet", "parquet", columns(listed) | changed)
    source = {
        "name": "s",
        "path": str(folder / "x.parquet"),
        "column": "ids",
        "extra_columns": list(changed),
    }
    return make_config(folder, [source], samples=20)


def test_lists_of_other_lengths_are_refused(tmp_path: Path) -> None:
    lengths = [row % 4 for row in range(30)]
    longer = [[1] * (length + (row == 17)) for row, length in enumerate(lengths)]
    config = damaged(tmp_path / "longer", small=pa.array(longer, pa.list_(pa.int8())))
    with pytest.raises(
        ConfigError, match=r"x\.parquet: extra column 'small' has 2 values in row 17 for 1 tokens"
    ):
        megablend.build(config)
    shifted = [[1] * (length + (row == 17) - (row == 18)) for row, length in enumerate(lengths)]
    config = damaged(tmp_path / "shifted", small=pa.array(shifted, pa.list_(pa.int8())))
    megablend.build(config)
    with pytest.raises(
        CorruptFileError,
        match=r"x\.parquet at byte \d+: the list in row 17 of column 'small' does not have",
    ):
        list(megablend.Loader(megablend.open(config), micro_batch_size=4))


@pytest.mark.parametrize(("row", "version"), chequered(range(0, 28, 3), ["1.0", "2.0"]))
def test_lists_that_only_pages_edges_part_are_refused(
    tmp_path: Path, row: int, version: str
) -> None:
    lengths = [3 * (row % 2) for row in range(30)]
    swapped = [*lengths[:row], lengths[row + 1], lengths[row], *lengths[row + 2 :]]
    made = {
        "ids": pa.array([[7] * length for length in lengths], pa.list_(pa.int32())),
        "small": pa.array([[1] * length for length in swapped], pa.list_(pa.int8())),
    }
    options = {"data_page_version": version, "use_dictionary": False, "compression": "none"}
    table = pa.table(made)
    pq.write_table(table, tmp_path / "x.parquet", data_page_size=1, write_batch_size=1, **options)
    source = {
        "name": "s",
        "path": str(tmp_path / "x.parquet"),
        "column": "ids",
        "extra_columns": ["small"],
    }
    config = make_config(tmp_path, [source], samples=20)
    megablend.build(config)
    with pytest.raises(
        CorruptFileError,
        match=r"x\.parquet at byte \d+: the list in row \d+ of column 'small' does not have",
    ):
        list(megablend.Loader(megablend.open(config), micro_batch_size=4))


def test_rows_without_a_value_are_refused(tmp_path: Path) -> None:
    config = damaged(tmp_path / "null", score=pa.array([None, *range(29)], pa.float32()))
    with pytest.raises(
        ConfigError,
        match=r"x\.parquet: extra column 'score' has 1 rows without a value; every row needs one",
    ):
        megablend.build(config)


def test_columns_that_do_not_fit_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    def build(name: str) -> None:
        megablend.build(
            config | {"run": "other", "sources": [config["sources"][0] | {"extra_columns": [name]}]}
        )

    with pytest.raises(
        ConfigError, match=r"source 's0': .*[01]\.parquet: no column 'scor'; did you mean 'score'"
    ):
        build("scor")
    with pytest.raises(
        ConfigError,
        match=r"column 'text' has type BYTE_ARRAY, .*; columns of numbers: mask, ids, weight",
    ):
        build("text")
    pair = tmp_path / "pair"
    pair.mkdir()
    KINDS["megatron"].write(pair / "x.bin", [[1, 2, 3]] * 9)
    source = {"name": "pair", "path": str(pair / "x.bin"), "extra_columns": ["mask"]}
    with pytest.raises(
        ConfigError,
        match=r"'pair': .*x\.bin: .bin/.idx files have no columns; remove extra_columns: mask",
    ):
        megablend.build(make_config(pair, [source], samples=2))


def test_sources_of_a_split_have_the_same(tmp_path: Path, config: dict[str, Any]) -> None:
    (source,) = config["sources"]
    other = source | {"name": "b", "extra_columns": ["mask"], "weight": 1}
    with pytest.raises(
        ConfigError,
        match=r"'b' has extra_columns mask, but 's0' has mask, weight.*; expected the same for all",
    ):
        megablend.load_config(config | {"sources": [source | {"weight": 1}, other]})
    with pytest.raises(ConfigError, match="'s0' has a duplicate name in extra_columns"):
        megablend.load_config(config | {"sources": [source | {"extra_columns": ["mask", "mask"]}]})
    listed: Rows = [[1, 2], [3]]
    made = columns(listed) | {"mask": pa.array(listed, pa.list_(pa.int16()))}
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "y.parquet", "parquet", made)
    typed = [
        source | {"weight": 1, "extra_columns": ["mask"]},
        other | {"path": str(tmp_path / "b" / "y.parquet")},
    ]
    with pytest.raises(
        ConfigError,
        match="'mask' has dtype bool in source 's0' and int16 in 'b'; write it with the same dtype",
    ):
        megablend.build(config | {"run": "typed", "sources": typed})
    write(tmp_path / "b" / "y.parquet", "parquet", columns(listed))
    megablend.build(config | {"run": "typed", "sources": typed})
    write(tmp_path / "source0" / "2.parquet", "parquet", made)
    files = config | {"run": "files", "sources": [source | {"extra_columns": ["mask"]}]}
    says = r"'mask' has different types: lists of int16 \(.*2\.parquet\), lists of bool.*; write it with one type in all files$"
    with pytest.raises(ConfigError, match=says):
        megablend.build(files)
    write(tmp_path / "source0" / "2.parquet", "parquet", columns(listed))
    megablend.build(files)

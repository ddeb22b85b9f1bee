"""Arrow IPC streams: message after message, found again without another walk, and refused where they are not whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megablend
from megablend.config.read_spec import ReadSpec
from megablend.errors import CorruptFileError, DataError, UnsupportedFileError
from megablend.formats import FORMATS, format_of
from megablend.formats.arrow.footer import PLACE_DTYPE
from megablend.formats.arrow_stream.messages import read_stream
from megablend.formats.arrow_stream.places import pack_places, unpack_places
from tests.examples import examples
from tests.formats.writers import index, write_arrow, write_arrow_stream
from tests.runs import documents, make_config, write_source
from tests.storages import STORAGE

STREAM = FORMATS["arrow-stream"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.arrow"
    write_arrow_stream(path, [[i, i + 1] for i in range(50)])
    return path


def test_files_and_streams_of_one_suffix_are_told_apart_by_their_content(
    tmp_path: Path, path: Path
) -> None:
    write_arrow(tmp_path / "y.arrow", [[1]])
    assert format_of(str(path), STORAGE) is STREAM
    assert format_of(str(tmp_path / "y.arrow"), STORAGE) is FORMATS["arrow"]
    assert format_of(str(tmp_path / "missing.arrow"), STORAGE) is FORMATS["arrow"]


def test_dictionaries_of_other_columns_are_passed_over(tmp_path: Path) -> None:
    names = pa.array(["a", "b", "a"]).dictionary_encode()
    table = pa.table({"name": names, "ids": pa.array([[1, 2], None, [3]], pa.list_(pa.int32()))})
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
        writer.write_table(table)
    found = index(tmp_path / "x.arrow", None)
    assert (found.rows, found.tokens, found.blocks["rows"].tolist()) == (6, 6, [3, 3])
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    with pa.ipc.new_stream(tmp_path / "y.arrow", twice.schema) as writer:
        writer.write_table(twice)
    with pytest.raises(UnsupportedFileError, match="has two columns"):
        index(tmp_path / "y.arrow", "a")


def test_what_is_not_whole_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for damaged, problem in (
        (whole[:-8], "has no end-of-stream marker: truncated"),
        (whole + b"more", "4 bytes follow the end of its Arrow stream"),
        (whole[:-20], "only .* bytes (of the file )?are left|end-of-stream"),
        (b"\xff\xff\xff\xff\0\0\0\0", "is an Arrow stream without a schema"),
        (
            whole[:-8] + whole,
            "the schema of an Arrow stream must be its first message, and occur only once",
        ),
        (whole[:4] + b"\xff\xff\xff\x7f" + whole[8:], "a message has -?[0-9]+ bytes of metadata"),
        (whole[:-8] + b"PAR1PAR1", "no message of an Arrow stream begins here: found b'PAR1'"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=problem):
            STREAM.index(str(path), ReadSpec(), storage=STORAGE)


@pytest.mark.parametrize("name", ["arrow", "arrow-stream"])
def test_streams_of_before_arrow_0_15_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.arrow"
    table = pa.table({"ids": pa.array([[1, 2], [3]], pa.list_(pa.int32()))})
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    with pa.ipc.new_stream(path, table.schema, options=options) as writer:
        writer.write_table(table)
    says = "is an Arrow stream in the format of releases before 0.15 .*; rewrite it"
    with pytest.raises(UnsupportedFileError, match=says):
        FORMATS[name].index(str(path), ReadSpec(), storage=STORAGE)
    with pa.ipc.open_stream(path.read_bytes()) as old, pa.ipc.new_stream(path, old.schema) as new:
        new.write_table(old.read_all())
    assert index(path, None).tokens == 3


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(8, 12), st.integers(0, 3)), max_size=6))
def test_places_survive_packing(batches: list[tuple[int, int, int]]) -> None:
    places = np.zeros(len(batches), PLACE_DTYPE)
    end = 0
    for place, (gap, metadata, body) in zip(places, batches, strict=True):
        place["offset"] = end + gap
        place["metadata_bytes"] = metadata
        place["body_bytes"] = body
        end += gap + metadata + body
    assert (unpack_places("x", pack_places(places), max(end, 1)) == places).all()


def test_a_stream_takes_a_number_a_batch_of_the_index(tmp_path: Path) -> None:
    write_arrow_stream(tmp_path / "x.arrow", [[1, 2, 3]] * 7 * 300)
    packed = pack_places(
        read_stream(
            str(tmp_path / "x.arrow"), (tmp_path / "x.arrow").stat().st_size, STORAGE
        ).places
    )
    assert (packed["count"], len(packed["body_bytes"])) == (300, 300)
    assert len(packed["gaps"]) == len(packed["metadata_bytes"]) == 2


@pytest.mark.parametrize("name", ["gaps", "metadata_bytes", "body_bytes"])
@pytest.mark.parametrize("value", [[], [-5], [1 << 40, 1], [1] * 99])
def test_places_outside_the_file_are_refused(path: Path, name: str, value: list[int]) -> None:
    size = path.stat().st_size
    packed = pack_places(read_stream(str(path), size, STORAGE).places)
    with pytest.raises(DataError, match="the index has wrong positions for the batches"):
        unpack_places(str(path), packed | {name: value}, size)


def test_a_run_over_streams_has_the_samples_of_files(tmp_path: Path) -> None:
    listed = documents(0, 60, 20, seed=1)
    sources = {
        kind: write_source(tmp_path / kind, 0, kind, listed) for kind in ("arrow", "arrow-stream")
    }
    configs = [
        make_config(tmp_path, [source | {"weight": 1}], samples=12, cache=f"{tmp_path}/c{kind}")
        for kind, source in sources.items()
    ]
    for config in configs:
        megablend.build(config)
    a, b = (megablend.open(config) for config in configs)
    assert all(a[k]["tokens"].equal(b[k]["tokens"]) for k in range(12))
    assert (
        megablend.describe(configs[1]).to_dict()["index"]["sources"][0]["format"] == "arrow-stream"
    )
    assert megablend.verify(configs[1]["cache"], data=True).problems == ()

"""Text in Parquet and Arrow."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import ConfigError, CorruptFileError, ResourceError
from megablend.storage.by_scheme import make_storage
from megablend.storage.local import LocalStorage
from megablend.text import tables
from megablend.text.documents import TextFields
from megablend.text.open_parts import open_parts
from megablend.text.tasks import plan_tasks
from tests.text.test_lines import FIELDS, documents_of, find, read, texts_of

STORAGE = make_storage()
TEXTS = [f"text {i} é中" * (i % 7) for i in range(1000)]
KINDS = ("a.parquet", "a.arrow", "a.arrows")


def write(path: Path, columns: dict[str, Any] | pa.Table, rows: int = 90) -> Path:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    make = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("part_bytes", [1, 5000, 1 << 20])
def test_all_documents_once(
    tmp_path: Path, name: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCH_BYTES", 700)
    path = write(tmp_path / name, {"id": range(1000), "text": TEXTS})
    parts = read(path, part_bytes)
    found = documents_of([portion for _, portions in parts for portion in portions])
    assert [each.text for each in found] == TEXTS
    assert [each.key for each in found] == list(map(str, range(1000)))
    assert [each.place.offset for each in found] == list(range(1000))
    assert [part.stop for part, _ in parts][-1] == 1000
    assert [part.start for part, _ in parts][1:] == [part.stop for part, _ in parts][:-1]
    num_parts = {1: 12, 5000: range(2, 12), 1 << 20: 1}[part_bytes]
    if name == "a.parquet":
        assert len(parts) in (num_parts if isinstance(num_parts, range) else [num_parts])
    else:
        assert len(parts) == 1


def test_nested_columns_and_large_strings(tmp_path: Path) -> None:
    inner = [{"b": text, "c": i} for i, text in enumerate(TEXTS)]
    path = write(tmp_path / "a.parquet", {"a": inner})
    fields = TextFields(text="a.b", key="a.c", max_bytes=1000)
    assert texts_of(read(path, 1 << 20, fields)) == TEXTS
    large = write(tmp_path / "b.arrow", {"text": pa.array(TEXTS, pa.large_string())})
    assert texts_of(read(large, 1 << 20)) == TEXTS


@pytest.mark.parametrize("name", KINDS)
def test_strings_of_all_types(tmp_path: Path, name: str) -> None:
    columns: list[Any] = [pa.array(TEXTS).dictionary_encode()]
    if hasattr(pa, "string_view") and name != "a.parquet":  # as polars writes Arrow
        views = pa.array(TEXTS, pa.string_view())
        columns += [views, pa.DictionaryArray.from_arrays(pa.array(range(len(TEXTS))), views)]
    for column in columns:
        path = write(tmp_path / name, {"text": column, "id": column})
        parts = read(path, 1 << 20)
        assert texts_of(parts) == TEXTS
        found = documents_of([portion for _, portions in parts for portion in portions])
        assert [each.key for each in found] == TEXTS
    path = write(tmp_path / name, {"text": [b"a"]})
    with pytest.raises(ConfigError, match=r"has type binary, expected text.*cast it to string"):
        read(path, 1 << 20)


@pytest.mark.parametrize("name", KINDS)
def test_a_column_whose_own_name_has_dots(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"a.b": TEXTS, "a": [{"b": "x"}] * 1000, "a.id": TEXTS})
    fields = TextFields(text="a.b", key="a.id", max_bytes=1000)
    parts = read(path, 1 << 20, fields)
    assert texts_of(parts) == TEXTS
    found = documents_of([portion for _, portions in parts for portion in portions])
    assert [each.key for each in found] == TEXTS


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("names", [("text", "idd"), ("text", "a.idd"), ("a.b", "a.idd")])
def test_no_column_of_keys(tmp_path: Path, name: str, names: tuple[str, str]) -> None:
    path = write(tmp_path / name, {"a": [{"b": "x", "id": 1}], "text": ["x"]})
    fields = TextFields(text=names[0], key=names[1], max_bytes=1000)
    ((_, (portion,)),) = read(path, 1 << 20, fields)
    assert (portion.texts, portion.keys) == (["x"], [None])


@pytest.mark.parametrize("name", KINDS)
def test_several_columns_of_one_name(tmp_path: Path, name: str) -> None:
    text = pa.array(["x"])
    struct = pa.StructArray.from_arrays([text, text], names=["b", "b"])
    table = pa.Table.from_arrays([text, text, struct, text], names=["id", "id", "a", "text"])
    path = write(tmp_path / name, table)
    for column in ("id", "a.b"):
        for text_name, key in ((column, None), ("text", column)):
            fields = TextFields(text=text_name, key=key, max_bytes=1000)
            with pytest.raises(ConfigError, match=rf"has 2 columns '{column}'.*rename the others"):
                read(path, 1 << 20, fields)
    fields = TextFields(text="text", key=None, max_bytes=1000)
    assert texts_of(read(path, 1 << 20, fields)) == ["x"]


_NOT_UTF8 = pa.array([b"k\xff", b"k"]).view(pa.string())
_KEYS: list[tuple[Any, list[str]]] = [
    (pa.array([1, 1000], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000001", "1970-01-01 00:00:00.000001000"]),
    (pa.array([1, 1], pa.timestamp("ns", "UTC")).dictionary_encode(), ["1970-01-01 00:00:00.000000001Z"] * 2),
    (pa.array([1, 1000], pa.time64("ns")), ["00:00:00.000000001", "00:00:00.000001000"]),
    (pa.array([1, 1000], pa.duration("ns")), ["1", "1000"]),
    (pa.array([2**48, 0], pa.timestamp("ms")), ["10889-08-02 05:31:50.656", "1970-01-01 00:00:00"]),
    (_NOT_UTF8, [r"b'k\xff'", "k"]),
    (_NOT_UTF8.dictionary_encode(), [r"b'k\xff'", "k"]),
]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("column", "keys"), _KEYS, ids=[str(each.type) for each, _ in _KEYS])
def test_keys_that_python_has_no_type_for(
    tmp_path: Path, name: str, column: Any, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "UTC" in str(column.type) and not Path("/usr/share/zoneinfo").exists():
        pytest.skip("needs the system's time zones")
    monkeypatch.setitem(sys.modules, "pandas", None)  # pyarrow would use it if it is installed
    path = write(tmp_path / name, {"text": ["a", "b"], "id": column})
    ((_, (portion,)),) = read(path, 1 << 20)
    assert (portion.texts, portion.keys) == (["a", "b"], keys)


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_keys_in_a_zone_that_the_machine_does_not_know(tmp_path: Path, unit: str) -> None:
    column = pa.array([1, 2], pa.timestamp(unit, "Mars/Olympus"))
    path = write(tmp_path / "a.parquet", {"text": ["a", "b"], "id": column})
    with pytest.raises(ResourceError, match=r"a\.parquet: .* zone 'Mars/Olympus'.*\ninstall"):
        read(path, 1 << 20)


@pytest.mark.parametrize("name", KINDS)
def test_an_empty_table(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"text": pa.array([], pa.string())})
    ((part, portions),) = read(path, 1 << 20)
    assert portions == []
    assert (part.start, part.stop) == (0, 0)


def test_bad_documents(tmp_path: Path) -> None:
    broken = pa.StringArray.from_buffers(
        1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")
    )
    column = pa.concat_arrays([pa.array(["a", None, "b" * 300]), broken, pa.array(["c"])])
    path = write(tmp_path / "a.arrow", {"text": column})
    fields = TextFields(text="text", key=None, max_bytes=200)
    ((_, (portion,)),) = read(path, 1 << 20, fields)
    assert portion.texts == ["a", "c"]
    assert [(each.kind, each.place.offset) for each in portion.bad] == [
        ("no text", 1),
        ("too long", 2),
        ("invalid UTF-8", 3),
    ]


@pytest.mark.parametrize("name", KINDS)
def test_no_column_of_text(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"txet": ["a"], "number": [1]})
    with pytest.raises(
        ConfigError, match=r"has no column 'text' \(it has: txet, number\); did you mean"
    ):
        read(path, 1 << 20)
    fields = TextFields(text="number", key=None, max_bytes=200)
    with pytest.raises(ConfigError, match=r"column 'number' has type int64, expected text"):
        read(path, 1 << 20, fields)


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_table_is_an_error(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"text": TEXTS})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CorruptFileError, match=r"truncated or damaged.*on_unreadable"):
        read(path, 1 << 20)


@pytest.mark.parametrize("name", KINDS)
def test_a_table_with_damaged_metadata_is_an_error(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {"text": TEXTS})
    data = path.read_bytes()
    magic_bytes = {"a.parquet": 4, "a.arrow": 6}.get(name)
    start = 8  # of a stream
    if magic_bytes is not None:
        end = len(data) - magic_bytes - 4
        start = end - int.from_bytes(data[end : end + 4], "little")
    damaged = data[:start] + b"\xff" * 40 + data[start + 40 :]
    for each in (damaged, data.replace(b"text", b"\xffext")):  # a name that is not UTF-8
        path.write_bytes(each)
        with pytest.raises(CorruptFileError, match=r"truncated or damaged.*on_unreadable"):
            read(path, 1 << 20)


def damaged_column(kind: str) -> Any:
    """A column that points outside of its data, on which `repr` may crash."""
    if kind.endswith("index"):
        # pyarrow itself checks a large index, but reads before the data for a negative one
        indices = pa.array([0, {"large index": 1 << 20, "negative index": -5}[kind]], pa.int32())
        return pa.DictionaryArray.from_arrays(indices, pa.array(["a"]), safe=False)
    middle = {"far beyond": 1 << 30, "descending": 3}[kind]
    offsets = pa.py_buffer(np.array([0, middle, 1], np.int32))
    return pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"abc"))


@pytest.mark.parametrize("kind", ["far beyond", "descending", "large index", "negative index"])
@pytest.mark.parametrize("is_key", [False, True])
def test_offsets_beyond_the_data_are_damage(tmp_path: Path, kind: str, *, is_key: bool) -> None:
    damaged = damaged_column(kind)
    path = tmp_path / "a.arrows"
    good = pa.array(["a", "b"])
    columns = {"text": good if is_key else damaged, "id": damaged if is_key else good}
    batch = pa.record_batch(columns)
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    # A process of its own, since pyarrow itself would follow them and end it
    code = f"from tests.text.test_tables import *; read(Path({str(path)!r}), 1 << 20)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "a.arrows: cannot be read" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("text", ["text", "doc.text"])
def test_columns_of_unequal_lengths_are_damage(tmp_path: Path, text: str) -> None:
    """Also where another column is the shorter one: which of them is right is not known."""
    path = tmp_path / "a.arrows"
    texts = pa.array(["x"] * 30)
    doc = pa.StructArray.from_arrays([texts, texts], names=["text", "other"])
    batch = pa.record_batch({"id": list("abc") * 10, "text": texts, "doc": doc})
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    data = path.read_bytes()
    node = np.array([30, 0], np.int64).tobytes()  # FieldNode: length, null_count
    before, after = data.rsplit(node, 1)
    path.write_bytes(before + np.array([20, 0], np.int64).tobytes() + after)
    fields = TextFields(text=text, key=None, max_bytes=1000)
    with pytest.raises(CorruptFileError, match=r"a\.arrows: cannot be read"):
        read(path, 1 << 20, fields)


@pytest.mark.parametrize("name", KINDS)
def test_an_error_of_the_system_is_not_damage(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / name, {"text": TEXTS})
    (task,) = plan_tasks(find(path), STORAGE, FIELDS)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(LocalStorage, "read", fail)
    with pytest.raises(OSError, match="I/O error"):
        next(open_parts(task, STORAGE, FIELDS))


def test_the_digest_tells_null_from_empty_and_keys_apart(tmp_path: Path) -> None:
    digests = set()
    for i, columns in enumerate(
        [
            {"text": ["a", "b"], "id": [1, 2]},
            {"text": ["ab", ""], "id": [1, 2]},
            {"text": ["ab", None], "id": [1, 2]},
            {"text": ["a", "b"], "id": [1, 3]},
        ]
    ):
        path = write(tmp_path / f"{i}.parquet", columns)
        ((part, _),) = read(path, 1 << 20, FIELDS)
        digests.add(part.digest)
    assert len(digests) == 4

"""Raw files as nanoGPT, modded-nanogpt, llm.c, OLMo and lit-gpt write them: headers, documents, and whole runs."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import sqlite3
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megablend
from megablend.config.read_spec import OptionValue, ReadSpec, make_options
from megablend.distributed.base import SingleProcess
from megablend.errors import (
    ChangedFileError,
    ConfigError,
    CorruptFileError,
    MegablendError,
    UnsupportedFileError,
)
from megablend.formats.base import FileIndex, Format, OpenedFile
from megablend.formats.blocks import place_blocks
from megablend.formats.fetch import read_blocks
from megablend.formats.raw import RAW
from megablend.formats.raw.raw_format import RawFormat
from megablend.index.build.build import BuildReport, SourceSpec, build_index
from megablend.index.build.file_parts import join, part_span
from megablend.testing.documents import join_pieces
from tests.runs import documents, make_config, write_source
from tests.storages import STORAGE

GOLDEN = Path(__file__).parent.parent / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "raw_expected.json").read_text(encoding="utf-8"))
TOKENS = [7, 1, 2, 9, 9, 3, 4, 5, 9, 6]
LLMC = {"uint16": (20240520, 1), "uint32": (20240801, 7)}
LIT = {"uint16": 8, "int32": 4, "int64": 5}


def llmc_header(dtype: str, count: int) -> bytes:
    return np.array([*LLMC[dtype], count, *[0] * 253], "<i4").tobytes()


def lit_header(dtype: str, count: int) -> bytes:
    return b"LITPKDS" + struct.pack("<QBQ", 1, LIT[dtype], count)


def index(
    path: Path, block_bytes: int = 8, format: Format = RAW, /, **options: OptionValue
) -> FileIndex:
    format.check_options(options)
    return format.index(
        str(path), ReadSpec(block_bytes=block_bytes, options=make_options(options)), storage=STORAGE
    )


def read(path: Path, found: FileIndex) -> list[list[int]]:
    """The documents of a file."""
    size = path.stat().st_size
    opened = OpenedFile(
        size=size, token_dtype=found.token_dtype, structure=found.structure, meta=found.meta
    )
    reader = RAW.open(str(path), None, opened, storage=STORAGE)
    placed = place_blocks(found.blocks)
    decoded = read_blocks(reader, placed, found.chunks, STORAGE)
    parts = [
        [each.tolist() for each in np.split(block.tokens, block.offsets[1:-1])] for block in decoded
    ]
    return list(join_pieces(found, parts))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("kind", ["plain", "npy", "llmc", "lit", "skipped"])
def test_each_header_and_dtype(tmp_path: Path, kind: str, dtype: str) -> None:
    path = tmp_path / "x.bin"
    tokens = np.array(TOKENS, dtype)
    options: dict[str, OptionValue] = {"eod_token": 9}
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, tokens)
    elif kind == "llmc" and dtype in LLMC:
        path.write_bytes(llmc_header(dtype, 10) + tokens.tobytes())
    elif kind == "lit" and dtype in LIT:
        path.write_bytes(lit_header(dtype, 10) + tokens.tobytes())
    else:
        header = bytes(16) if kind == "skipped" else b""
        path.write_bytes(header + tokens.tobytes())
        options |= {"dtype": dtype, "header_bytes": len(header) or None}
    found = index(path, **options)
    assert (found.token_dtype, found.tokens, found.rows) == (dtype, 10, 4)
    assert read(path, found) == [[7, 1, 2, 9], [9], [3, 4, 5, 9], [6]]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    block=st.integers(1, 9),
    chunk=st.integers(1, 20),
    scan=st.integers(1, 20),
    separator=st.sampled_from(["eod_token", "bos_token", None]),
    parts=st.integers(1, 4),
)
def test_documents_are_those_of_a_naive_split(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: list[int],
    block: int,
    chunk: int,
    scan: int,
    separator: str | None,
    parts: int,
) -> None:
    path = tmp_path_factory.mktemp("raw") / "x.bin"
    path.write_bytes(np.array(tokens, np.uint16).tobytes())
    expected: list[list[int]] = [[]]
    for token in tokens:
        if separator == "bos_token" and token == 0 and expected[-1]:
            expected.append([])
        expected[-1].append(token)
        if separator == "eod_token" and token == 0:
            expected.append([])
    expected = expected if expected[-1] else expected[:-1]
    options: dict[str, OptionValue] = {"dtype": "uint16"} | (
        {} if separator is None else {separator: 0}
    )
    raw = RawFormat()
    raw.chunk_bytes = 2 * chunk
    raw.scan_bytes = 2 * scan
    found = index(path, 2 * block, raw, **options)
    spec = ReadSpec(block_bytes=2 * block, options=make_options(options))
    size = path.stat().st_size
    spans = [part_span(size, part, parts) for part in range(parts)]
    together = join([raw.index_part(str(path), spec, span=span, storage=STORAGE) for span in spans])
    assert read(path, found) == expected
    assert found.rows == len(expected)
    assert found.blocks["ends"].sum() == len(expected)
    assert together.blocks.tobytes() == found.blocks.tobytes()
    assert together.chunks.tobytes() == found.chunks.tobytes()
    assert (together.rows, together.tokens, together.scanned_bytes) == (
        found.rows,
        found.tokens,
        found.scanned_bytes,
    )
    assert (found.scanned_bytes == 0) == (separator is None)


@pytest.mark.parametrize(
    ("content", "options", "error", "problem"),
    [
        (b"", {"dtype": "uint16"}, CorruptFileError, "is empty"),
        (
            b"12345",
            {"dtype": "uint16"},
            CorruptFileError,
            "has 5 bytes, expected header_bytes 0 plus a multiple of 2",
        ),
        (
            b"1234",
            {"dtype": "uint16", "header_bytes": 6},
            CorruptFileError,
            "has 4 bytes, expected header_bytes 6",
        ),
        (b"1234", {}, ConfigError, "the dtype of its tokens is unknown"),
        (
            llmc_header("uint16", 3) + b"1234",
            {},
            CorruptFileError,
            "its llm.c header states 3 tokens of uint16 \\(truncated",
        ),
        (
            llmc_header("uint16", 1) + b"1234",
            {},
            CorruptFileError,
            "states 1 tokens of uint16 \\(something was appended, or the header is wrong\\); restore it",
        ),
        (
            llmc_header("uint16", 2) + b"1234",
            {"dtype": "int32"},
            ConfigError,
            "has dtype uint16, but format_options has int32",
        ),
        (
            llmc_header("uint16", -1) + b"1234",
            {},
            UnsupportedFileError,
            "begins like an llm.c file .* and -1 tokens",
        ),
        (
            lit_header("int32", 2)[:15] + b"\x06" + bytes(8),
            {},
            UnsupportedFileError,
            "lit-gpt packed dataset of version 1 with dtype",
        ),
        (b"\x93NUM", {}, CorruptFileError, "its .npy header has version 0 or is truncated"),
        (
            b"\x93NUMPY\x01\0\xff\xff{}",
            {},
            CorruptFileError,
            "its .npy header has an invalid length of 65535 bytes",
        ),
        (b"\x93NUMPY\x01\0\x04\0{1:2", {}, UnsupportedFileError, r"its .npy header is '\{1:2'"),
        (
            llmc_header("uint16", 2) + b"1234",
            {"eod_token": 70000},
            ConfigError,
            "eod_token 70000 does not fit the token dtype uint16",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path,
    content: bytes,
    options: dict[str, OptionValue],
    error: type[MegablendError],
    problem: str,
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(error, match=rf"{path}.*{problem}"):
        index(path, **options)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((3, 4), np.int32), r"has shape \(3, 4\)"),
        (np.zeros((), np.int32), r"has shape \(\)"),
        (np.zeros(3, np.float32), "contains <f4"),
        (np.zeros(3, ">i4"), "contains >i4"),
        (np.array([{}]), r"contains \|O"),
    ],
)
def test_arrays_that_hold_no_tokens_are_refused(tmp_path: Path, array: Any, problem: str) -> None:
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(UnsupportedFileError, match=problem):
        index(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dtyp": "uint16"}, "unknown option 'dtyp'; did you mean 'dtype'"),
        (
            {"dtype": "float32"},
            "dtype: found 'float32', expected one of uint16, uint32, int32, int64",
        ),
        ({"header_bytes": -1}, "header_bytes: found -1"),
        ({"header_bytes": 3, "dtype": "uint16"}, "header_bytes: found 3, expected a multiple of 2"),
        ({"eod_token": True}, "eod_token: found True"),
        ({"allow_container": 1}, "allow_container: found 1, expected true or false"),
        ({"eod_token": 1, "bos_token": 2}, "found both eod_token and bos_token"),
        (
            {"eod_token": 70000, "dtype": "uint16"},
            "eod_token 70000 does not fit the token dtype uint16",
        ),
    ],
)
def test_bad_options_are_named(options: dict[str, OptionValue], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RAW.check_options(options)


def test_a_header_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(llmc_header("uint16", 10) + np.array(TOKENS, np.uint16).tobytes())
    found = index(path)
    path.write_bytes(llmc_header("uint16", 9) + np.array(TOKENS, np.uint16).tobytes())
    with pytest.raises(ChangedFileError, match="changed since it was indexed") as raised:
        read(path, found)
    assert str(raised.value).count(str(path)) == 1


@pytest.mark.long
def test_a_run_over_raw_files_has_the_samples_of_other_formats(tmp_path: Path) -> None:
    listed = [each for each in documents(0, 60, 20, seed=1) if each]
    arrow = write_source(tmp_path, 0, "arrow", listed) | {"weight": 1, "append_eod": 0}
    (tmp_path / "raw").mkdir()
    for number, part in enumerate((listed[:30], listed[30:])):
        tokens = [token for document in part for token in (*document, 0)]
        (tmp_path / "raw" / f"{number}.bin").write_bytes(np.array(tokens, np.int32).tobytes())
    raw = {"name": "s0", "path": f"{tmp_path}/raw/*.bin", "weight": 1, "format": "raw"}
    options = {"dtype": "int32", "eod_token": 0}
    settings = {"samples": 12, "split": "80,20,0", "order": "row"}
    configs = [
        make_config(tmp_path, [source], cache=str(tmp_path / name), **settings)
        for name, source in {"plain": arrow, "other": raw | {"format_options": options}}.items()
    ]
    for config in configs:
        megablend.build(config)
    a, b = (megablend.open(config) for config in configs)
    assert all(a[k]["tokens"].equal(b[k]["tokens"]) for k in range(12))
    assert megablend.verify(configs[1]["cache"], data=True).problems == ()
    other = raw | {"format_options": options | {"eod_token": 5}}
    with pytest.raises(
        MegablendError, match=r"source 's0' has options \{.*'eod_token': 0.*\}; the config has"
    ):
        megablend.open(make_config(tmp_path, [other], cache=configs[1]["cache"], **settings))


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_read_as_they_were_written(name: str) -> None:
    expected = EXPECTED[name]
    found = index(GOLDEN / name, **expected["options"])
    assert found.token_dtype == expected["dtype"]
    assert read(GOLDEN / name, found) == expected["documents"]


@pytest.mark.parametrize("content", [b"\x93N", b"\x93NUM"])
def test_a_few_tokens_are_not_taken_for_a_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    found = index(path, dtype="uint16")
    assert read(path, found) == [np.frombuffer(content, "<u2").tolist()]


def containers(folder: Path) -> dict[str, tuple[bytes, dict[str, OptionValue]]]:
    """Files of each kind that is recognized, made by its own writer, of an even size; and their options."""
    table = pa.table({"tokens": np.arange(100)})
    buffers = dict[str, bytes]()
    pq.write_table(table, folder / "Parquet")
    with pa.ipc.new_file(str(folder / "Arrow"), table.schema) as writer:
        writer.write_table(table)
    np.savez(folder / "zip.npz", tokens=np.arange(100))
    np.save(folder / "npy.npy", np.arange(100, dtype=np.uint16))
    tokens = np.arange(100, dtype=np.uint16).tobytes()
    buffers["Parquet"] = (folder / "Parquet").read_bytes()
    buffers["Arrow"] = (folder / "Arrow").read_bytes()
    buffers["zip"] = (folder / "zip.npz").read_bytes()
    buffers[".npy"] = (folder / "npy.npy").read_bytes()
    # Two samples of 100 bytes, after their number and offsets (MosaicML has its settings there, too)
    for kind, settings in (("a LitData chunk", b""), ("a LitData chunk or a M", b"{}")):
        first = 16 + len(settings)
        offsets = struct.pack("<4I", 2, first, first + 100, first + 200)
        buffers[kind] = offsets + settings + tokens
    buffers["gzip"] = gzip.compress(tokens)
    buffers["xz"] = lzma.compress(tokens)
    buffers["bzip2"] = bz2.compress(tokens)
    buffers["HDF5"] = b"\x89HDF\r\n\x1a\n" + tokens
    with sqlite3.connect(folder / "SQLite") as database:
        database.execute("create table tokens (id integer)")
    database.close()
    torch.save(torch.arange(100), folder / "PyTorch", _use_new_zipfile_serialization=False)
    buffers["SQLite database"] = (folder / "SQLite").read_bytes()
    buffers["PyTorch file"] = (folder / "PyTorch").read_bytes()
    buffers["lz4"] = pa.compress(tokens, codec="lz4", asbytes=True)
    buffers["Avro"] = b"Obj\x01" + tokens
    buffers["GGUF"] = b"GGUF\3\0\0\0" + tokens
    buffers["Megatron's .idx"] = b"MMIDIDX\0\0" + tokens + b"\0"
    buffers["file with a header of 1024 bytes"] = (
        struct.pack("<3i", 7, 1, 100) + bytes(1012) + tokens
    )
    buffers["zstd"] = pa.compress(tokens, codec="zstd", asbytes=True)
    found = dict[str, tuple[bytes, dict[str, OptionValue]]]()
    for name, content in buffers.items():
        padding = b"\0" * (len(content) % 2 if name in PADDED else 0)
        found[name] = content + padding, {"dtype": "uint16"}
    found[".npy"][1]["header_bytes"] = 0
    return found


PADDED = ("gzip", "zstd", "zip", "xz", "bzip2", "lz4", "PyTorch file")
KINDS = (
    *("Parquet", "Arrow", "gzip", "zstd", "zip", ".npy", "xz", "bzip2", "HDF5", "Megatron's .idx"),
    *("file with a header of 1024 bytes", "SQLite database", "PyTorch file", "lz4", "Avro", "GGUF"),
    *("a LitData chunk", "a LitData chunk or a M"),
)


def contradiction(path: Path, **options: OptionValue) -> str | None:
    return RAW.describe_contradiction(
        str(path), ReadSpec(options=make_options(options)), storage=STORAGE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_containers_are_not_tokens(tmp_path: Path, kind: str) -> None:
    content, options = containers(tmp_path)[kind]
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    assert re.match(rf"its content looks like (an? )?{kind}", contradiction(path, **options) or "")
    assert contradiction(path, **options, allow_container=True) is None


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (b"PAR1" + b"\1" * 40 + b"PAR2", {}),  # only one end
        (b"ARROW1" + b"\1" * 40, {}),
        (b"PAR1", {}),  # one token's bytes are both ends
        (b"\x1f\x8b\x08\xe0" + b"\1" * 40, {}),  # reserved bits
        (b"\x1f\x8b\x09\x00" + b"\1" * 40, {}),
        (b"\x28\xb5\x2f\xfd\x08" + b"\1" * 41, {}),
        (b"PK\x03\x04\x14\0\0\x80\x08\0" + b"\1" * 40, {}),
        (b"PK\x03\x04\x14\0\0\0\x07\0" + b"\1" * 40, {}),
        (b"PK\x03\x04\x14\0\0\0\x08\0" + b"\xff" * 40, {}),  # a name longer than the file
        # a header longer than the file
        (b"\x93NUMPY\x01\x00\xff\xff" + b"\1" * 40, {"header_bytes": 0}),
        (struct.pack("<3i", 7, 1, 21) + bytes(1012) + b"\1" * 40, {}),  # another number of tokens
        (struct.pack("<4i", 7, 1, 20, 1) + bytes(1008) + b"\1" * 40, {}),
        (struct.pack("<3i", 7, 1, 20) + bytes(1012) + b"\1" * 40, {"header_bytes": 1024}),
        # tokens begin behind the header
        (b"\x93NUMPY\x01\x00\x02\x00{}" + b"\1" * 40, {"header_bytes": 12}),
    ],
)
def test_tokens_like_a_magic_number_are_tokens(
    tmp_path: Path, content: bytes, options: dict[str, OptionValue]
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    assert contradiction(path, **options) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_build_refuses_new_containers_and_warns_of_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    content, options = containers(tmp_path)[kind]
    (tmp_path / "raw").mkdir()
    path = tmp_path / "raw" / "x.bin"
    path.write_bytes(content)
    cache = tmp_path / "cache"
    patterns = (str(tmp_path / "raw" / "*"),)

    def build(**more: OptionValue) -> BuildReport:
        read = ReadSpec(format="raw", options=make_options(options | more))
        source = SourceSpec(name="source", patterns=patterns, read=read)
        return build_index(str(cache), [source], launch=SingleProcess(), storage=STORAGE)

    says = rf"source 'source': {path}: its content looks like (an? )?{kind}.*allow_container: true"
    with pytest.raises(ConfigError, match=says):
        build()
    assert build(allow_container=True).notes == ()
    with monkeypatch.context() as before:  # as versions that did not look
        before.setattr(type(RAW), "describe_contradiction", lambda *_, **__: None)
        first = build()
    again = build()
    assert (again.digest, again.created) == (first.digest, False)
    assert len(again.notes) == 1
    assert re.match(f"{path}: its content looks like (an? )?{kind}", again.notes[0])
    os.utime(path, (1, 1))  # indexed again, and still what a run reads
    touched = build()
    assert (touched.digest, touched.read, touched.notes) == (first.digest, 1, again.notes)

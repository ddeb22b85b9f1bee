"""Files of data that are refused: they are written, or their source is set, as the message says; then they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import megablend
from megablend.errors import CacheError, ChangedFileError, ConfigError, DataError
from megablend.formats import FORMATS
from megablend.formats.arrow import count_batches
from megablend.formats.megatron import lengths, reader
from megablend.formats.parquet.decoding.codecs import CODECS
from megablend.formats.parquet.decoding.values import DECODERS
from megablend.index.blocks import document_lengths
from megablend.index.build import file_tasks
from megablend.operations.check_data import check_data
from tests.behaviour.remedies.driver import Step, fault, table
from tests.behaviour.remedies.files import (
    COUNTS,
    ROWS,
    TEXT,
    TOKENS,
    Data,
    Write,
    again,
    arrow,
    as_tensor,
    big_endian,
    column,
    cut,
    file,
    first_feather,
    footer_start,
    npy,
    of_version_3,
    other_tokens,
    pair,
    parquet,
    raw,
    spoilt,
    stream,
    views,
    without_page_index,
)
from tests.formats.parquet_files import data_page, write
from tests.formats.test_registry import TOKENS as TOKENS_FORMAT
from tests.formats.writers import RAW_EOD, index, opened, pieces
from tests.pyarrow_versions import needs_pyarrow


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    return Data(tmp_path, monkeypatch)


def old_levels(path: Path) -> None:
    write(
        path,
        [data_page(b"\x2c" + np.array([1, 3, 4, 6], "<i4").tobytes(), 6, levels=4)],
        num_values=6,
        num_rows=6,
    )


def beside(bench: Data) -> None:
    """Write the tokens to a Parquet file, and read that."""
    path = bench.path.with_suffix(".parquet")
    parquet()(path)
    bench.change({"path": str(path), "format": None})


def limit(holder: Any, name: str, value: int) -> Step:
    """Lower a limit, as what is larger takes long."""
    return lambda bench: bench.patch.setattr(holder, name, value)


def without(table: Any, key: Any) -> Step:
    return lambda bench: bench.patch.delitem(table, key)


def column_of(kind: pa.DataType, **columns: Any) -> Write:
    """A file of Arrow or Parquet with a column `u64` of lists of this type."""
    rows: Any = [[row] for row in ROWS] if pa.types.is_list(kind) else ROWS

    def write(path: Path) -> None:
        columns_of_all = {"u64": pa.array(rows, pa.list_(kind)), **columns}
        (parquet if path.suffix == ".parquet" else arrow)(columns_of_all)(path)

    return write


def check_tokens(bench: Data) -> str:
    """What `check --data` finds."""
    megablend.build(bench.config)
    return "\n".join(map(str, check_data(bench.config).problems))


def split_source(bench: Data) -> None:
    """List each path of the source as a source by itself."""
    paths = bench.source["path"]
    sources = [{"name": Path(path).stem, "path": path, "weight": 1} for path in paths]
    megablend.build(bench.settings | {"sources": sources})


def masked(mask: Any, ids: Any = ROWS) -> Step:
    """A file with an extra column."""
    return column("a.parquet", parquet({"ids": ids, "mask": mask}), extra_columns=["mask"])


IDS = [[1, 2], [3], [4, 5, 6]] * 40
DTYPE = {"format_options": {"dtype": "uint16"}}
RAW: dict[str, Any] = {"format": "raw"}
DAMAGED = "truncated, or still being written; wait until it is written, or rewrite or re-download the file"
VIEWS = "type list_view<.* not supported; write it as a list, or leave it out of the file if it has no tokens$"
NEW = needs_pyarrow(16, "views of lists")
OTHER_RUN: Step = lambda bench: bench.set(run="other")  # noqa: E731

# fmt: off
test_files = table(
    # Arrow
    fault("an old file", column("a.arrow", spoilt(arrow(), of_version_3)),
          "has Arrow metadata version V3; rewrite it with a newer Arrow$", again(arrow())),
    fault("an old stream", column("a.arrow", spoilt(stream, of_version_3)),
          "has Arrow metadata version V3; rewrite it with a newer Arrow$", again(stream)),
    fault("a big-endian file", column("a.arrow", spoilt(arrow(), big_endian)),
          "is big-endian; rewrite it on a little-endian machine$", again(arrow())),
    fault("a big-endian stream", column("a.arrow", spoilt(stream, big_endian)),
          "is big-endian; rewrite it on a little-endian machine$", again(stream)),
    fault("a tensor in a stream", column("a.arrow", spoilt(stream, as_tensor)),
          "has a message of kind 4, expected only record batches; write the stream with `pyarrow.ipc.new_stream`", again(stream)),
    fault("a column of unknown layout", column("a.arrow", lambda path: arrow({"odd": views(), "ids": ROWS})(path)),
          f"column odd has {VIEWS}", again(arrow()), marks=[NEW]),
    fault("tokens of unknown layout", column("a.arrow", lambda path: arrow({"ids": views()})(path)),
          f"column ids has {VIEWS}", again(arrow()), marks=[NEW]),
    fault("dictionary-encoded", column("a.arrow", arrow({"ids": pa.array(TOKENS).dictionary_encode()})),
          r"is dictionary-encoded; decode it before writing \(Array\.dictionary_decode\(\)\)",
          again(arrow({"ids": pa.array(TOKENS).dictionary_encode().dictionary_decode()}))),
    fault("two columns of one name",
          column("a.arrow", arrow(pa.Table.from_arrays([pa.array(ROWS), pa.array(COUNTS)], names=["ids", "ids"]))),
          "has two columns named ids; rename one", again(arrow({"ids": ROWS, "counts": COUNTS}))),
    fault("Feather of the first version", column("a.feather", first_feather, format="arrow"),
          "is a Feather V1 file, which cannot contain lists; write the tokens to a Parquet file", beside),
    fault("a stream among files", file("it's.arrow", stream, format="arrow"), "set `format: ([a-z-]+)` for its source",
          {"format": "{1}"}, {"format": None}),
    fault("a file among streams", file("a.arrow", arrow(), format="arrow-stream"),
          "is an Arrow file, not an Arrow stream.*`format: ([a-z-]+)`", {"format": "{1}"}),
    fault("a short file", file("a.arrow", raw(b"ARROW1\0\0")),
          "8 bytes, too few for an Arrow IPC file; restore the file", again(arrow())),
    fault("a truncated file", file("a.arrow", cut(arrow())), DAMAGED, again(arrow())),
    fault("a truncated stream", file("a.arrow", cut(stream)), DAMAGED, again(stream)),
    fault("no stream", file("a.arrows", raw(b"PAR1PAR1PAR1")),
          "no message of an Arrow stream begins here: found b'PAR1'; rewrite or re-download the file", again(stream)),
    fault("batches that are too large", (limit(count_batches, "MAX_BYTES", 2000), column("a.arrow", arrow())),
          r"bytes of tokens, more than 2000; write smaller batches \(max_chunksize of RecordBatchFileWriter.write_table\)",
          again(arrow(rows=5))),
    # Parquet
    fault("an unknown column", file("a.parquet", parquet(), column="idz"), r"no column 'idz'; did you mean '(\w+)'\?",
          {"column": "{1}"}),
    fault("an old encoding of levels", column("a.parquet", old_levels),
          "its levels are encoded as BIT_PACKED, .*; rewrite the file with a current writer", again(parquet())),
    fault("a footer that is damaged",
          column("a.parquet",
          spoilt(parquet(), lambda data: data[: footer_start(data)] + bytes(20) + data[footer_start(data) + 20 :])),
          "the footer is damaged: .*; rewrite or re-download the file", again(parquet())),
    fault("a footer that is too long",
          column("a.parquet", spoilt(parquet(), lambda data: data[:-8] + (1 << 24).to_bytes(4, "little") + data[-4:])),
          r"there are only [\d,]+ bytes before it; rewrite or re-download the file", again(parquet())),
    fault("a page index that was cut out", column("a.parquet", without_page_index),
          "the footer is damaged: offset_index has bytes .*; rewrite or re-download the file", again(parquet())),
    fault("an encoding that is not supported", (without(DECODERS, (2, 5)), column("a.parquet", parquet(
          use_dictionary=False, column_encoding={"ids.list.element": "DELTA_BINARY_PACKED"}))),
          "INT64 values with encoding DELTA_BINARY_PACKED are not supported; write them with encoding (PLAIN)$",
          lambda bench: parquet(use_dictionary=False, column_encoding={"ids.list.element": bench.said[1]})(bench.path)),
    fault("a codec that is not supported", (without(CODECS, 4), column("a.parquet", parquet(compression="brotli"))),
          "codec BROTLI is not supported; write the file with (zstd) or (lz4)",
          lambda bench: parquet(compression=bench.said[1])(bench.path),
          lambda bench: parquet(compression=bench.said[2])(bench.path)),
    fault("options of a format without options", file("a.parquet", parquet(), **DTYPE),
          "found option 'dtype', but this format has no options; remove format_options", {"format_options": None}),
    fault("text", file("a.parquet", parquet({"text": TEXT})),
          "no column contains integers or lists of integers; megablend reads token ids: tokenize the text first",
          again(parquet({"text": TEXT, "input_ids": ROWS}))),
    fault("an unknown suffix", file("a.tokens", parquet()),
          "unknown kind of file; set `format` to one of .*?(parquet)", {"format": "{1}"}),
    fault("an empty file", file("a.parquet", raw(b"")), "the file is empty; rewrite or re-download it", again(parquet())),
    fault("a column that has to be named", file("a.parquet", parquet({"ids": ROWS, "others": ROWS, "text": TEXT,
          "token_count": COUNTS})),
          "single integers, which may be counts or ids: token_count.*`column: ([^`]+)`", {"column": "{1}"}),
    *(fault(f"{kind} beside text in {suffix}{' and counts' if more else ''}", file(f"a.{suffix}", column_of(kind, text=TEXT,
            **more)),
            rf"^(?!.*tokenize the text).*column 'u64' (has type list<.*>|is a list of lists).*{advice}",
            again(column_of(pa.int32(), text=TEXT, **more)))
      for suffix in ("parquet", "arrow") for more in ({}, {"count": COUNTS})
      for kind, advice in ((pa.uint64(), "write it as int64 or uint32"), (pa.list_(pa.int32()), "write one list per row"),
                           (pa.list_(pa.uint64()), "write (one list per row|it as int64 or uint32)"))),
    *(fault(f"lists of lists of text in {suffix}", file(f"a.{suffix}", write({"words": [[["x"]]] * 200})),
            "tokenize the text first$",
            again(write({"words": ROWS}))) for suffix, write in (("parquet", parquet), ("arrow", arrow))),
    *(fault(f"unsigned integers of 64 bits in {suffix}", file(f"a.{suffix}", column_of(pa.uint64()), column="u64"),
            "uint64>?; write it as (int64) or (uint32)", again(column_of(pa.int64())), again(column_of(pa.uint32())))
      for suffix in ("parquet", "arrow")),
    # Megatron's pairs
    fault("numbers without a header", file("a.bin", raw()),
          r"if the \.bin is a plain file of token ids \(nanoGPT, llm\.c, \.\.\.\), set `format: (raw)` for its source",
          {"format": "{1}", **DTYPE}),
    fault("a pair whose .idx is gone", file("a.bin", pair(half=True)), r"restore the \.idx", again(pair())),
    fault("a truncated .idx", file("a.bin", cut(pair(), ".idx")), DAMAGED, again(pair())),
    fault("a short .idx", file("a.bin", pair(idx=b"MMIDIDX\0\0\0")),
          "10 bytes, too few for the 34-byte header; restore the file",
          again(pair())),
    fault("a block that is too large", (limit(reader, "_MAX_BYTES", 999), file("a.bin", pair([500] * 20))),
          "is larger than the limit of 999; choose a smaller block_bytes, or split the longest sequences",
          (again(pair([250] * 40)), lambda bench: bench.set(block_bytes=500))),
    fault("a block of many sequences",
          (other_tokens, limit(reader, "_MAX_BYTES", 99), file("a.bin", pair([5] * 500)),
           lambda bench: bench.set(block_bytes=2048)),
          "is larger than the limit of 99; choose a smaller block_bytes, or split the longest sequences",
          lambda bench: bench.set(block_bytes=64)),
    fault("a .bin that is longer than its .idx says", file("a.bin", spoilt(pair(), lambda data: data + bytes(180))),
          r"a\.idx describes the first 1,080; the rest is never read; check that the two files belong",
          (again(pair([9] * 70)), OTHER_RUN)),
    # raw files
    fault("an unknown dtype", file("a.bin", raw(), **RAW),
          r"the dtype of its tokens is unknown.*`format_options: \{dtype: (\w+)\}`",
          {"format_options": {"dtype": "{1}"}}),
    fault("a .npy of floats", file("a.npy", npy(TOKENS.astype(np.float32))),
          "contains .* according to its .npy header; write it as one of uint16, ",
          again(npy(TOKENS))),
    fault("a .npy of two dimensions", file("a.npy", npy(TOKENS[:1000].reshape(10, 100))),
          r"write a one-dimensional array \(tokens\.reshape\(-1\)\)",
          again(npy(TOKENS[:1000].reshape(10, 100).reshape(-1)))),
    fault("a .npy of a future version", file("a.npy", spoilt(npy(TOKENS), lambda data: data[:6] + b"\x09" + data[7:])),
          "its .npy header has version 9 or is truncated; rewrite it with numpy.save", again(npy(TOKENS))),
    fault("an empty .npy", file("a.npy", raw(b"")), "is empty; restore or remove it", again(npy(TOKENS))),
    fault("two ends of documents", file("a.bin", raw(), **RAW, format_options={"dtype": "uint16", "eod_token": 1,
          "bos_token": 2}),
          "found both eod_token and bos_token; set only one of them",
          *({"format_options": {"dtype": "uint16", **token}} for token in ({"eod_token": 1}, {"bos_token": 2}))),
    fault("half of a token", file("a.bin", raw(TOKENS.tobytes() + b"x"), **RAW, **DTYPE),
          r"has [\d,]+ bytes, expected header_bytes 0 plus a multiple of 2, the size of a uint16: truncated, or the dtype is "
          "wrong",
          again(raw())),
    fault("half of a header", file("a.bin", raw(), **RAW, format_options={"dtype": "uint16", "header_bytes": 3}),
          "header_bytes: found 3, expected a multiple of (2), the size of a uint16",
          {"format_options": {"dtype": "uint16", "header_bytes": 2}}),
    fault("what begins like a file of llm.c", (other_tokens, file("a.bin", raw(np.array([20240520, 9, 5],
          np.int32).tobytes() + TOKENS.tobytes()), **RAW)),
          "begins like an llm.c file .*; if it is not an llm.c file, set header_bytes: 0 and dtype",
          {"format_options": {"header_bytes": 0, "dtype": "uint16"}}),
    fault("a column of a raw file", column("a.npy", npy(TOKENS)), "raw files have no columns; remove (column)", {"column": None}),
    fault("a slip in an option", file("a.bin", raw(), **RAW, format_options={"dtyp": "uint16"}),
          r"unknown option 'dtyp'; did you mean '(\w+)'\?", DTYPE),
    # what is found later: when documents are counted, tokens are checked, or samples are read
    fault("a document that is too long",
          (limit(document_lengths, "_LONGEST", 100), lambda bench: bench.set(order="document"),
           column("a.parquet", parquet({"ids": [*ROWS, [*range(1, 151)]]}))),
          "a.parquet: a document has 150 tokens, but document tables support at most 100; split it",
          (again(parquet({"ids": [*ROWS, [*range(1, 76)], [*range(76, 151)]]})), OTHER_RUN)),
    fault("a token out of range",
          (lambda bench: bench.set(vocab_size=100), column("a.parquet", parquet({"ids": [[t + 90 for t in row] for row in ROWS],
          "right": ROWS}))),
          "tokens of the file are out of range: rewrite the file, or set `column:` if this is not the token column",
          ({"column": "right"}, OTHER_RUN), (again(parquet()), OTHER_RUN), fails=check_tokens),
    fault("an extra column of another length", masked([row[1:] for row in ROWS]),
          "each list must have as many values as its row has tokens, nulls not counted",
          masked([[1] * len(row) for row in ROWS])),
    fault("an extra column of half floats", masked([np.ones(len(row), np.float16) for row in ROWS]),
          r"has type float16, expected numbers .*; write it as (float32)",
          masked([np.ones(len(row), np.float32) for row in ROWS])),
    fault("an extra column without a value in some rows", masked([None if i % 7 == 0 else i for i in range(200)]),
          "has 29 rows without a value; every row needs one", (masked([*range(200)]), OTHER_RUN)),
    fault("an extra column that differs from its tokens", masked([[1], [1, 2], [4, 5, 6]] * 40, IDS),
          r"the list in row 0 of column 'mask' does not have one value per token \(nulls not counted\); rewrite the file, "
          r"and build the run under another name \(`run:`\)", (masked(IDS, IDS), OTHER_RUN)),
    fault("two formats", (column("a.parquet", parquet()), lambda bench: pair()(bench.folder / "b.bin"),
                          lambda bench: bench.change({"path": [f"{bench.folder}/{name}" for name in ("a.parquet", "b.bin")],
                          "column": None})),
          "mixes formats: .*; list each format as a separate source", (), works=split_source),
)
# fmt: on


def test_a_vocabulary_that_is_not_in_a_tokenizer(bench: Data) -> None:
    column("a.parquet", parquet())(bench)
    path = bench.folder / "tokenizer.json"
    path.write_text("{}")
    megablend.build(bench.config)
    with pytest.raises(
        ConfigError,
        match=r"not a tokenizer.json \(KeyError: .*\); .* or give `vocab_size` as a number",
    ):
        check_data(bench.config | {"vocab_size": str(path)})
    assert not check_data(bench.config | {"vocab_size": 50}).problems
    path.write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(50)}}}))
    assert not check_data(bench.config | {"vocab_size": str(path)}).problems


def while_it_is_indexed(
    module: Any, name: str, change: Callable[[], Any], *, is_early: bool
) -> pytest.MonkeyPatch:
    """A writer changes the file just before the index takes a digest of it, or just after."""
    digest = getattr(module, name)

    def digest_while_it_is_written(*arguments: Any) -> Any:
        if is_early:
            change()
        found = digest(*arguments)
        if not is_early:
            change()
        return found

    patch = pytest.MonkeyPatch()
    patch.setattr(module, name, digest_while_it_is_written)
    return patch


STILL_WRITTEN: dict[str, tuple[Step, Any, str, Write, str]] = {
    "a.parquet": (
        column("a.parquet", parquet()),
        file_tasks,
        "sampled_content_digest",
        parquet({"ids": ROWS[::-1]}),
        "changed while it was being indexed, or is not the same file on all nodes; let its writer finish, or put it "
        "on a file system that all ranks share, then build again",
    ),
    "a.idx": (
        file("a.bin", pair()),
        reader,
        "digest_idx",
        pair([8, 10] * 30),
        "changed while it was being indexed; wait until its writer has finished, then build again",
    ),
}


@pytest.mark.parametrize("name", STILL_WRITTEN)
def test_a_file_that_is_still_written(bench: Data, name: str) -> None:
    make, module, digest, write_again, says = STILL_WRITTEN[name]
    limit(reader, "WHOLE_BYTES", 100)(bench)
    limit(lengths, "WHOLE_BYTES", 100)(bench)
    make(bench)
    patch = while_it_is_indexed(
        module, digest, lambda: write_again(bench.path), is_early=name == "a.idx"
    )
    with pytest.raises(ChangedFileError, match=f"{name}: {says}"):
        bench.use()
    patch.undo()
    assert bench.use() == ""


@pytest.mark.parametrize("remedy", ["install", "build"])
def test_a_format_of_a_package_that_is_gone(bench: Data, remedy: str) -> None:
    bench.patch.setitem(FORMATS, "tokens", TOKENS_FORMAT)
    file("a.tokens", arrow())(bench)
    bench.use()
    del FORMATS["tokens"]
    says = "source 'a' has format 'tokens', which this megablend does not support; install the version or the package that"
    with pytest.raises(CacheError, match=says):
        megablend.open(bench.config)
    if remedy == "install":
        FORMATS["tokens"] = TOKENS_FORMAT
    else:
        bench.change({"format": "arrow"})
        bench.set(run="again")
    bench.use()


@pytest.mark.parametrize("remedy", ["restore", "another run"])
def test_documents_that_begin_elsewhere(tmp_path: Path, remedy: str) -> None:
    """Between the bytes that a digest of the content takes, a change is only seen when the tokens are read."""
    path = tmp_path / "a.npy"
    tokens = np.tile(np.array([1, 2, 3, RAW_EOD], np.uint16), 500)
    np.save(path, tokens)
    found = index(path, None)
    expected = pieces(opened(path, None, found), found.blocks, found.chunks)
    np.save(path, np.tile(np.array([1, RAW_EOD, 3, RAW_EOD], np.uint16), 500))
    says = "when it was indexed; restore the original file, or give the run another name"
    with pytest.raises(DataError, match=says):
        pieces(opened(path, None, found), found.blocks, found.chunks)
    if remedy == "restore":
        np.save(path, tokens)
        assert pieces(opened(path, None, found), found.blocks, found.chunks) == expected
    else:
        found = index(path, None)
        assert pieces(opened(path, None, found), found.blocks, found.chunks)[0][0] == [1, RAW_EOD]

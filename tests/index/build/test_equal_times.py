"""Files of equal size that were written within a tick of the clock are kept apart."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from tests.runs import make_config

LENGTHS = {1: [40, 60], 2: [70, 30], 3: [10, 90]}


def content(number: int, format_name: str) -> bytes:
    """A file of 100 tokens, all of them `number`; its size depends on the format alone."""
    rows = pa.array([[number] * length for length in LENGTHS[number]], pa.list_(pa.int32()))
    table = pa.table({"ids": rows})
    sink = pa.BufferOutputStream()
    if format_name == "parquet":
        pq.write_table(table, sink, use_dictionary=False, compression="none")
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def write_at_once(contents: dict[Path, bytes]) -> None:
    """Write files whose times are the same; give up on a file system with a finer clock."""
    assert len({len(data) for data in contents.values()}) == 1
    for _ in range(200):
        for path in contents:
            path.unlink(missing_ok=True)
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb", buffering=0)) for path in contents]
            for file, data in zip(files, contents.values(), strict=True):
                file.write(data)
        states = [path.stat() for path in contents]
        if len({(state.st_mtime_ns, state.st_ctime_ns, state.st_size) for state in states}) == 1:
            return
    pytest.skip("the file system gives each file another time")


@pytest.mark.parametrize("format_name", ["parquet", "arrow"])
def test_each_file_keeps_its_own_fragment(tmp_path: Path, format_name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_at_once(
        {folder / f"{number}.{format_name}": content(number, format_name) for number in (1, 2)}
    )
    source = {"name": "s", "path": f"{folder}/*.{format_name}", "column": "ids", "append_eod": 0}
    config = make_config(tmp_path, [source], epochs=1, sequence_length=10)
    first = megablend.build(config)
    assert first.index.read == 2
    second = megablend.build(config)
    assert (second.index.read, second.index.digest) == (0, first.index.digest)
    (folder / f"3.{format_name}").write_bytes(content(3, format_name))
    added = megablend.build({**config, "run": "added"})
    fresh = megablend.build({**config, "cache": str(tmp_path / "fresh")})
    assert (added.index.read, added.index.digest) == (1, fresh.index.digest)

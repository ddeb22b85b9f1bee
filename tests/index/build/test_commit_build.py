"""The bytes of a snapshot, from fragments made here: a change of its format must be meant, and counted up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megablend.caches.local import LocalCacheStore
from megablend.config.read_spec import ReadSpec
from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE, FileIndex
from megablend.index.build.commit_build import write_snapshot
from megablend.index.build.fragments import Fragment
from megablend.index.build.source_spec import SourceFile, SourceSpec, list_columns
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.manifest import FORMAT_VERSION

DIGESTS = {1: "4ba1284d92ee303541f687266c2b586c"}
"""By format version: what earlier releases made of these fragments. States of running jobs name such digests."""


def listing(name: str, num_files: int, *, documents: bool, root: str = "/data") -> SourceSpec:
    files = tuple(
        SourceFile(
            name=f"{i}.parquet", path=f"{root}/{i}.parquet", size=1 << (33 + i), etag=f"{root}{i}"
        )
        for i in range(num_files)
    )
    read = ReadSpec(format="parquet", column="tokens", count_documents=documents)
    paths = tuple(file.path for file in files)
    return SourceSpec(
        name=name, patterns=(f"{root}/*",), read=read, root=root, paths=paths, files=files
    )


def load(source: int, file: SourceFile) -> Fragment:
    number = int(file.name[0])
    blocks = np.zeros(3 * number, BLOCK_DTYPE)
    i = np.arange(len(blocks))
    blocks["chunk"] = i // 2
    blocks["offset"] = i << 30
    blocks["stored_bytes"] = 1 << 31
    blocks["decoded_bytes"] = 3 << 30
    blocks["tokens"] = (i % 3) * (1 << 35)
    blocks["rows"] = i + source
    blocks["ends"] = i
    blocks["encoding"] = 8
    blocks["flags"] = i % 8
    chunks = np.zeros((len(blocks) + 1) // 2, CHUNK_DTYPE)
    chunks["row_group"] = np.arange(len(chunks))
    chunks["codec"] = 6
    chunks["dictionary_offset"] = -1
    index = FileIndex(
        rows=int(blocks["rows"].sum()),
        tokens=int(blocks["tokens"].sum()),
        token_dtype="int32",
        chunks=chunks,
        blocks=blocks,
        structure=f"{number:032x}",
        meta={"b": number, "a": [1, None]},
        scanned_bytes=0,
    )
    return Fragment.of(index, f"{source:032x}")


def write(cache: Path, root: str = "/data") -> str:
    (cache / "generations").mkdir(parents=True)
    listings = [
        listing("one", 4, documents=True, root=root),
        listing("two", 3, documents=False, root=root),
    ]
    found = (load(source, file) for source, each in enumerate(listings) for file in each.files)
    digest, created = write_snapshot(LocalCacheStore(cache), list_columns(listings), found, {})
    assert created
    return digest


def test_the_digest_is_that_of_earlier_releases(tmp_path: Path) -> None:
    assert write(tmp_path / "cache") == DIGESTS[FORMAT_VERSION]


def test_the_digest_does_not_tell_where_the_data_lies(tmp_path: Path) -> None:
    assert write(tmp_path / "cache", "/elsewhere") == DIGESTS[FORMAT_VERSION]


def test_counts_are_exact_beyond_32_bits(tmp_path: Path) -> None:
    snapshot = open_snapshot(tmp_path / "cache", write(tmp_path / "cache"))
    one, two = snapshot.sources
    assert one.tokens == sum(
        int(load(0, file).tokens) for file in listing("one", 4, documents=True).files
    )
    assert two.tokens == sum(
        int(load(1, file).tokens) for file in listing("two", 3, documents=False).files
    )
    assert one.tokens > 1 << 37
    assert one.ends == sum(range(3)) + sum(range(6)) + sum(range(9))


@pytest.mark.parametrize("field", ["tokens", "offset", "chunk", "flags"])
def test_blocks_without_tokens_go_where_documents_are_not_counted(
    tmp_path: Path, field: str
) -> None:
    snapshot = open_snapshot(tmp_path / "cache", write(tmp_path / "cache"))
    two = snapshot.sources[1]
    found = snapshot.blocks(np.arange(two.blocks.start, two.blocks.stop))
    files = listing("two", 3, documents=False).files
    expected = np.concatenate([load(1, file).blocks for file in files])
    kept = expected[expected["tokens"] > 0]
    np.testing.assert_array_equal(found[field], 0 if field == "flags" else kept[field])

"""Writing packs: indexing results are collected and written at intervals, so that a killed build loses little work."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pyarrow as pa

from megablend.caches.base import CacheStore
from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE
from megablend.formats.blocks import join_tables
from megablend.fs.atomic_write import DIGEST_BYTES, replace_file, seal
from megablend.index.fragments import Fragment, FragmentName, publish_fragment
from megablend.index.packs import ENTRIES, LENGTH, MAGIC, FileFacts, facts_of

PACK_MIN_FILES = 32
"""Below this number of files, single fragments are written instead."""
PACK_FILES, PACK_BYTES, PACK_SECONDS = 1 << 14, 16 << 20, 10.0
"""A pack is written when it reaches this number of files, bytes of tables, or seconds since its first file."""


class PackWriter:
    """Stores indexing results: many files in one pack, fewer than PACK_MIN_FILES as single fragments. Thread-safe.

    Args:
        store: of the cache.
    """

    def __init__(self, store: CacheStore) -> None:
        self.written: list[str] = []
        """Names of the packs written so far."""
        self._store = store
        self._lock = threading.RLock()
        self._found: list[tuple[FragmentName, Fragment, bool]] = []
        self._bytes, self._since = 0, 0.0

    def add(self, name: FragmentName, fragment: Fragment, *, is_single: bool) -> None:
        """Add the indexing result of a file, and write a pack if one is due. Raises: CacheError.

        Args:
            is_single: a single fragment of the file exists already.
        """
        with self._lock:
            if not self._found:
                self._since = time.monotonic()
            self._found.append((name, fragment, is_single))
            self._bytes += fragment.index.chunks.nbytes + fragment.index.blocks.nbytes
            is_old = time.monotonic() > self._since + PACK_SECONDS
            if is_old or len(self._found) >= PACK_FILES or self._bytes >= PACK_BYTES:
                self._flush()

    def flush(self) -> None:
        """Write everything that has not been written yet. Raises: CacheError."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if len(self._found) >= PACK_MIN_FILES:
            data = _pack([(name, facts_of(fragment)) for name, fragment, _ in self._found])
            name = data[-DIGEST_BYTES:].hex()
            replace_file(self._store.folder / "packs" / name, data)
            self._store.publish_file("packs", name)
            self.written.append(name)
        else:
            for each, fragment, is_single in self._found:
                if not is_single:
                    publish_fragment(self._store, str(each), fragment)
        self._found, self._bytes = [], 0


def _pack(found: Sequence[tuple[FragmentName, FileFacts]]) -> bytes:
    entries = [
        {
            "place": name.place,
            "answer": name.answer,
            "rows": each.rows,
            "tokens": each.tokens,
            "token_dtype": each.token_dtype,
            "structure": each.structure,
            "body": each.body,
            "meta": each.meta,
            "column": each.column,
            "num_chunks": len(each.chunks),
            "num_blocks": len(each.blocks),
            "token_min": None if each.token_range is None else each.token_range[0],
            "token_max": None if each.token_range is None else each.token_range[1],
        }
        for name, each in found
    ]
    batch = pa.RecordBatch.from_pylist(entries, schema=ENTRIES)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ENTRIES) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue().to_pybytes()
    chunks = join_tables((each.chunks for _, each in found), CHUNK_DTYPE)
    blocks = join_tables((each.blocks for _, each in found), BLOCK_DTYPE)
    return seal(b"".join([MAGIC, LENGTH.pack(len(stream)), stream, chunks.tobytes(), blocks.tobytes()]))

"""A pack: the indexing results of many files in one file, so that a build of 100,000 small files
flushes about ten files.

    <cache>/packs/<digest>   magic, length of the entries (uint64, little-endian), entries as an Arrow IPC stream, the files'
                             chunk tables, their block tables, a blake2b digest (16 bytes) of
                             everything before

A build writes packs at intervals, so that little work is lost if it is killed. An entry is looked
up by `answer`, a part of the name of its fragment (see fragments.py). If the digest is wrong, the
pack is ignored and its files are indexed again. If there are only a few results, they are stored as
single fragments. Results for parts of large files, and all results of megablend 0.1.0, are also
single fragments. A build moves single fragments into a pack if there are many.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megablend.arrays import running_totals
from megablend.caches.base import CacheStore
from megablend.errors import REMOVE_REMEDY, CacheError
from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE
from megablend.formats.blocks import join_tables
from megablend.formats.buffers import as_numpy
from megablend.index.build.fragments import PLAIN_FIELDS, Fragment, publish_fragment, split_name
from megablend.lazy import cached_property
from megablend.system.atomic_write import replace_file, seal, unseal
from megablend.system.digest import DIGEST_BYTES
from megablend.system.safe_open import map_descriptor, open_regular

MAGIC = b"megablend pack 1\n"
LENGTH = struct.Struct("<Q")
ENTRIES = pa.schema(
    [
        ("place", pa.string()),
        ("answer", pa.string()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("token_dtype", pa.string()),
        ("structure", pa.string()),
        ("body", pa.string()),
        ("meta", pa.string()),  # JSON, as in the index
        ("column", pa.string()),  # column of the tokens; null if the format has no columns
        ("num_chunks", pa.int64()),
        ("num_blocks", pa.int64()),
        # null if not known; packs of older versions lack the last two
        ("token_min", pa.int64()),
        ("token_max", pa.int64()),
    ]
)
"""The columns of a pack's entries. A pack has an entry for each file; see Fragment."""


PACK_MIN_FILES = 32
"""Minimum number of results in a pack; fewer are written as single fragments."""
PACK_FILES = 1 << 14
PACK_BYTES = 16 << 20
PACK_SECONDS = 10.0
"""A pack is written when it has PACK_FILES files, when it has PACK_BYTES bytes of tables, or
PACK_SECONDS after its first file."""


_FIELDS = (*PLAIN_FIELDS, "meta", "column")
"""The attributes of a Fragment that are stored as columns of the entries."""


class Pack:
    """A memory-mapped pack that has been verified against its digest.

    Raises: CacheError if it is damaged, or if it cannot be read. The error has a cause only if the
        pack cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                data = memoryview(map_descriptor(file.fileno()))
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CacheError(f"{path}: cannot be read ({error}); {REMOVE_REMEDY}") from error
        body = unseal(data)
        start = len(MAGIC) + LENGTH.size
        if body is None or len(body) < start or body[: len(MAGIC)] != MAGIC:
            raise CacheError(
                f"{path}: damaged pack of {len(data)} bytes (its checksum is wrong); {REMOVE_REMEDY}"
            )
        (length,) = LENGTH.unpack_from(body, len(MAGIC))
        self._entries = pa.ipc.open_stream(
            pa.py_buffer(body[start : start + length])
        ).read_next_batch()
        self._first_chunk = running_totals(as_numpy(self._entries.column("num_chunks"))).tolist()
        self._first_block = running_totals(as_numpy(self._entries.column("num_blocks"))).tolist()
        self._chunks = np.frombuffer(body, CHUNK_DTYPE, self._first_chunk[-1], start + length)
        self._blocks = np.frombuffer(
            body, BLOCK_DTYPE, self._first_block[-1], start + length + self._chunks.nbytes
        )

    def names(self, part: str) -> list[str]:
        """Return the part `place` or `answer` of each fragment's name, in the order of the pack."""
        names: list[str] = self._entries.column(part).to_pylist()
        return names

    def contents(self) -> list[tuple[str, str]]:
        """Return two digests for each file, of its structure and of its body, which together
        identify its content."""
        return list(zip(self._columns["structure"], self._columns["body"], strict=True))

    def fragment(self, number: int) -> Fragment:
        """Return the fragment of a file, given by its number in the pack."""
        columns = self._columns
        first_chunk, stop_chunk = self._first_chunk[number : number + 2]
        first_block, stop_block = self._first_block[number : number + 2]
        return Fragment(
            **{name: columns[name][number] for name in _FIELDS},
            token_range=self._token_range(number),
            chunks=self._chunks[first_chunk:stop_chunk],
            blocks=self._blocks[first_block:stop_block],
        )

    def _token_range(self, number: int) -> tuple[int, int] | None:
        low = self._columns["token_min"][number]
        high = self._columns["token_max"][number]
        return None if low is None or high is None else (low, high)

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {
            name: self._entries.column(name).to_pylist() for name in _FIELDS
        }
        for name in ("token_min", "token_max"):
            if name in self._entries.schema.names:
                columns[name] = self._entries.column(name).to_pylist()
            else:
                columns[name] = [None] * self._entries.num_rows
        return columns


class Packed:
    """The fragments in all packs of a cache, by name."""

    def __init__(self) -> None:
        self.places: set[str] = set()
        """The `place` of each fragment's name."""
        self._by_name: dict[str, tuple[Pack, int]] = {}
        """The pack that contains each fragment, and the fragment's number in the pack."""
        self.by_answer = AnswerNames()

    def add(self, pack: Pack) -> None:
        """Add the fragments of a pack."""
        names = zip(pack.names("place"), pack.names("answer"), strict=True)
        for number, (place, answer) in enumerate(names):
            name = f"{place}-{answer}"
            self.places.add(place)
            self._by_name[name] = pack, number
            self.by_answer.add(answer, name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def fragment(self, name: str) -> Fragment:
        """Return the fragment of this name. Raises: KeyError if there is none."""
        pack, number = self._by_name[name]
        return pack.fragment(number)


class AnswerNames:
    """The names of fragments by `answer`. Two files may have one answer, since local files are told
    apart by size and time alone: then the answer does not say which of them a fragment is of."""

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}

    def add(self, answer: str, name: str) -> None:
        """Add a fragment."""
        self._names[answer] = name if self._names.get(answer, name) == name else None

    def find(self, answer: str) -> str | None:
        """Return the name of the only fragment with this `answer`; None if there is no such one."""
        return self._names.get(answer)


class PackWriter:
    """Writes indexing results to a cache: many results to one pack, fewer than PACK_MIN_FILES to
    single fragments. Thread-safe.

    Args:
        store: the cache's store.
    """

    def __init__(self, store: CacheStore) -> None:
        self.written: list[str] = []
        """Names of the packs written so far."""
        self._store = store
        self._lock = threading.RLock()
        self._pending: list[tuple[str, Fragment, bool]] = []
        """Results that have not been written yet, as the arguments of `add`."""
        self._pending_bytes = 0
        self._first_added = 0.0
        """`time.monotonic()` when the first pending result was added."""

    def add(self, name: str, fragment: Fragment, *, is_single: bool) -> None:
        """Add the indexing result of a file. If there are enough results, or if the first one is
        old enough, write a pack. Raises: CacheError.

        Args:
            is_single: whether the cache already has a single fragment of the file.
        """
        with self._lock:
            if not self._pending:
                self._first_added = time.monotonic()
            self._pending.append((name, fragment, is_single))
            self._pending_bytes += fragment.chunks.nbytes + fragment.blocks.nbytes
            is_old = time.monotonic() > self._first_added + PACK_SECONDS
            is_large = len(self._pending) >= PACK_FILES or self._pending_bytes >= PACK_BYTES
            if is_old or is_large:
                self._flush()

    def flush(self) -> None:
        """Write all results that have not been written yet. Raises: CacheError."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if len(self._pending) >= PACK_MIN_FILES:
            data = _pack([(name, fragment) for name, fragment, _ in self._pending])
            name = data[-DIGEST_BYTES:].hex()
            replace_file(self._store.folder / "packs" / name, data)
            self._store.publish_file("packs", name)
            self.written.append(name)
        else:
            for name, fragment, is_single in self._pending:
                if not is_single:
                    publish_fragment(self._store, name, fragment)
        self._pending = []
        self._pending_bytes = 0


def _pack(fragments: Sequence[tuple[str, Fragment]]) -> bytes:
    """Serialize named fragments to a pack."""
    entries = [
        {
            "place": split_name(name)[0],
            "answer": split_name(name)[1],
            **{name: getattr(fragment, name) for name in _FIELDS},
            "num_chunks": len(fragment.chunks),
            "num_blocks": len(fragment.blocks),
            "token_min": None if fragment.token_range is None else fragment.token_range[0],
            "token_max": None if fragment.token_range is None else fragment.token_range[1],
        }
        for name, fragment in fragments
    ]
    batch = pa.RecordBatch.from_pylist(entries, schema=ENTRIES)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ENTRIES) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue().to_pybytes()
    chunks = join_tables((fragment.chunks for _, fragment in fragments), CHUNK_DTYPE)
    blocks = join_tables((fragment.blocks for _, fragment in fragments), BLOCK_DTYPE)
    return seal(
        b"".join([MAGIC, LENGTH.pack(len(stream)), stream, chunks.tobytes(), blocks.tobytes()])
    )

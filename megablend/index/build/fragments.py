"""A fragment: the result of indexing one file, stored so that an unchanged file is not read again.

The name of a fragment consists of two parts. `place` identifies the file (source, name). `answer`
identifies what was requested: the version of the file (size, etag), the column, the options. If no
other file has the same `answer`, it alone decides whether a fragment can be reused, so files keep
their fragments when a source is renamed, when its folder moves, and when files in other folders are
added to it.

Format: magic, length of a JSON header (uint32, little-endian), the header, the chunk table, the
block table, and a blake2b digest (16 bytes) of everything before. If the digest is wrong, the
fragment is ignored and the file is read again.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megablend.caches.base import CacheStore
from megablend.errors import REMOVE_REMEDY, CacheError
from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE, Array, FileIndex
from megablend.index.build.source_spec import SourceFile, SourceSpec
from megablend.index.tables.file_versions import versions_of
from megablend.system.atomic_write import replace_file, seal, unseal
from megablend.system.digest import hex_digest
from megablend.system.failures import cache_remedy_of, cause_of
from megablend.system.limited_json import missing_field, parse_json
from megablend.system.safe_open import open_regular, read_regular

FORMAT_VERSION = 1
_MAGIC = b"megablend fragment\n"
_LENGTH = struct.Struct("<I")
_PART = ".part-"
_FIELDS: dict[str, type] = {
    "rows": int,
    "tokens": int,
    "token_dtype": str,
    "structure": str,
    "meta": dict,
    "scanned_bytes": int,
    "num_chunks": int,
    "num_blocks": int,
    "body": str,
}
"""Required fields of a fragment's header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Everything that the index stores about one file, in the form of its tables; see FileIndex."""

    rows: int
    tokens: int
    token_dtype: str
    structure: str
    body: str
    """Digest of sampled ranges of the file's body, as a hex string."""
    meta: str
    """FileIndex.meta as JSON text, which is stored in the index unchanged."""
    column: str | None
    token_range: tuple[int, int] | None
    chunks: Array
    """CHUNK_DTYPE [num_chunks]."""
    blocks: Array
    """BLOCK_DTYPE [num_blocks]."""
    scanned_bytes: int = 0
    note: str | None = None

    @classmethod
    def of(cls, index: FileIndex, body: str) -> Fragment:
        """Make the fragment of a file from its index, which its format computed, and the digest of
        its body."""
        fields = {name: getattr(index, name) for name in _INDEXED}
        return cls(**fields, body=body, meta=_dump(index.meta))

    def make_index(self) -> FileIndex:
        """Return the FileIndex from which the fragment was made."""
        fields = {name: getattr(self, name) for name in _INDEXED}
        return FileIndex(**fields, meta=parse_json(self.meta))


_INDEXED = tuple(
    field.name for field in dataclasses.fields(Fragment) if field.name not in ("body", "meta")
)
"""The attributes that both a Fragment and a FileIndex have."""
PLAIN_FIELDS = ("rows", "tokens", "token_dtype", "structure", "body")
"""The attributes of a Fragment that are stored unchanged, in a file of its own or in a pack."""


def fragment_name(column: SourceSpec, file: SourceFile, *, documents: bool) -> str:
    """Return the name of a file's fragment, `place-answer`. `documents` says whether the fragment
    counts documents."""
    version, _ = versions_of(file.etag)
    answer = fragment_answer(column, file, version, documents=documents)
    return f"{fragment_place(column, file)}-{answer}"


def fragment_place(column: SourceSpec, file: SourceFile) -> str:
    """Return `place`, the part of the name of a file's fragment that identifies the file."""
    return hex_digest(json.dumps([column.column_name, file.name]), 8)


def split_name(name: str) -> tuple[str, str]:
    """Return the two parts of a fragment's name, `place` and `answer`."""
    place, _, answer = name.partition("-")
    return place, answer


def fragment_answer(column: SourceSpec, file: SourceFile, version: str, *, documents: bool) -> str:
    """Return `answer`, the part of the name of a file's fragment that decides whether the fragment
    can be reused. `version` is one of `versions_of(file.etag)`."""
    read = dataclasses.replace(column.read, count_documents=documents)
    return hex_digest(json.dumps([FORMAT_VERSION, *read.cache_key(), file.size, version]))


def is_part(name: str) -> bool:
    """Return whether a fragment describes only a part of a file."""
    return _PART in name


def part_name(name: str, part: int, count: int) -> str:
    """Return the name of the fragment of one part of a file. It exists only until all `count` parts
    are joined into the fragment called `name`."""
    return f"{name}{_PART}{part}-{count}"


def write_fragment(path: Path, fragment: Fragment) -> None:
    """Store a fragment atomically. Raises: CacheError if it cannot be written."""
    names = (*PLAIN_FIELDS, "scanned_bytes", "column", "token_range")
    header = {name: getattr(fragment, name) for name in names}
    header |= {
        "meta": parse_json(fragment.meta),
        "num_chunks": len(fragment.chunks),
        "num_blocks": len(fragment.blocks),
    }
    text = _dump(header).encode()
    tables = [
        fragment.chunks.astype(CHUNK_DTYPE).tobytes(),
        fragment.blocks.astype(BLOCK_DTYPE).tobytes(),
    ]
    replace_file(path, seal(b"".join([_MAGIC, _LENGTH.pack(len(text)), text, *tables])))


def publish_fragment(store: CacheStore, name: str, fragment: Fragment) -> None:
    """Store a fragment in a cache. Raises: CacheError if it cannot be written."""
    write_fragment(store.folder / "fragments" / name, fragment)
    store.publish_file("fragments", name)


def read_fragment(path: Path) -> Fragment:
    """Load a fragment. Raises: FileNotFoundError; CacheError if it is damaged or cannot be read."""
    with _translate_os_errors(path):
        data = read_regular(path)
    body = unseal(data)
    if body is None or not body.startswith(_MAGIC):
        raise CacheError(
            f"{path}: damaged fragment of {len(data)} bytes (its checksum is wrong); {REMOVE_REMEDY}"
        )
    start = len(_MAGIC) + _LENGTH.size
    try:
        (length,) = _LENGTH.unpack_from(body, len(_MAGIC))
        header: dict[str, Any] = parse_json(body[start : start + length])
        missing = missing_field(header, _FIELDS)
        if missing is not None:
            raise ValueError(f"its header lacks {missing}")
        for name in ("rows", "tokens", "scanned_bytes"):
            if not 0 <= header[name] < 1 << 63:
                raise ValueError(f"its header has {header[name]} {name}")
        first_table = start + length
        num_chunks = header["num_chunks"]
        num_blocks = header["num_blocks"]
        table_bytes = CHUNK_DTYPE.itemsize * num_chunks + BLOCK_DTYPE.itemsize * num_blocks
        if num_chunks < 0 or num_blocks < 0 or len(body) != first_table + table_bytes:
            raise ValueError("the size of its tables does not match its header")
        chunks = np.frombuffer(body, CHUNK_DTYPE, num_chunks, first_table)
        blocks = np.frombuffer(body, BLOCK_DTYPE, num_blocks, first_table + chunks.nbytes)
    except (ValueError, struct.error) as error:
        raise CacheError(f"{path}: damaged fragment ({error}); {REMOVE_REMEDY}") from error
    return Fragment(
        **{name: header[name] for name in PLAIN_FIELDS},
        meta=_dump(header["meta"]),
        # Older versions recorded the column's name only in Parquet's metadata
        column=header.get("column", header["meta"].get("name")),
        token_range=_parse_range(header),
        chunks=chunks,
        blocks=blocks,
        scanned_bytes=header["scanned_bytes"],
    )


def fragment_content(path: Path) -> tuple[str, str] | None:
    """Return the digests of a file's structure and of its body, given the file's fragment. Together
    they identify the content of the file. Return None if the fragment is damaged.

    Raises: FileNotFoundError; CacheError if the fragment cannot be read.
    """
    try:
        with _translate_os_errors(path), open_regular(path) as file:
            start = file.read(len(_MAGIC) + _LENGTH.size)
            if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + _LENGTH.size:
                return None
            header = parse_json(file.read(_LENGTH.unpack_from(start, len(_MAGIC))[0]))
    except ValueError:
        return None
    if missing_field(header, _FIELDS) is not None:
        return None
    return header["structure"], header["body"]


@contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to a CacheError, except a FileNotFoundError for a fragment that does not
    exist."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        remedy = ", or ".join(dict.fromkeys([cache_remedy_of(error.errno, path), REMOVE_REMEDY]))
        raise CacheError(f"{path}: cannot be read ({cause_of(error)}); {remedy}") from error


def _dump(content: dict[str, Any]) -> str:
    """Serialize content to canonical JSON: equal contents have the same JSON text."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _parse_range(header: dict[str, Any]) -> tuple[int, int] | None:
    """Return the range of tokens from a fragment's header. Return None if the range is invalid, or
    if it is missing because an older version of megablend wrote the fragment."""
    match header.get("token_range"):
        case [int(low), int(high)] if low >= -(1 << 63) and high < 1 << 63:
            return low, high
    return None

"""One file of all `.idx` lengths: a rank that opens thousands of pairs opens this one instead, and stats none of them.

    megablend-lengths/<digest of the prefixes>.npy     int32, the lengths of all pairs, one after the other
    megablend-lengths/<digest of the prefixes>.json    for each prefix its first entry, token dtype, size and mtime; written last

Built by all ranks of a launch, each its share of the prefixes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import CacheError
from megablend.formats.base import Array
from megablend.formats.megatron.idx import HEADER_BYTES, Header, parse_header
from megablend.fs.atomic_write import replace_file, translate_os_errors
from megablend.megatron.cache_builder.lengths import lengths_of, read_lengths
from megablend.megatron.cache_builder.shared_array import shared_array
from megablend.storage.base import Storage
from megablend.system.limited_json import parse_json

_FOLDER = "megablend-lengths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A catalog's entry for a `.bin/.idx` pair."""

    lengths: Array
    """int32 [num_sequences], tokens; memory-mapped."""
    token_dtype: str
    etag: str
    """The etag of the `.idx` when its lengths were read."""


class Catalog:
    """The lengths of many pairs, in one memory map."""

    def __init__(self, path: Path, pairs: dict[str, Any]) -> None:
        self._pairs = pairs
        self._lengths = np.asarray(np.load(path, mmap_mode="r"))  # a kernel takes a plain array sooner than a memmap

    def pair(self, prefix: str) -> Pair:
        """A pair by its prefix, as the blend names it."""
        entry = self._pairs[prefix]
        first, count = entry["first"], entry["sequences"]
        return Pair(lengths=self._lengths[first : first + count], token_dtype=entry["dtype"], etag=entry["etags"][0])


@lru_cache(maxsize=8)
def catalog_path(cache: str, prefixes: tuple[str, ...]) -> Path:
    """Path of the catalog of these prefixes, without `.npy` or `.json`."""
    digest = hashlib.blake2b(json.dumps(sorted(set(prefixes))).encode(), digest_size=16).hexdigest()
    return Path(cache).absolute() / _FOLDER / digest


@lru_cache(maxsize=8)
def open_catalog(path: Path) -> Catalog:
    """Open a catalog; a process opens each once. Raises: CacheError where there is none, or it is damaged."""
    try:
        return Catalog(path.with_suffix(".npy"), parse_json(path.with_suffix(".json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CacheError(
            f"{path}: the lengths of the .idx files are missing or damaged ({error}); open the datasets through "
            "MegablendDatasetBuilder, which writes them"
        ) from error


def build_catalog(cache: str, prefixes: Sequence[str], *, launch: Communicator, storage: Storage) -> None:
    """Write the catalog of these prefixes, unless there is one of the same files. Called by all ranks of the launch.

    Raises: DataError where an `.idx` cannot be read; CacheError where the cache cannot be written.
    """
    names, path = sorted(set(prefixes)), catalog_path(cache, tuple(prefixes))
    mine = names[launch.rank :: launch.size]
    seen = _everyones(launch, {prefix: _look(prefix, storage) for prefix in mine})
    counts = [seen[prefix]["sequences"] for prefix in names]
    firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tolist()
    pairs = {prefix: {"first": first, **seen[prefix]} for prefix, first in zip(names, firsts, strict=False)}
    text = json.dumps(pairs, indent=0).encode()
    if launch.bcast(_is(path, text)):
        return
    if launch.rank == 0:  # it must not be found next to other lengths, however this ends
        with translate_os_errors(path):
            path.with_suffix(".json").unlink(missing_ok=True)
    with shared_array(path.with_suffix(".npy"), firsts[-1], launch) as write:
        for number in assign_longest_first(counts, launch.size)[launch.rank]:
            write(firsts[number], read_lengths(lengths_of(names[number], storage=storage)))
    if launch.rank == 0:
        replace_file(path.with_suffix(".json"), text)
    launch.barrier()
    open_catalog.cache_clear()


def _look(prefix: str, storage: Storage) -> dict[str, Any]:
    """What the catalog keeps of a pair, besides its lengths."""
    path = f"{prefix}.idx"
    state, data = storage.stat(path), storage.stat(f"{prefix}.bin")
    header: Header = parse_header(path, storage.read(path, 0, min(state.size, HEADER_BYTES)), state.size)
    return {"sequences": header.num_sequences, "dtype": header.token_dtype, "etags": [state.etag, data.etag]}


def _everyones(launch: Communicator, mine: dict[str, Any]) -> dict[str, Any]:
    """The entries of all ranks' dicts, on every rank."""
    return {name: value for part in launch.allgather(mine) for name, value in part.items()}


def _is(path: Path, text: bytes) -> bool:
    try:
        return path.with_suffix(".json").read_bytes() == text and path.with_suffix(".npy").is_file()
    except OSError:
        return False

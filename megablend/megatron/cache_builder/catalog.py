"""Catalogs: a catalog contains the sequence lengths of many `.idx` files, so that a rank can open
it instead of thousands of pairs.

    megablend-lengths/<digest of the prefixes>.npy     int32, the lengths of all pairs, one after the other
    megablend-lengths/<digest of the prefixes>.json    for each prefix its first entry, the number of its
                                                       sequences, token dtype, and the etags of `.idx` and `.bin`;
                                                       written last

All ranks of a launch build a catalog together; each reads the `.idx` files of a share of the
prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import CacheError
from megablend.formats.base import Array
from megablend.formats.megatron.idx import HEADER_BYTES, parse_header
from megablend.megatron.cache_builder.lengths import counted_lengths, read_lengths
from megablend.megatron.cache_builder.shared_array import shared_array
from megablend.storage.base import Storage
from megablend.storage.local import without_inodes
from megablend.system.atomic_write import replace_file, translate_os_errors
from megablend.system.digest import hex_digest
from megablend.system.limited_json import parse_json

_FOLDER = "megablend-lengths"


@lru_cache(maxsize=8)
def catalog_path(cache: str, prefixes: tuple[str, ...]) -> Path:
    """Return the path of the catalog of these prefixes, without `.npy` or `.json`."""
    digest = hex_digest(json.dumps(sorted(set(prefixes))))
    return Path(cache).absolute() / _FOLDER / digest


@lru_cache(maxsize=8)
def open_catalog(path: Path) -> tuple[Array, dict[str, dict[str, Any]]]:
    """Open a catalog. Results are cached, so each catalog is opened once per process.

    Returns: the lengths of all pairs (int32, memory-mapped), and the entry of each pair by prefix.
    Raises: CacheError if the catalog is missing or damaged.
    """
    try:
        # Before the lengths: if another job writes both just now, the etags are the older ones, and
        # reading a pair finds the other etags
        entries = parse_json(path.with_suffix(".json").read_text(encoding="utf-8"))
        # A kernel is called faster with a plain array than with a memmap
        return np.asarray(np.load(path.with_suffix(".npy"), mmap_mode="r")), entries
    except (OSError, ValueError) as error:
        raise CacheError(
            f"{path}: the lengths of the .idx files are missing or damaged ({error}); open the datasets through "
            "MegablendDatasetBuilder without fast_cache_load, which writes them"
        ) from error


def build_catalog(
    cache: str, prefixes: Sequence[str], *, launch: Communicator, storage: Storage
) -> None:
    """Write the catalog of these prefixes, unless it exists already for the same versions of the
    files. All ranks of the launch must call this function.

    Raises: DataError if an `.idx` cannot be read; CacheError if the cache cannot be written.
    """
    names = sorted(set(prefixes))
    path = catalog_path(cache, tuple(prefixes))
    own = {prefix: _read_entry(prefix, storage) for prefix in names[launch.rank :: launch.size]}
    read = {prefix: entry for of_rank in launch.allgather(own) for prefix, entry in of_rank.items()}
    counts = [read[prefix]["sequences"] for prefix in names]
    firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tolist()
    entries = {
        prefix: {"first": first, **read[prefix]}
        for prefix, first in zip(names, firsts[:-1], strict=True)
    }
    text = json.dumps(entries, indent=0).encode()
    if launch.bcast(_is_current(path, text)):
        return
    # A build that fails must not leave the old entries with new lengths
    if launch.rank == 0:
        with translate_os_errors(path):
            path.with_suffix(".json").unlink(missing_ok=True)
    with shared_array(path.with_suffix(".npy"), firsts[-1], launch) as write:
        for number in assign_longest_first(counts, launch.size)[launch.rank]:
            stored = counted_lengths(names[number], counts[number], storage=storage)
            write(firsts[number], read_lengths(stored))
    if launch.rank == 0:
        replace_file(path.with_suffix(".json"), text)
    launch.barrier()
    open_catalog.cache_clear()


def _read_entry(prefix: str, storage: Storage) -> dict[str, Any]:
    """Return the entry of a pair in the catalog, without the key `first`."""
    path = f"{prefix}.idx"
    state = storage.stat(path)
    data = storage.stat(f"{prefix}.bin")
    header = parse_header(path, storage.read(path, 0, min(state.size, HEADER_BYTES)), state.size)
    return {
        "sequences": header.num_sequences,
        "dtype": header.token_dtype,
        "etags": [without_inodes(state.etag), without_inodes(data.etag)],
    }


def _is_current(path: Path, text: bytes) -> bool:
    """Return whether the catalog at this path exists and its JSON is `text`."""
    try:
        return path.with_suffix(".json").read_bytes() == text and path.with_suffix(".npy").is_file()
    except OSError:
        return False

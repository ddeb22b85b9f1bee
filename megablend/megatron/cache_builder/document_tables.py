"""Document tables: the lengths of all documents in Parquet or Arrow files. Megatron's order needs
these lengths, but the files do not store them.

    megablend/generations/<digest>/             the index of the files, as `megablend build` makes it
    megablend-documents/<address>.json          its snapshot, and the table's checksum; written last
    megablend-documents/<address>-<digest>.npy  int32, the lengths of its documents, end-of-document tokens included

An address keeps its snapshot as long as its JSON file exists. So a run that continues does not see
files that were added later, and replaced files are refused. Remove the JSON file to have the files
indexed again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from megablend.caches.base import SNAPSHOTS
from megablend.caches.find import find_store
from megablend.config.read_spec import ReadSpec, make_options
from megablend.distributed.base import Communicator
from megablend.errors import CacheError, ChangedFileError, ConfigError, UnsupportedFileError
from megablend.formats.base import Array
from megablend.formats.flat import DOCUMENTS, is_flat
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.document_lengths import count_documents, next_cut
from megablend.index.build.build import SourceSpec, build_index
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.index.tables.cache_folders import external_references_dir
from megablend.index.tables.manifest import check_sizes, read_roots, read_snapshot_manifest
from megablend.index.verify.repair import find_damage, list_indexed_files
from megablend.megatron.cache_builder.shared_array import shared_array
from megablend.megatron.request.address import Address, parse_address
from megablend.storage.base import Storage
from megablend.system.atomic_write import checksum, replace_file
from megablend.system.digest import hex_digest
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG

_BLOCK_BYTES = 1 << 20
"""Block size of the index. Blocks are small, since Megatron's order reads documents at random."""
_MAX_TOKENS = (1 << 31) - 1
"""Maximum number of tokens in a document: Megatron stores lengths as int32."""
_SOURCE = "documents"
INDEX_FOLDER = "megablend"
"""The folder inside Megatron's cache folder that has the format of megablend's own caches."""
_snapshots: WeakValueDictionary[tuple[str, str], Snapshot] = WeakValueDictionary()
"""The snapshots in use, by cache and digest. All splits and datasets of a process share one memory
map of each snapshot."""


def build_table(cache: str, address: Address, *, launch: Communicator, storage: Storage) -> Address:
    """Index the files of an address and write the table of their documents' lengths, unless both
    exist already and are intact. A damaged or missing table is written again from the same index.
    All ranks of the launch must call this function.

    Returns: the address, with the digest of its index snapshot.
    Raises: ConfigError, DataError, CacheError.
    """
    known, is_intact = launch.bcast(
        _find_table(cache, address) if launch.rank == 0 else (None, False)
    )
    if known is None:
        report = build_index(
            str(_index(cache)), [_source_spec(address)], launch=launch, storage=storage
        )
        indexed = dataclasses.replace(address, index=report.digest)
    else:
        _repair_index(cache, known, launch, storage)
        indexed = known
    store = _store(cache, indexed, storage)
    if _has_token_documents(store, address):
        if known is None:
            raise ConfigError(
                f"{address}: has one token per row, and each row would be a document; add `documents=file`, "
                "`documents=row_group`, or `documents=ID` with the id of the token that ends documents"
            )
        if launch.rank == 0:
            LOG.warning(
                "%s: has one token per row, and each counts as a document, as it did when the cache was built",
                address,
            )
    if is_intact:
        return indexed
    try:
        _write_table(cache, indexed, store, launch)
    except ChangedFileError as error:
        if known is None:
            raise
        raise _changed(
            f"{table_path(cache, indexed)}: is missing or damaged", cache, known
        ) from error
    return indexed


def _write_table(cache: str, indexed: Address, store: BlockStore, launch: Communicator) -> None:
    """Write the table of an indexed address, and the JSON file that names its snapshot. All ranks
    of the launch must call this function. Raises: DataError, CacheError."""
    path = table_path(cache, indexed)
    num_documents = store.snapshot.sources[0].rows
    with shared_array(path, num_documents, launch) as write:
        for first, lengths, _ in count_documents(
            store, *share_of(store.snapshot, launch.rank, launch.size)
        ):
            if indexed.append_eod is not None:
                lengths += lengths > 0
            if lengths.max(initial=0) > _MAX_TOKENS:
                raise UnsupportedFileError(
                    indexed.pattern,
                    f"document {first + int(np.argmax(lengths))} has {lengths.max():,} tokens, but "
                    f"Megatron supports at most {_MAX_TOKENS:,}; split the document",
                )
            write(first, lengths.astype(np.int32))
    if launch.rank == 0:
        address = str(dataclasses.replace(indexed, index=None))
        pin = {"address": address, "index": indexed.index, "documents": num_documents}
        pin["checksum"] = checksum(path)
        replace_file(_pin(cache, indexed), json.dumps(pin, indent=1).encode())
    launch.barrier()


def _changed(damage: str, cache: str, known: Address) -> CacheError:
    """Return the error that what is damaged cannot be built again."""
    return CacheError(
        f"{damage}; it cannot be built again, since the files of {known.pattern} have changed: restore them, or "
        f"remove {_pin(cache, known)} to index them as they are now, which gives other samples"
    )


def _repair_index(cache: str, known: Address, launch: Communicator, storage: Storage) -> None:
    """Rebuild the index snapshot of an address if it is damaged or missing. All ranks of the launch
    must call this function. Raises: CacheError if the files are not those of the snapshot."""
    assert known.index is not None
    store = find_store(str(_index(cache)))
    damage = launch.bcast(find_damage(store, known.index) if launch.rank == 0 else None)
    if damage is None:
        return
    specs: Sequence[SourceSpec] = ()
    if launch.rank == 0:
        try:
            # Files that were added since are not part of the snapshot
            specs = list_indexed_files(store, known.index, roots={}, block_bytes=_BLOCK_BYTES)
        except CacheError:
            specs = [_source_spec(known)]
    specs = launch.bcast(specs)
    report = build_index(store, specs, launch=launch, storage=storage)
    if report.digest != known.index:
        raise _changed(damage, cache, known)
    if launch.rank == 0:
        LOG.warning("%s; the index was built again", damage)


def open_table(cache: str, address: Address, storage: Storage) -> tuple[BlockStore, Array]:
    """Open the blocks and the document table of an address that includes the digest of its index
    snapshot.

    Returns: the blocks, and the lengths of the documents (int32 [num_documents], memory-mapped).
    Raises: CacheError if the index or the table is missing or damaged.
    """
    path = table_path(cache, address)
    try:
        return _store(cache, address, storage), np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise CacheError(
            f"{path}: the document table of {address} is missing or damaged ({error}); remove it and build again"
        ) from error


def pinned_address(cache: str, text: str) -> Address:
    """Parse an address, and add the digest of the index snapshot that was built for it. Raises:
    CacheError if the address has not been indexed; ConfigError."""
    address = parse_address(text)
    if address.index is not None:
        return address
    indexed = _pinned(cache, address)
    if indexed is None:
        raise CacheError(
            f"{text}: is not indexed in {cache}; open the dataset through MegablendDatasetBuilder, "
            "which indexes it"
        )
    return indexed


def check_index(cache: str, address: Address) -> None:
    """Check the sizes of the tables of an address's index snapshot. Raises: CacheError."""
    assert address.index is not None
    folder = find_store(str(_index(cache))).fetch_folder(SNAPSHOTS, address.index)
    check_sizes(folder, read_snapshot_manifest(folder)["tables"])
    read_roots(folder)


def table_path(cache: str, address: Address) -> Path:
    """Return the path of the document table of an address that includes the digest of its index
    snapshot."""
    return external_references_dir(_index(cache)) / f"{_key(address)}-{address.index}.npy"


def _pinned(cache: str, address: Address) -> Address | None:
    """Return the address with the digest of its index snapshot; None if it has not been indexed, or
    if its table is missing."""
    indexed, _ = _read_pin(cache, address)
    return indexed if indexed is not None and table_path(cache, indexed).is_file() else None


def _find_table(cache: str, address: Address) -> tuple[Address | None, bool]:
    """Return the address with the digest of its index snapshot, or None if it has not been indexed;
    and whether its table is intact."""
    indexed, expected = _read_pin(cache, address)
    if indexed is None:
        return None, False
    path = table_path(cache, indexed)
    try:
        return indexed, path.is_file() and (expected is None or expected == checksum(path))
    except CacheError:  # the table cannot be read
        return indexed, False


def _read_pin(cache: str, address: Address) -> tuple[Address | None, str | None]:
    """Return the address with the digest of its index snapshot, and the checksum of its table, if
    they are known."""
    try:
        pin = parse_json(_pin(cache, address).read_text(encoding="utf-8"))
        return dataclasses.replace(address, index=pin["index"]), pin.get("checksum")
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _pin(cache: str, address: Address) -> Path:
    """Return the path of the JSON file that names the snapshot of an address."""
    return external_references_dir(_index(cache)) / f"{_key(address)}.json"


def _key(address: Address) -> str:
    return hex_digest(str(dataclasses.replace(address, index=None)))


def _source_spec(address: Address) -> SourceSpec:
    return SourceSpec(
        name=_SOURCE, patterns=(address.pattern,), read=_read_spec(address), place=str(address)
    )


def _read_spec(address: Address) -> ReadSpec:
    options: dict[str, str | int] = {}
    if address.documents is not None:
        options[DOCUMENTS] = (
            int(address.documents) if address.documents.isdecimal() else address.documents
        )
    return ReadSpec(column=address.column, block_bytes=_BLOCK_BYTES, options=make_options(options))


def _has_token_documents(store: BlockStore, address: Address) -> bool:
    """Return whether each token counts as a document. This is the case for a flat column whose
    documents have no delimiter."""
    return address.documents is None and is_flat(store.snapshot.files.entry(0).opened.meta)


def _index(cache: str) -> Path:
    return Path(cache).absolute() / INDEX_FOLDER


def _store(cache: str, address: Address, storage: Storage) -> BlockStore:
    assert address.index is not None
    key = (str(_index(cache)), address.index)
    snapshot = _snapshots.get(key)
    if snapshot is None:
        snapshot = open_snapshot(*key)
        _snapshots[key] = snapshot
    return BlockStore(snapshot, [address.append_eod], storage=storage)


def share_of(snapshot: Snapshot, rank: int, size: int) -> tuple[int, int]:
    """Return the range [first, end) of the blocks of a rank's share. All shares have about the same
    number of tokens, and each begins at the start of a document."""
    tokens = snapshot.tokens_before
    num_blocks = len(tokens) - 1

    def first_block(of_rank: int) -> int:
        if of_rank == 0:
            return 0
        if of_rank == size:
            return num_blocks
        block = int(np.searchsorted(tokens, int(tokens[-1]) * of_rank // size))
        return next_cut(snapshot, block, num_blocks)

    return first_block(rank), first_block(rank + 1)

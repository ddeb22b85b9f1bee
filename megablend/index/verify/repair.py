"""Rebuild a damaged index from the files that it lists. A build from the config may not restore the
same index, since a run may use an older index than the one that a build would make now."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

from megablend.caches.base import SNAPSHOTS, CacheStore
from megablend.config.read_spec import ReadSpec
from megablend.errors import CacheError, DamagedCacheError
from megablend.index.build.source_spec import SourceSpec
from megablend.index.read.snapshot import find_damaged_files
from megablend.index.tables.manifest import FILES, read_roots, read_snapshot_manifest
from megablend.index.tables.tables import FILE_SCHEMA, read_batch
from megablend.storage.location import join
from megablend.system.atomic_write import checksum


def find_damage(store: CacheStore, digest: str) -> str | None:
    """Read all files of an index in the cache. Return the first problem, or None if there is
    none."""
    if not store.has_folder(SNAPSHOTS, digest):
        return f"{store.location}/generations/{digest}: this index does not exist"
    try:
        folder = store.fetch_folder(SNAPSHOTS, digest)
        return next(iter(find_damaged_files(folder)), None)
    except DamagedCacheError as error:
        return error.problem
    except CacheError as error:
        return str(error)


def list_indexed_files(
    store: CacheStore, digest: str, *, roots: Mapping[str, str], block_bytes: int
) -> tuple[SourceSpec, ...]:
    """Return the sources of an index, with the paths of the files from which it was built, in the
    form that `build_index` takes.

    Args:
        roots: source name -> folder to which the names of its files are relative; used if the
            folders that the index recorded cannot be read.
        block_bytes: the value of this option when the index was built.

    Raises: CacheError if the manifest of the index or its table of files is also damaged.
    """
    folder = store.fetch_folder(SNAPSHOTS, digest)
    manifest = read_snapshot_manifest(folder)
    if checksum(folder / FILES) != manifest["tables"][FILES]["blake2b"]:
        raise DamagedCacheError.of(f"{folder / FILES}: damaged table: its checksum is wrong")
    names = read_batch(f"{folder}/{FILES}", FILE_SCHEMA).column("name").to_pylist()
    # Roots are not part of the digest, so the index can be rebuilt without them
    with contextlib.suppress(CacheError):
        roots = {**roots, **read_roots(folder)["roots"]}
    specs = []
    extra_columns = dict[str, list[str]]()
    for record in manifest["sources"]:
        if record.get("extra_of") is not None:
            extra_columns.setdefault(record["extra_of"], []).append(record["column"])
    for source in manifest["sources"]:
        if source.get("extra_of") is not None:
            continue
        name = source["name"]
        root = roots.get(name)
        if root is None:
            raise CacheError(f"{folder}: the folder of the files of source {name!r} is unknown")
        files = names[source["first_file"] : source["first_file"] + source["num_files"]]
        spec = SourceSpec(
            name=name,
            patterns=(),
            read=dataclasses.replace(ReadSpec.from_record(source), block_bytes=block_bytes),
            extra_columns=tuple(extra_columns.get(name, ())),
            root=root,
            paths=tuple(join(root, file) for file in files),
        )
        specs.append(spec)
    return tuple(specs)

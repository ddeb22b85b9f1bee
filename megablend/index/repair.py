"""Making a damaged index again out of the files that it lists: a run may read an older index than the config's files make now."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from megablend.errors import CacheError
from megablend.fs.atomic_write import checksum
from megablend.index.file_versions import read_seen
from megablend.index.manifest import FILES, damaged_tables, read_generation_manifest, read_roots
from megablend.index.snapshot import generations, list_snapshots
from megablend.index.sources import SourcePaths, SourceSpec
from megablend.index.tables import FILE_SCHEMA, read_batch
from megablend.index.token_ranges import read_ranges
from megablend.storage.location import join


def find_damage(cache: str | Path, digest: str) -> str | None:
    """What is wrong with the files of an index in the cache, all of which are read; None where nothing is."""
    folder = generations(cache) / digest
    if digest not in list_snapshots(cache):
        return f"{folder}: there is no such index"
    try:
        manifest = read_generation_manifest(folder)
        read_roots(folder)
        read_seen(folder, manifest["num_files"])
        read_ranges(folder, manifest["num_files"])
        return next(iter(damaged_tables(folder, manifest)), None)
    except CacheError as error:
        return str(error)


def list_indexed_files(
    cache: str | Path, digest: str, *, roots: Mapping[str, str], block_bytes: int
) -> tuple[SourcePaths, ...]:
    """The sources of an index, with the paths of the files that it was made of, for `build_index`.

    Args:
        roots: source name -> folder that its files' names are relative to, where the index does not say so any more.
        block_bytes: what the index was built with.

    Raises: CacheError where its manifest or its table of files is damaged, too.
    """
    folder = generations(cache) / digest
    manifest = read_generation_manifest(folder)
    if checksum(folder / FILES) != manifest["tables"][FILES]["blake2b"]:
        raise CacheError(f"{folder / FILES}: damaged table: its checksum is wrong")
    names = read_batch(folder / FILES, FILE_SCHEMA).column("name").to_pylist()
    with contextlib.suppress(CacheError):  # roots are not part of what the digest stands for
        roots = {**roots, **read_roots(folder)["roots"]}
    listed = []
    for source in manifest["sources"]:
        spec = SourceSpec(
            name=source["name"],
            patterns=(),
            column=source["column"],
            documents=source["documents"],
            block_bytes=block_bytes,
            extra_of=source.get("extra_of"),
        )
        root = roots.get(source["name"]) or roots.get(source.get("extra_of", ""))
        if root is None:
            raise CacheError(f"{folder}: nothing says where the files of source {source['name']!r} are")
        files = names[source["first_file"] : source["first_file"] + source["num_files"]]
        paths = tuple(join(root, name) for name in files)
        listed.append(SourcePaths(spec=spec, format=source["format"], root=root, paths=paths))
    return tuple(listed)

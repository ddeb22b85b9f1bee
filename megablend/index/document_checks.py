"""Checksums of a document table: 4 bytes per EVERY documents, of their lengths and the running counts before them.

    <cache>/documents/<digest>/groups.check.arrow   uint32, one row for each running count except the last

If a table is too large for comparing its whole checksum on opening, these are verified when documents are looked up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.fs.atomic_write import checksum, replace_file, temp_sibling, translate_os_errors
from megablend.index.checked_table import compute_checks
from megablend.index.manifest import MANIFEST, damaged_tables, dump_with_checksum, read_manifest
from megablend.index.mapped_table import MappedTable
from megablend.index.tables import TableWriter

GROUP_CHECKS = "groups.check.arrow"
GROUP_COLUMNS = np.dtype([("group", "<u4")])
_PASS = 1 << 12
"""Groups per pass of computing checksums."""


def check_groups(lengths: MappedTable, starts: MappedTable, every: int, groups: Int64s) -> npt.NDArray[np.uint32]:
    """Compute the checksums of `groups` int64 [n], numbers of running counts: uint32 [n].

    Args:
        lengths, starts: the tables.
        every: documents per running count.
    """
    num_documents = len(lengths["tokens"])
    documents = groups[:, np.newaxis] * every + np.arange(every)  # (groups, documents of a group)
    inside = documents < num_documents
    found = np.zeros(documents.shape, np.int32)
    found[inside] = lengths.take("tokens", documents[inside])
    values = np.empty((2 + every // 2, len(groups)), np.int64)
    values[0], values[1] = starts.take("tokens", groups), starts.take("filled", groups)
    values[2:] = found.view(np.int64).T
    return compute_checks(groups, values)


def write_group_checks(folder: Path, into: Path, tables: tuple[MappedTable, MappedTable], every: int) -> dict[str, Any]:
    """Write checksums of the tables in `folder` to a table in `into`; returns its entry for the manifest."""
    num_groups = len(tables[1]["tokens"]) - 1
    with TableWriter(into / GROUP_CHECKS, GROUP_COLUMNS) as checks:
        for start in range(0, num_groups, _PASS):
            groups = np.arange(start, min(start + _PASS, num_groups))
            checks.append({"group": check_groups(*tables, every, groups)})
        checks.finish()
    path = into / GROUP_CHECKS
    return {GROUP_CHECKS: {"bytes": path.stat().st_size, "blake2b": checksum(path)}}


def complete_group_checks(folder: Path, tables: tuple[MappedTable, MappedTable], every: int) -> None:
    """Add checksums to a table of an older version; its manifest is replaced last. Raises: CacheError."""
    manifest = read_manifest(folder)
    if GROUP_CHECKS in manifest["tables"] or damaged_tables(folder, manifest):
        return
    aside = temp_sibling(folder / "checks")
    with translate_os_errors(folder):
        aside.mkdir()
        try:
            entry = write_group_checks(folder, aside, tables, every)
            (aside / GROUP_CHECKS).replace(folder / GROUP_CHECKS)
        finally:
            aside.rmdir()
    replace_file(folder / MANIFEST, dump_with_checksum({**manifest, "tables": {**manifest["tables"], **entry}}))


def find_wrong_group(
    checks: MappedTable, lengths: MappedTable, starts: MappedTable, every: int, documents: Int64s
) -> int | None:
    """The first group with one of `documents` int64 [n] that is not what was committed; None if all are."""
    last = len(starts["tokens"]) - 2
    groups = np.unique(np.minimum(documents // every, last))
    for start in range(0, len(groups), _PASS):
        part = groups[start : start + _PASS]
        wrong = np.flatnonzero(check_groups(lengths, starts, every, part) != checks.take("group", part))
        if len(wrong):
            return int(part[wrong[0]])
    return None

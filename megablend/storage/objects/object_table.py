"""Tables of listed objects, made from the Arrow tables that obstore returns. They have the columns
of a FileTable (`megablend.storage.file_table`), with empty etags for objects without one, and

    modified  int64, the time of the last modification, in seconds since 1970
    matches   bool, whether the key matches the pattern
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from megablend.storage.file_table import FileTable, list_texts
from megablend.storage.objects.listing import matches_pattern
from megablend.storage.objects.object_version import ObjectVersion

ObjectTable: TypeAlias = Any
"""A table (pyarrow.Table) with the columns above."""


def make_table(listed: Any, root: str, pattern: str) -> ObjectTable:
    """Return a table made from obstore's metadata of objects.

    Args:
        listed: an Arrow table with columns `path`, `size`, `e_tag` and `last_modified`.
        root: the location of the bucket.
        pattern: the pattern of keys.
    """
    # Imported here, since processes that only read local files do not need it
    import pyarrow as pa
    from pyarrow import compute as pc

    rows = pa.table(listed)
    keys = rows["path"].cast(pa.string())
    etags = pc.fill_null(rows["e_tag"].cast(pa.string()), "")
    # As in `normalise_etag`
    trimmed = pc.utf8_trim(pc.utf8_trim_whitespace(etags), '"')
    etags = pc.if_else(pc.starts_with(etags, "W/"), "", trimmed)
    modified = rows["last_modified"].cast(pa.timestamp("s", "UTC"), safe=False).cast(pa.int64())
    columns = {
        "location": pc.binary_join_element_wise(f"{root}/", keys, "").cast(pa.large_binary()),
        "size": rows["size"].cast(pa.int64()),
        "etag": etags.cast(pa.large_binary()),
        "modified": pc.max_element_wise(modified, 0),
        "matches": pa.array(
            [matches_pattern(key, pattern) for key in keys.to_pylist()], pa.bool_()
        ),
    }
    return pa.table(columns)


def join_tables(parts: Sequence[ObjectTable]) -> ObjectTable:
    """Return the rows of several tables as one table."""
    import pyarrow as pa

    text = pa.large_binary()
    types = {"location": text, "size": pa.int64(), "etag": text, "modified": pa.int64()}
    empty = pa.schema(types | {"matches": pa.bool_()}).empty_table()
    return pa.concat_tables([empty, *parts])


def find_location(objects: ObjectTable, location: str) -> ObjectTable | None:
    """Return the table with the object at a location as the only one that matches; None if there is
    no such object."""
    from pyarrow import compute as pc

    is_found = pc.equal(objects["location"], location.encode("utf-8", "surrogatepass"))
    if not pc.any(is_found).as_py():
        return None
    return objects.set_column(objects.schema.get_field_index("matches"), "matches", is_found)


def list_versions(objects: ObjectTable) -> list[ObjectVersion]:
    """Return the version of each object."""
    columns = (
        objects["size"].to_pylist(),
        list_texts(objects["etag"]),
        objects["modified"].to_pylist(),
    )
    return [ObjectVersion(*values) for values in zip(*columns, strict=True)]


def list_matching(objects: ObjectTable) -> FileTable:
    """Return a table of the files that match the pattern."""
    import pyarrow as pa
    from pyarrow import compute as pc

    is_all = pc.all(objects["matches"]).as_py()
    files = objects if is_all else objects.filter(objects["matches"])
    is_empty = pc.equal(files["etag"], b"")
    if pc.any(is_empty).as_py():
        # As in `ObjectVersion.stat`
        times = pc.binary_join_element_wise("modified-", files["modified"].cast(pa.string()), "")
        etags = pc.if_else(is_empty, times.cast(pa.large_binary()), files["etag"])
        files = files.set_column(files.schema.get_field_index("etag"), "etag", etags)
    return files.select(["location", "size", "etag"])

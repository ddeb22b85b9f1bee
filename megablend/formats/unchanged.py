"""Checking that an opened file is the one that was indexed."""

from __future__ import annotations

from megablend.errors import CHANGED_REMEDY, ChangedFileError
from megablend.formats.base import OpenedFile
from megablend.storage.base import Storage


def check_size(path: str, file: OpenedFile, storage: Storage) -> int:
    """The size of a file in bytes. Raises: ChangedFileError if it had another one when it was
    indexed; as Storage.stat does."""
    size = storage.stat(path).size
    if size != file.size:
        raise ChangedFileError(
            path, f"has {size} bytes, had {file.size} when it was indexed; {CHANGED_REMEDY}"
        )
    return size

"""Files under 64 KiB in a mirror: their bytes, and after these what a map would say, in one file.

    size bytes   the source's
    n bytes      JSON {location, etag, found}
    16 bytes     "MBSF\\0\\0\\0\\1" | u32 n | u32 crc32 of all before it

They are held whole or not at all, appear whole, and are removed whole: who has read one has right
bytes, whatever becomes of it.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from megablend.errors import MissingFileError
from megablend.mirror.disk.disk_calls import DiskCalls, disk_error
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.pages import PAGE_BYTES
from megablend.system.limited_json import parse_json

SMALL_BYTES = 64 << 10
_END = struct.Struct("<8sII")
_MAGIC = b"MBSF\0\0\0\1"
_MOST_BYTES = SMALL_BYTES + (64 << 10)


class SmallFile(NamedTuple):
    """What is in one."""

    key: FileKey
    found: float
    data: bytes


def full_mask(size: int) -> int:
    """All pages of a small file of `size` bytes."""
    return (1 << -(-size // PAGE_BYTES)) - 1


def read_small(folder: MirrorFolder, digest: str) -> SmallFile | None:
    """None if it is not held, or damaged. Raises: DataError if it cannot be read."""
    path = folder.data_path(digest)
    try:
        with os.fdopen(folder.open_file(path, os.O_RDONLY), "rb") as file:
            content = file.read(_MOST_BYTES)
    except MissingFileError:
        return None
    except OSError as error:
        raise disk_error(path, error) from error
    if len(content) < _END.size:
        return None
    magic, length, checksum = _END.unpack_from(content, len(content) - _END.size)
    size = len(content) - _END.size - length
    if magic != _MAGIC or size < 0 or checksum != zlib.crc32(content[:-4]):
        return None
    told = parse_json(content[size : size + length])
    key = FileKey(told["location"], told["etag"], size)
    return SmallFile(key, told["found"], content[:size]) if key.digest == digest else None


def write_small(
    folder: MirrorFolder, key: FileKey, found: float, data: memoryview, calls: DiskCalls
) -> None:
    """Raises: OSError; DataError if the place cannot be opened."""
    told = json.dumps({"location": key.location, "etag": key.etag, "found": found}).encode()
    content = b"".join((data, told, _MAGIC, struct.pack("<I", len(told))))
    content += struct.pack("<I", zlib.crc32(content))
    path = folder.data_path(key.digest)
    new = Path(f"{path}.new")
    new.unlink(missing_ok=True)
    fd = folder.open_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        calls.write(fd, memoryview(content), 0)
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)

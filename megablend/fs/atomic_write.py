"""Writing to the cache so that what has its final name is whole: beside it, flushed, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from megablend.errors import CacheError, MegablendError
from megablend.fs.safe_open import check_folder, open_again
from megablend.system.failures import cause_of, remedy_of

TEMPORARY = ".tmp-"
"""How the names of unfinished files and folders begin."""
_READ_BYTES = 1 << 20


@contextlib.contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the cache's file system (no permission, no space) into a CacheError that names the path."""
    try:
        yield
    except MegablendError:  # a missing data file is an OSError too, and not ours
        raise
    except OSError as error:
        remedy = remedy_of(error.errno, default="make room or get permission there, or choose another cache directory")
        raise CacheError(f"{error.filename or path}: cannot write the cache ({cause_of(error)}): {remedy}") from error


@contextlib.contextmanager
def reading(path: Path, *, apart_from: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Turn an OSError of reading the cache (no permission, a failing disk) into a CacheError that names the path."""
    try:
        yield
    except MegablendError:
        raise
    except OSError as error:
        if isinstance(error, apart_from):
            raise
        raise CacheError(
            f"{error.filename or path}: cannot read the cache ({cause_of(error)}): {remedy_of(error.errno)}"
        ) from error


def temp_sibling(path: Path) -> Path:
    """A name in the same folder that nothing takes for a finished file."""
    return path.with_name(f"{TEMPORARY}{path.name[:40]}-{os.getpid()}-{secrets.token_hex(4)}")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporaries that killed builds left in `folder`. Only for the holder of the build lock."""
    check_folder(folder)
    for path in folder.iterdir():
        if path.name.startswith(TEMPORARY):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def list_committed(folder: Path) -> list[str]:
    """Sorted names in `folder` that are no temporaries; none where the folder is not there. Raises: CacheError."""
    with reading(folder), contextlib.suppress(FileNotFoundError):
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return []


def write_flushed(path: Path, parts: Iterable[bytes]) -> None:
    """Write the parts to a new file, one after the other, and wait until they are on the disk."""
    with path.open("xb") as file:
        file.writelines(parts)
        flush(file)


def replace_file(path: Path, data: bytes) -> None:
    """Put a file of these bytes at `path` atomically: a reader finds the old one or the new one, whole."""
    with translate_os_errors(path):
        beside = temp_sibling(path)
        try:
            write_flushed(beside, [data])
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def open_part(path: Path) -> IO[bytes]:
    """Open a file that is there, and that others write other parts of, for writing alone.

    A client of NFS that has read a page writes back all of it, with others' bytes as they were; else only what is written to it.
    """
    return open(path, "wb", opener=lambda name, _: open_again(name, os.O_WRONLY))


def flush(file: IO[bytes]) -> None:
    """Wait until the file's bytes are on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Wait until the folder's names are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and commit names at once
            os.fsync(folder)
    finally:
        os.close(folder)


def checksum(path: Path) -> str:
    """Hex digest (blake2b, 16 bytes) of a file's bytes. Raises: CacheError where it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    with reading(path), path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()

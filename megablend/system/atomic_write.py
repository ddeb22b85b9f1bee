"""Atomic writes to the cache: a temporary file in the same folder is written, flushed and renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from megablend.errors import CacheError, ConfigError, MegablendError
from megablend.system.digest import DIGEST_BYTES
from megablend.system.failures import cache_remedy_of, cause_of, remedy_of
from megablend.system.safe_open import check_folder, open_again, open_regular

TEMPORARY = ".tmp-"
"""The prefix of the names of unfinished files and folders."""
_READ_BYTES = 1 << 20
"""The number of bytes that `checksum` reads at a time."""
_CACHE = "the cache"
Data = TypeVar("Data", bytes, memoryview)


@contextlib.contextmanager
def translate_os_errors(path: Path, what: str = _CACHE) -> Iterator[None]:
    """Turn an OSError of the cache's file system (no permission, no space) into a CacheError that
    names the path.

    Args:
        what: the name of the thing that is written, for the message.
    """
    try:
        yield
    except (
        MegablendError
    ):  # MissingFileError is also an OSError, but not of the cache's file system
        raise
    except OSError as error:
        location = error.filename or path
        is_cache = what == _CACHE
        remedy = cache_remedy_of(error.errno, location) if is_cache else remedy_of(error.errno)
        raise CacheError(
            f"{location}: cannot write {what} ({cause_of(error)}); {remedy}"
        ) from error


class reading:  # noqa: N801  # used like a function
    """A context manager that turns an OSError on reading the cache (no permission, a failing disk)
    into a CacheError that names the path.

    This is a class because a context manager made from a generator is several times slower, and
    opening a run enters about a dozen of them.

    Args:
        apart_from: the types of errors that are passed on unchanged.
    """

    __slots__ = ("_apart_from", "_path")

    def __init__(self, path: Path | str, *, apart_from: tuple[type[OSError], ...] = ()) -> None:
        self._path = path
        self._apart_from = apart_from

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_left_alone = isinstance(error, (MegablendError, *self._apart_from))
        if isinstance(error, OSError) and not is_left_alone:
            location = error.filename or self._path
            remedy = cache_remedy_of(error.errno, location)
            raise CacheError(
                f"{location}: cannot read the cache ({cause_of(error)}); {remedy}"
            ) from error


def temp_sibling(path: Path) -> Path:
    """Return a new path in the same folder, with a name that marks an unfinished file or folder."""
    return path.with_name(f"{TEMPORARY}{path.name[:40]}-{os.getpid()}-{secrets.token_hex(4)}")


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files that killed builds left in `folder`. The caller must hold the
    build lock."""
    check_folder(folder)
    for path in folder.iterdir():
        if path.name.startswith(TEMPORARY):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def list_committed(folder: Path) -> list[str]:
    """Return the sorted names in `folder`, except those of unfinished files. The list is empty if
    the folder does not exist. Raises: CacheError if it cannot be read."""
    with reading(folder), contextlib.suppress(FileNotFoundError):
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return []


def write_flushed(path: Path, parts: Iterable[bytes]) -> None:
    """Write byte strings to a new file, one after another, and wait until they are on disk."""
    with path.open("xb") as file:
        file.writelines(parts)
        flush(file)


def replace_file(path: Path, data: bytes, what: str = _CACHE) -> None:
    """Replace the file at `path` atomically: a reader sees either all of the old content or all of
    the new.

    Args:
        what: the name of the thing that is written, for error messages.
    """
    with translate_os_errors(path, what):
        _replace(path, data, is_flushed=True)


def keep_computed(path: Path, data: bytes) -> None:
    """Replace a file like `replace_file`, but without waiting for the disk, and create its folder
    if necessary. Use it for data that is verified when it is read, and computed again if a power
    failure has damaged it."""
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data, is_flushed=False)


def _replace(path: Path, data: bytes, *, is_flushed: bool) -> None:
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(data)
        if is_flushed:
            flush(file)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Provide a temporary path to write a file to. At the end, the file is renamed to `path`; after
    an error, it is removed instead."""
    temporary = temp_sibling(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """Create an empty temporary folder next to `path`. It is removed at the end, unless the caller
    has renamed it."""
    folder = temp_sibling(path)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(path: Path, written: Path) -> None:
    """Rename the folder `written` to `path`, replacing a folder that is already there. Readers of
    the old folder can still read the files that they have opened."""
    aside = temp_sibling(path)
    if path.exists():
        path.rename(aside)
    written.rename(path)
    shutil.rmtree(aside, ignore_errors=True)


def check_target(path: Path) -> None:
    """Check a user's file before it is replaced, since a rename would replace even a device such as
    /dev/null for the whole machine.

    Raises: ConfigError if the path exists and is not a regular file, or if its folder does not
        exist.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path}: is a folder, device or pipe; specify the name of a regular file to write"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path}: its folder does not exist; create it, or write to another folder"
        )


def open_part(path: Path) -> IO[bytes]:
    """Open an existing file to write a part of it while other processes write other parts.

    The file is opened for writing only: an NFS client that has read a page writes back all of it,
    including stale bytes of other processes' parts.
    """
    return open(path, "wb", opener=lambda name, _: open_again(name, os.O_WRONLY))


def flush(file: IO[bytes]) -> None:
    """Wait until the file's bytes are on disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Wait until the folder's entries are on disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Unsupported by some network file systems, which commit entries at once
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)


def checksum(path: Path | str) -> str:
    """Return the hex digest (blake2b, 16 bytes) of a file's bytes. Raises: CacheError if the file
    cannot be read."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with reading(path), open_regular(path) as file:
        part = file.read(_READ_BYTES)
        while part:
            digest.update(part)
            part = file.read(_READ_BYTES)
    return digest.hexdigest()


def seal(data: Data, key: bytes = b"") -> bytes:
    """Return data with a digest appended, by which `unseal` detects damage.

    Args:
        key: the key of the digest, such as the name of the data's owner; `unseal` rejects data that
            was sealed with another key.
    """
    return b"".join((data, hashlib.blake2b(data, key=key, digest_size=DIGEST_BYTES).digest()))


def unseal(stored: Data, key: bytes = b"") -> Data | None:
    """Return the data that `seal` sealed, without the digest; None if it is damaged, or was sealed
    with another key."""
    data = stored[:-DIGEST_BYTES]
    digest = hashlib.blake2b(data, key=key, digest_size=DIGEST_BYTES).digest()
    return data if digest == stored[-DIGEST_BYTES:] else None

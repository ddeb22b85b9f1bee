"""The folder of a mirror: the user and the process that own it, and the paths of its files.

mirror.json                     the marker: format, id, group
node.lock, node.sock            the owner's lock, with its pid; its socket
mirror.db                       small tables of the owner
files/<2 hex>/<32 hex>.data     a sparse copy, with the offsets of its source
files/<2 hex>/<32 hex>.map      the map of the pages that the copy holds
datasets.db, manifests/, folders/   datasets that are wanted: see `mirror.catalog`
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import hashlib
import json
import mmap
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megablend.errors import ConfigError, MissingFileError
from megablend.mirror.disk.disk_calls import DiskCalls, disk_error
from megablend.mirror.disk.pages import BLOCK_BYTES
from megablend.system.failures import cause_of
from megablend.system.limited_json import parse_json
from megablend.system.safe_open import read_regular

_MARKER = "mirror.json"
_LOCK = "node.lock"
_LOG = "node.log"
_FORMAT = 1
_TEMPORARY_PREFIX = ".mirror-"
_LEFT_BY_SYSTEM = {"lost+found"}
_MAX_BYTES = 1 << 16
"""The maximum number of bytes that are read from a marker or a lock file."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.ENOLCK)
"""The errno values that a file system gives for operations that it does not support."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FolderInUseError(ConfigError):
    """Raised if another node process owns the folder."""


class FileKey(NamedTuple):
    """A version of a source file."""

    location: str
    """The path or URL of the file, without a query."""
    etag: str
    size: int
    """The size of the file in bytes."""

    @property
    def digest(self) -> str:
        """The name of the file in the mirror, a string of 32 hex digits."""
        return self.hash().hex()

    def hash(self) -> bytes:
        """Return the 16 bytes of the digest."""
        text = f"1\0{self.location}\0{self.etag}\0{self.size}"
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest()

    def pack(self) -> bytes:
        """Serialize the key without the size as JSON {location, etag, found}, to be stored in the
        file's map or copy."""
        # `found` was a time; earlier versions look for it
        return json.dumps({"location": self.location, "etag": self.etag, "found": 0.0}).encode()

    @classmethod
    def unpack(cls, text: bytes, size: int) -> FileKey:
        """Parse the result of `pack`, for a file of `size` bytes."""
        fields = parse_json(text)
        return cls(fields["location"], fields["etag"], size)


def boot_id() -> bytes:
    """Return the kernel's boot id: 16 bytes that change at each start of this machine."""
    return bytes.fromhex(_BOOT_ID.read_text(encoding="ascii").strip().replace("-", ""))


@dataclass(frozen=True, slots=True)
class MirrorFolder:
    """A folder that contains a mirror, and a marker file by which it is recognized."""

    path: Path
    id: str
    """A random hex string in the marker. If another mirror replaces this one at the same path, it
    has another id."""
    group: str | None = None
    """The group whose members may read the mirror; only the owner knows it."""

    @classmethod
    def create(
        cls, path: Path | str, *, group: str | None = None, calls: DiskCalls | None = None
    ) -> MirrorFolder:
        """Open a mirror as its owner. If the folder is empty or missing, create a new mirror.

        Raises: ConfigError if the folder contains other files, belongs to another user, or its file
            system lacks holes, shared mappings or locks.
        """
        path = Path(path).absolute()
        with _as_config_error(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_user(path, path.stat(), None)
            names = {
                entry.name
                for entry in path.iterdir()
                if entry.name not in _LEFT_BY_SYSTEM
                and not entry.name.startswith(_TEMPORARY_PREFIX)
            }
            if names and _MARKER not in names:
                raise ConfigError(
                    f"{path}: is neither empty nor a mirror (it contains {min(names)!r})\n"
                    "set `mirror.folder` to an empty folder, or to one that does not exist yet"
                )
            if not names:
                _check_file_system(path, calls or DiskCalls())
            # If the marker exists, it was created earlier, or by another process at the same time
            with contextlib.suppress(FileExistsError):
                _write_new(path / _MARKER, {"format": _FORMAT, "id": secrets.token_hex(16)})
            folder = cls(path, _read_marker(path)["id"], group)
            folder.open_to_group(path)
            (path / "files").mkdir(mode=0o700, exist_ok=True)
            folder.open_to_group(path / "files")
        return folder

    @classmethod
    def attach(cls, path: Path | str) -> MirrorFolder:
        """Open an existing mirror as a reader. Raises: ConfigError if the folder is not a mirror,
        or belongs to another user and this process is not in its group."""
        path = Path(path).absolute()
        with _as_config_error(path):
            state = path.stat()
            _check_user(path, state, state.st_gid if state.st_mode & stat.S_IXGRP else None)
            marker = _read_marker(path)
        return cls(path, marker["id"])

    @property
    def socket_path(self) -> Path:
        """The path of the unix socket on which the owner listens."""
        return self.path / "node.sock"

    @contextlib.contextmanager
    def socket_address(self) -> Iterator[str]:
        """Provide an address of the socket that is valid within the context. It may differ from the
        path, since an address has at most 107 bytes."""
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{fd}/{self.socket_path.name}"
        finally:
            os.close(fd)

    @property
    def database_path(self) -> Path:
        """The path of the owner's database of small values."""
        return self.path / "mirror.db"

    @property
    def datasets_path(self) -> Path:
        """The path of the database of datasets. It exists if datasets were ever used."""
        return self.path / "datasets.db"

    def data_path(self, digest: str) -> Path:
        """Return the path of the copy of a file."""
        return self.path / "files" / digest[:2] / f"{digest}.data"

    def map_path(self, digest: str) -> Path:
        """Return the path of the map of a file's pages; small files have no map."""
        return self.path / "files" / digest[:2] / f"{digest}.map"

    def open_to_group(self, path: Path) -> None:
        """Set a folder's group and mode. Raises: OSError; ConfigError if the group is unknown."""
        if self.group is None:
            path.chmod(0o700)
            return
        try:
            os.chown(path, -1, grp.getgrnam(self.group).gr_gid)
        except KeyError:
            raise ConfigError(
                f"{self.path}: there is no group {self.group!r} on this machine\n"
                "set `mirror.group` to one that `getent group` lists"
            ) from None
        path.chmod(0o2750)  # setgid: new files in it also belong to the group

    @property
    def file_mode(self) -> int:
        """The permissions of copies and maps."""
        return 0o400 if self.group is None else 0o440

    def remove(self) -> None:
        """Delete the mirror's files except copies and maps, and the folder if it is then empty."""
        for name in (_MARKER, "view.json", self.socket_path.name, _LOCK, _LOG):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for subfolder in (self.path / "files").glob("??"):
                subfolder.rmdir()
            (self.path / "files").rmdir()
            self.path.rmdir()

    def check(self) -> None:
        """Check that this mirror is still at its path. Raises: MissingFileError if it was removed
        or replaced."""
        try:
            if _read_marker(self.path)["id"] == self.id:
                return
        except (OSError, ConfigError):
            pass
        raise MissingFileError(
            str(self.path),
            "was removed or replaced while the mirror used it; the next node process makes a new mirror",
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder's lock until the context or this process ends. Raises: FolderInUseError if
        another process owns it; ConfigError if the lock cannot be written."""
        path = self.path / _LOCK
        with _as_config_error(path):
            fd = _open_regular(path, os.O_RDWR | os.O_CREAT)
        with os.fdopen(fd, "r+b") as file:
            with _as_config_error(path):
                os.fchmod(fd, 0o600 if self.group is None else 0o640)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise FolderInUseError(
                        f"{self.path}: another node process owns this mirror: {self.read_owner()}\n"
                        "stop it with `megablend node stop`, or set another `mirror.folder`"
                    ) from None
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid()}).encode())
                file.flush()
            yield

    def read_owner(self) -> dict[str, Any]:
        """Return {"pid": PID} for the last process that owned the folder; {} if there was none."""
        with contextlib.suppress(OSError, ValueError):
            owner = parse_json(read_regular(self.path / _LOCK, _MAX_BYTES))
            return owner if isinstance(owner, dict) else {}
        return {}

    def open_file(self, path: Path, flags: int) -> int:
        """Open a copy or a map, and return its descriptor. If `flags` contains os.O_CREAT, the
        parent folder is also created.

        Raises: DataError if the file is a link, belongs to another user, or cannot be opened.
        """
        try:
            if flags & os.O_CREAT and not path.parent.exists():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self.open_to_group(path.parent)
            mode = self.file_mode
            with contextlib.suppress(FileNotFoundError):
                earlier = path.lstat().st_mode
                if flags & os.O_RDWR and stat.S_ISREG(earlier):
                    mode |= earlier & stat.S_ISVTX
                    # The mode of copies and maps forbids writing; it is restored below
                    path.chmod(mode | 0o200)
            fd = _open_regular(path, flags)
            if flags & os.O_RDWR:
                os.fchmod(fd, mode)
        except OSError as error:
            raise disk_error(path, error) from error
        return fd


def _open_regular(path: Path, flags: int) -> int:
    """Open a regular file that belongs to the user of its folder. Raises: OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_uid == path.parent.stat().st_uid:
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, "not a regular file of the mirror's user", str(path))


def _check_user(path: Path, state: os.stat_result, group: int | None) -> None:
    """Check that a folder belongs to this process's user or groups. Raises: ConfigError."""
    if not stat.S_ISDIR(state.st_mode):
        raise ConfigError(f"{path}: is not a folder\nset `mirror.folder` to a folder")
    if state.st_uid != os.geteuid() and group not in (os.getegid(), *os.getgroups()):
        raise ConfigError(
            f"{path}: belongs to user {state.st_uid}, but this process runs as user {os.geteuid()}\n"
            "set `mirror.group` to a group that both users belong to, or use another folder"
        )


def _read_marker(path: Path) -> dict[str, Any]:
    """Return the content of a mirror's marker. Raises: ConfigError if it is missing or not valid;
    OSError."""
    try:
        marker = parse_json(read_regular(path / _MARKER, _MAX_BYTES))
        if isinstance(marker, dict) and marker.get("format") == _FORMAT and marker.get("id"):
            return marker
        reason = f"its {_MARKER} says {marker!r}"
    except FileNotFoundError:
        reason = f"it has no {_MARKER}"
    except ValueError as error:
        reason = f"its {_MARKER} is damaged ({error})"
    raise ConfigError(
        f"{path}: is not a mirror that this version can use ({reason}; expected format {_FORMAT})\n"
        "set `mirror.folder` to an empty folder, or remove this folder"
    )


def _write_new(path: Path, content: dict[str, Any]) -> None:
    """Write a new JSON file atomically, so that an incomplete file is never at `path`. Raises:
    FileExistsError if the path exists; OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_TEMPORARY_PREFIX) as file:
        file.write(json.dumps(content).encode())
        file.flush()
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())
        os.link(file.name, path)


def _check_file_system(path: Path, calls: DiskCalls) -> None:
    """Check that the file system supports what a mirror needs. Raises: ConfigError; OSError."""
    with tempfile.TemporaryFile(dir=path) as file:
        fd = file.fileno()
        feature = "holes in files"
        try:
            calls.write(fd, memoryview(bytes([1]) * (2 * BLOCK_BYTES)), 0)
            before = os.fstat(fd).st_blocks
            calls.punch(fd, 0, BLOCK_BYTES)
            # Before the mapping is written: some file systems allocate more than a page for that
            has_holes = os.fstat(fd).st_blocks < before
            feature = "shared memory mappings"
            with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
                mapped[:1] = b"\2"
            is_seen = os.pread(fd, 2, 0) == b"\2\0"
            feature = "locks (flock)"
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_seen and has_holes:
                return
            feature = "holes in files or shared memory mappings"
            problem = "a punched hole, or data written through a mapping, is not visible"
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            problem = cause_of(error)
    raise ConfigError(
        f"{path}: its file system does not support {feature} ({problem})\n"
        "set `mirror.folder` to a folder on a local disk (ext4, XFS)"
    )


@contextlib.contextmanager
def _as_config_error(path: Path) -> Iterator[None]:
    """Convert an OSError that is raised within the context into a ConfigError that names `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be used for a mirror: {cause_of(error)}\n"
            "give this user access to it, or set another `mirror.folder`"
        ) from error

"""A bounded pool of open files: opening a file for each read costs more than the read, and open
files are limited.

A descriptor in use by a thread is never closed: eviction only marks it, and its last user closes
it. Reads are positioned, so threads, and a forked child, may share a descriptor.

A descriptor belongs to a path and the file that it referred to when it was opened. Each storage
records which file it opened at a path first (`OpenedFiles`), and only ever gets descriptors of that
file: if the path refers to another file when it is opened again, that is an error. Readers of the
old file and of the new one do not disturb each other.

After a read has failed, no descriptor of the pool is used again: if a file system was mounted again,
or its server restarted, its files can be read with new descriptors only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, TypeAlias

_MAX_DESCRIPTORS = 1 << 10
"""The default maximum number of descriptors that a pool keeps open."""


class FileIdentity(NamedTuple):
    """What tells a file from another one that has replaced it at the same path."""

    inode: tuple[int, int]
    """The st_dev and st_ino of the file. Where they are the same, the file is the same."""
    version: tuple[int, int, int]
    """The size of the file, its st_mtime_ns and its st_ctime_ns. If they are the same but the inode
    is not, it is still the same file: some file systems (sshfs, s3fs and others of FUSE, or any
    that was mounted again) give a file another inode when it is opened again."""

    def is_same(self, other: FileIdentity) -> bool:
        """Return whether both identities are of the same file."""
        return self.inode == other.inode or self.version == other.version


OpenedFiles: TypeAlias = dict[str, FileIdentity]
"""The identity of the file that a storage first opened at each path, by path."""


def default_capacity() -> int:
    """Return the default capacity of a pool: at most a quarter of the descriptors that this process
    may open, since the rest is for other uses."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_DESCRIPTORS
    return min(_MAX_DESCRIPTORS, limit // 4)


@dataclass(slots=True, eq=False)
class _Descriptor:
    """An open file of a pool. It is also the context manager that `borrow` returns, since a context
    manager made from a generator is several times slower, which matters when reads are small."""

    pool: DescriptorPool
    fd: int
    holders: int = 0
    """The number of borrowers that have not returned the descriptor."""
    is_pooled: bool = True
    """Whether the pool still has the descriptor; if not, it is closed when the last borrower
    returns it."""

    def __enter__(self) -> int:
        return self.fd

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.pool._lock:
            closable = self.pool._evict_excess(0) if isinstance(error, OSError) else []
            self.holders -= 1
            is_unused = not self.is_pooled and not self.holders
        for descriptor in (*closable, self) if is_unused else closable:
            _close(descriptor.fd)


class DescriptorPool:
    """A pool of read-only file descriptors, which closes the least recently used descriptors
    first.

    Args:
        capacity: the maximum number of descriptors that are kept open.
        flags: additional flags for opening files, such as os.O_DIRECT.
        name: the name of a pool that all storages of the process share; "" for any other pool. Only
            a pool with a name can be pickled.
    """

    def __init__(self, capacity: int, flags: int = 0, *, name: str = "") -> None:
        self.capacity = capacity
        self._name = name
        self._flags = os.O_RDONLY | os.O_CLOEXEC | flags
        self._pool: OrderedDict[tuple[str, FileIdentity], _Descriptor] = OrderedDict()
        self.unlock_after_fork()

    def __len__(self) -> int:
        return len(self._pool)

    def resize(self, capacity: int) -> None:
        """Change the capacity."""
        with self._lock:
            self.capacity = capacity
            closable = self._evict_excess(self.capacity)
        for descriptor in closable:
            _close(descriptor.fd)

    def __reduce__(self) -> tuple[Callable[..., DescriptorPool], tuple[str, int]]:
        if not self._name:
            raise TypeError(
                "a pool of descriptors can only be pickled if it is named, and so shared by the process"
            )
        return shared_pool, (self._name, self.capacity)

    def unlock_after_fork(self) -> None:
        """Replace the lock in a forked child, since a thread of the parent may have held it.
        Descriptors stay valid."""
        self._lock = threading.Lock()

    def borrow(self, path: str, opened: OpenedFiles) -> AbstractContextManager[int]:
        """Return a context manager for a descriptor of the file at `path`. The caller must enter
        the context manager.

        Args:
            opened: the files that the caller has opened before; the file at `path` is added.

        Raises: OSError if the file cannot be opened. Its errno is ESTALE if `path` no longer refers
            to the file in `opened`.
        """
        identity = opened.get(path)
        if identity is not None:
            with self._lock:
                pooled = self._pool.get((path, identity))
                if pooled is not None:
                    self._pool.move_to_end((path, identity))
                    pooled.holders += 1
                    return pooled
        fd = os.open(path, self._flags)  # outside the lock: slow on a busy network file system
        identity = identity_of(os.fstat(fd))
        first = opened.setdefault(path, identity)
        if not first.is_same(identity):
            _close(fd)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        key = (path, first)
        new = _Descriptor(self, fd)
        with self._lock:
            # Another thread may have been faster, or another storage may have opened it
            pooled = self._pool.setdefault(key, new)
            self._pool.move_to_end(key)
            pooled.holders += 1
            closable = self._evict_excess(self.capacity)
        for descriptor in closable if pooled is new else [*closable, new]:
            _close(descriptor.fd)
        return pooled

    def _evict_excess(self, capacity: int) -> list[_Descriptor]:
        """Evict the least recently used descriptors until the pool is within a capacity. The caller
        must hold the lock. Returns: the descriptors that the caller must close."""
        closable = list[_Descriptor]()
        while len(self._pool) > capacity:
            _, evicted = self._pool.popitem(last=False)
            evicted.is_pooled = False
            if not evicted.holders:  # otherwise its last user closes it
                closable.append(evicted)
        return closable


def identity_of(state: os.stat_result) -> FileIdentity:
    """Return the identity of a file, given its stat result."""
    version = state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return FileIdentity((state.st_dev, state.st_ino), version)


def _close(fd: int) -> None:
    """Close a descriptor. A mount that is gone makes this fail, but the file was only read."""
    with contextlib.suppress(OSError):
        os.close(fd)


_SHARED = {
    "local": DescriptorPool(default_capacity(), name="local"),
    "direct": DescriptorPool(default_capacity(), os.O_DIRECT, name="direct"),
    "checking": DescriptorPool(16, name="checking"),
}
"""The pools that the storages of this process share, by name."""
for _pool in _SHARED.values():
    os.register_at_fork(after_in_child=_pool.unlock_after_fork)


def shared_pool(name: str, capacity: int | None = None) -> DescriptorPool:
    """Return the shared pool with a given name: "local", "direct" (without the page cache) or
    "checking". All storages of the process share these pools, since descriptors are limited per
    process.

    Args:
        capacity: the new capacity of the pool; None for no change.
    """
    pool = _SHARED[name]
    if capacity is not None:
        pool.resize(capacity)
    return pool

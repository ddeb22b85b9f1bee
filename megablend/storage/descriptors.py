"""A bounded pool of open files: opening a file for each read costs more than the read, and open files are limited.

A descriptor in use by a thread is never closed: eviction only marks it, and its last user closes
it. Reads are positioned, so threads, and a forked child, may share a descriptor.

A path that refers to another file when it is opened again is an error, since readers do not know the pool: they would
continue in the other file. Requesting the path's state, as every new reader does, accepts the new file.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_MAX_DESCRIPTORS = 256


def default_capacity() -> int:
    """A quarter of the descriptors that this process may open: the rest is for other uses."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, limit // 4)


@dataclass(slots=True)
class _Descriptor:
    fd: int
    identity: tuple[int, int]
    """st_dev, st_ino: different for another file under the same path."""
    holders: int = 0
    pooled: bool = True


class DescriptorPool:
    """Read-only descriptors by path, the least recently used closed first.

    Args:
        capacity: how many are kept open.
        flags: additional flags for opening files, such as os.O_DIRECT.
        name: of a pool shared by the process; only these can be pickled.
    """

    def __init__(self, capacity: int, flags: int = 0, *, name: str = "") -> None:
        self._capacity = capacity
        self._name = name
        self._flags = os.O_RDONLY | os.O_CLOEXEC | flags
        self._pool: OrderedDict[str, _Descriptor] = OrderedDict()
        self._identities: dict[str, tuple[int, int]] = {}
        self.unlock_after_fork()

    def __len__(self) -> int:
        return len(self._pool)

    @property
    def capacity(self) -> int:
        """How many are kept open at most."""
        return self._capacity

    def resize(self, capacity: int) -> None:
        """Change the capacity."""
        with self._lock:
            self._capacity = capacity
            closable = self._excess()
        self._close(closable)

    def __reduce__(self) -> tuple[Callable[..., DescriptorPool], tuple[str, int]]:
        if not self._name:
            raise TypeError("only a named pool of descriptors, shared by the process, can be pickled")
        return shared_pool, (self._name, self._capacity)

    def unlock_after_fork(self) -> None:
        """Replace the lock: a thread that does not exist in the child may have held it. Descriptors stay valid."""
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, path: str) -> Iterator[int]:
        """Borrow a descriptor of the file at `path`. Raises OSError if it cannot be opened; ESTALE if it was replaced."""
        held = self._take(path)
        try:
            yield held.fd
        finally:
            with self._lock:
                held.holders -= 1
                unused = not held.pooled and not held.holders
            if unused:
                os.close(held.fd)

    def invalidate_if_replaced(self, path: str, now: os.stat_result) -> None:
        """Drop the descriptor of `path` if `now`, the path's current state, is that of another file."""
        with self._lock:
            held = self._pool.get(path)
            closable = [self._retire(path)] if held and held.identity != (now.st_dev, now.st_ino) else []
            if path in self._identities:
                self._identities[path] = (now.st_dev, now.st_ino)
        self._close(closable)

    def _take(self, path: str) -> _Descriptor:
        with self._lock:
            if held := self._pool.get(path):
                self._pool.move_to_end(path)
                held.holders += 1
                return held
        fd = os.open(path, self._flags)  # outside the lock: slow on a busy network file system
        state = os.fstat(fd)
        opened = _Descriptor(fd, (state.st_dev, state.st_ino), holders=1)
        closable: list[_Descriptor | None] = []
        with self._lock:
            if self._identities.setdefault(path, opened.identity) != opened.identity:
                os.close(fd)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            if path in self._pool:  # another thread was faster; either descriptor will do
                closable.append(self._retire(path))
            self._pool[path] = opened
            closable += self._excess()
        self._close(closable)
        return opened

    def _excess(self) -> list[_Descriptor | None]:
        """Evict descriptors above the capacity, least recently used first (the lock is held)."""
        return [self._retire(next(iter(self._pool))) for _ in range(len(self._pool) - self._capacity)]

    def _retire(self, path: str) -> _Descriptor | None:
        """Remove a descriptor from the pool (the lock is held); returned if it is not in use and can be closed."""
        retired = self._pool.pop(path)
        retired.pooled = False
        return None if retired.holders else retired

    @staticmethod
    def _close(closable: list[_Descriptor | None]) -> None:
        for retired in filter(None, closable):
            os.close(retired.fd)


_SHARED = {
    "local": DescriptorPool(default_capacity(), name="local"),
    "direct": DescriptorPool(default_capacity(), os.O_DIRECT, name="direct"),
    "checking": DescriptorPool(16, name="checking"),
}
for _pool in _SHARED.values():
    os.register_at_fork(after_in_child=_pool.unlock_after_fork)


def shared_pool(name: str, capacity: int | None = None) -> DescriptorPool:
    """A pool shared by all storages of the process, since descriptors are limited per process: "local", "direct" (without the
    page cache) or "checking".

    Args:
        capacity: its new capacity; None for no change.
    """
    pool = _SHARED[name]
    if capacity is not None:
        pool.resize(capacity)
    return pool

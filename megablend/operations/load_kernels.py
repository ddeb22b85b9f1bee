"""Loading compiled kernels in the background of `open`,
so that the first batch need not wait for them.

A thread loads what the run will need, in the order in which it will need it; what is not compiled
yet is left to its first call. A process that forks waits for the thread first: a child would find
numba's locks held by a thread that it does not have.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from importlib import import_module
from queue import Empty, SimpleQueue

from megablend.formats import find_format
from megablend.jit import load_kernels
from megablend.order.registry import find_order

_KERNELS = "megablend.kernels."
PLANNING = (
    "blend.tree",
    "blend.strides",
    "blend.lanes",
    "blend.bijection",
    "row_checks",
    "blend.spans",
    "reader.gather",
)
"""Modules whose kernels every blend needs for its first batch."""
READING = ("file_ranges",)
"""Those that reading any format from local files needs as well."""
BY_UNIT = {"document": ("document_table",)}
"""Those that orders which shuffle a unit need as well."""


class _Background:
    """One thread a process, which ends when there is nothing left to load."""

    def __init__(self) -> None:
        self._waiting = SimpleQueue[str]()
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, modules: Iterable[str]) -> None:
        """Load the kernels of modules, each once a process."""
        with self._lock:
            new = [module for module in modules if module not in self._known]
            self._known.update(new)
            for module in new:
                self._waiting.put(module)
            if new and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._load, name="megablend-kernels")
                self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()

    def before_fork(self) -> None:
        """Wait until the thread has ended, and let no other one begin."""
        self._lock.acquire()
        self.join()

    def after_fork_in_parent(self) -> None:
        """Let threads begin again."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Forget the thread, which a child does not have."""
        self._lock = threading.Lock()
        self._thread = None

    def _load(self) -> None:
        while threading.main_thread().is_alive():  # a process that ends need not wait for all
            try:
                module = self._waiting.get_nowait()
            except Empty:
                return
            try:
                load_kernels(import_module(_KERNELS + module))
            except Exception:  # whatever is wrong, the first call finds it, too, and says so
                continue


_background = _Background()
os.register_at_fork(
    before=_background.before_fork,
    after_in_parent=_background.after_fork_in_parent,
    after_in_child=_background.after_fork_in_child,
)


def load_planning_kernels(order: str) -> None:
    """Begin to load the kernels that any blend of this order needs."""
    _background.add((*BY_UNIT.get(find_order(order).unit, ()), *PLANNING))


def load_format_kernels(formats: Iterable[str]) -> None:
    """Begin to load the kernels that decoding these formats needs."""
    kinds = [find_format(name) for name in sorted(set(formats))]
    _background.add(
        (
            *READING,
            *(module for kind in kinds if kind is not None for module in kind.kernel_modules),
        )
    )


def wait_for_kernels() -> None:
    """Wait until nothing is being loaded."""
    _background.join()

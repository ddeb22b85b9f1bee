"""Load compiled kernels in the background while `open` continues, so that the first batch need not
wait for them.

A thread loads the kernels that the run will need, in the order in which they will be needed.
Kernels that are not compiled yet are compiled when they are first called. A process that forks
waits for the thread first; otherwise, the child would find numba's locks held by a thread that does
not exist in the child.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from importlib import import_module
from queue import Empty, SimpleQueue

from megablend.formats import get_format
from megablend.jit import load_kernels
from megablend.order.registry import find_order
from megablend.run.run import Run

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
"""Kernel modules that every blend needs for its first batch."""
READING = ("file_ranges",)
"""Kernel modules that are needed to read any format from local files."""
BY_UNIT = {"document": ("document_table",)}
"""Kernel modules that an order needs, by the unit that it shuffles."""


class _Background:
    """A thread that loads modules in the background. It exits when none are left, and is started
    again when modules are added."""

    def __init__(self) -> None:
        self._waiting = SimpleQueue[str]()
        self._added: set[str] = set()
        """All modules that have been added so far."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, modules: Iterable[str]) -> None:
        """Let the thread load the kernels of modules. Each module is loaded once per process."""
        with self._lock:
            has_new = False
            for module in modules:
                if module not in self._added:
                    self._added.add(module)
                    self._waiting.put(module)
                    has_new = True
            if has_new and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._load, name="megablend-kernels")
                self._thread.start()

    def join(self) -> None:
        """Wait until the thread has exited."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def before_fork(self) -> None:
        """Wait until the thread has exited, and prevent another one from starting."""
        self._lock.acquire()
        self.join()

    def after_fork_in_parent(self) -> None:
        """Allow threads to start again."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Forget the thread, which does not exist in the child."""
        self._lock = threading.Lock()
        self._thread = None

    def _load(self) -> None:
        """Load the kernels of waiting modules, in the thread."""
        while threading.main_thread().is_alive():  # a process that ends need not wait for the rest
            try:
                module = self._waiting.get_nowait()
            except Empty:
                return
            try:
                load_kernels(import_module(_KERNELS + module))
            except Exception:  # the first call of the kernel raises the error again
                continue


_background = _Background()
os.register_at_fork(
    before=_background.before_fork,
    after_in_parent=_background.after_fork_in_parent,
    after_in_child=_background.after_fork_in_child,
)


def list_kernels(run: Run) -> list[str]:
    """Return the names of the kernel modules that a run needs in addition to PLANNING."""
    modules = list[str]()
    for stage in run.ledger.stages:
        modules += BY_UNIT.get(find_order(stage.blend.order).unit, ())
    modules += READING
    for name in sorted(run.store.snapshot.sources.formats):
        modules += get_format(name).kernel_modules
    return modules


load_in_background = _background.add
"""See `_Background.add`."""


def wait_for_kernels() -> None:
    """Wait until no kernels are being loaded."""
    _background.join()

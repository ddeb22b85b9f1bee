"""The only interface to numba, together with `intrinsics`.

`kernel` compiles a function on its first call and keeps the machine code on the node, in a folder
named by the CPU, the versions and the text of all modules that become machine code, so that an
upgrade never loads stale code. The processes of a node share a file lock for each kernel: the first
compiles it, the others load it (processes that fill numba's cache with one function at the same
time can crash: numba #4807, #10128). Different kernels are compiled at the same time. `device`
marks a function that kernels call; it is compiled into them. `intrinsics` has functions for kernels
that numba lacks.

Kernels read arrays and fill arrays that the caller has checked; they raise nothing, and do no I/O
except by `pread` and `fadvise`, where a Python call per read would cost more than the read. With
NUMBA_DISABLE_JIT=1 both run as plain Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from megablend.errors import ConfigError

try:
    import numba
except ValueError as error:
    settings = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name[:6] == "NUMBA_"]
    if not settings:  # of something else than a variable of the environment
        raise
    raise ConfigError(
        f"numba cannot be loaded ({error}): found {', '.join(settings)}; correct or unset the wrong one of these environment "
        "variables"
    ) from error

from numba.core.compiler_lock import global_compiler_lock

from megablend.jit_cache import KernelCache
from megablend.system.log import LOG
from megablend.system.private_folder import private_kernel_folder

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 2.0
"""The seconds of loading and compiling after which a process prints a notice to a terminal."""
_notices: list[str] = []
"""The notices that this process has printed: that kernels are being compiled."""
_loading: list[float] = []
"""The seconds of each time that this process has loaded or compiled a kernel."""


def compiled_modules() -> list[Path]:
    """Return the modules that machine code depends on."""
    package = Path(__file__).parent
    return [
        package / "arrays.py",
        package / "jit.py",
        package / "jit_cache.py",
        package / "intrinsics.py",
        *sorted((package / "kernels").rglob("*.py")),
    ]


@cache
def cache_dir() -> Path:
    """Return the node's folder of compiled kernels; see `private_kernel_folder`."""
    import llvmlite.binding as llvm

    text = hashlib.blake2b(digest_size=8)
    for module in compiled_modules():
        text.update(module.read_bytes())
    text.update(f"{numba.__version__} {llvm.get_host_cpu_name()} {os.uname().machine}".encode())
    return private_kernel_folder(Path(f"{os.uname().nodename}-{text.hexdigest()}"))


@contextlib.contextmanager
def _turn(function: Callable[..., Any], lock_mode: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the node's lock for a kernel: one process compiles the kernel, while no process loads
    it; any number of processes may load it at the same time."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}.lock"
    with global_compiler_lock, contextlib.ExitStack() as stack:
        # On a full disk, or a file system without locks, numba's own renames must suffice
        with contextlib.suppress(OSError):
            lock = stack.enter_context(open(cache_dir() / name, "w"))
            fcntl.flock(lock, lock_mode)
        yield


# A child that is forked meanwhile would have the node's lock for good, and find numba's held by a
# thread that it does not have
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


def _announce() -> None:
    """Print that kernels are being compiled. This happens once per node and version, and once in a
    process that has waited at a terminal for PATIENCE, even if other kernels were announced before.
    Called while a kernel's lock is held."""
    folder = cache_dir()
    is_due = sys.stderr.isatty() and not _notices and loading_seconds() > PATIENCE
    # Creating the file fails if it was announced before, perhaps by another process, or if the
    # folder is not writable
    with contextlib.suppress(OSError):
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
        os.close(os.open(folder / "compiling", flags))
        # If there are kernels already, an earlier release has compiled them
        is_due = is_due or next(folder.rglob("*.nbi"), None) is None
    if is_due and LOG.isEnabledFor(logging.WARNING):
        notice = f"megablend: compiling kernels for this machine, once ({folder}); this can take about ten seconds"
        _notices.append(notice)
        print(notice, file=sys.stderr, flush=True)


def loading_seconds() -> float:
    """Return the seconds in which this process has loaded or compiled kernels so far, over all
    threads."""
    return sum(_loading)


def _timed(load: Callable[P, R]) -> Callable[P, R]:
    """Let `loading_seconds` count the time of each call."""

    @wraps(load)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        started = perf_counter()
        try:
            return load(*args, **kwargs)
        finally:
            _loading.append(perf_counter() - started)

    return timed


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` (nopython, nogil, cached on the node) on its first call
    with each set of argument types."""
    return cast("Callable[P, R]", _Kernel(function))


def load_kernels(module: ModuleType) -> None:
    """Load the kernels of a module that were compiled on this node before,
    for the argument types used then."""
    for value in list(vars(module).values()):
        if isinstance(value, _Kernel) and value.__module__ == module.__name__:
            value.load()


def device(function: Callable[P, R]) -> Callable[P, R]:
    """Mark `function` as callable from kernels only. Given a kernel, return a copy of its function
    that is marked."""
    return cast("Callable[P, R]", _njit(getattr(function, "py_func", function)))


def _njit(function: Callable[..., Any], *, cached: bool = False) -> Callable[..., Any]:
    """Return a function that numba compiles; without JIT, the function itself."""
    from numba.core import config

    if vars(config)["DISABLE_JIT"]:
        # NumPy's integers then wrap as silently as those of machine code
        return np.errstate(over="ignore")(function)
    return cast("Callable[..., Any]", numba.njit(nogil=True, cache=cached)(function))


def _take_turns(dispatcher: Any) -> Callable[..., Any]:
    """Return a replacement for `dispatcher.compile`, which numba calls for new argument types: it
    compiles or loads while the kernel's lock is held."""
    compile_ = dispatcher.compile
    kernel_cache = dispatcher._cache

    @_timed
    def compile_or_load(signature: object) -> Any:
        with _turn(dispatcher.py_func, fcntl.LOCK_SH):
            if kernel_cache.contains(signature, dispatcher.targetctx):
                return compile_(signature)
        with _turn(dispatcher.py_func):
            _announce()
            try:
                return compile_(signature)
            except OSError:
                # The kernel was compiled, but could not be stored (a full disk): a second call returns
                # it from memory
                return compile_(signature)

    return compile_or_load


class _Kernel:
    """A function that becomes machine code when it is first called; it is pickled by name."""

    _compiled: Callable[..., Any] | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__qualname__ = function.__qualname__

    def __call__(self, *args: Any) -> Any:
        return (self._compiled or self._prepare())(*args)

    def _prepare(self) -> Callable[..., Any]:
        """Create numba's dispatcher, which compiles or loads on its first call."""
        from numba.core import config

        vars(config)["CACHE_DIR"] = str(cache_dir())
        prepared: Any = _njit(self.py_func, cached=True)
        if not vars(config)["DISABLE_JIT"]:
            # Instead of numba's own: a cache that loads faster, and compiling under a lock
            prepared._cache = KernelCache(self.py_func)
            prepared.compile = _take_turns(prepared)
        # Two threads may prepare the kernel at the same time. Both return the one that is stored
        # first, so that machine code is not loaded once into each.
        return cast("Callable[..., Any]", self.__dict__.setdefault("_compiled", prepared))

    def load(self) -> None:
        """Load the machine code that this node has for any argument types; compile nothing."""
        prepared: Any = self._compiled or self._prepare()
        kernel_cache = getattr(prepared, "_cache", None)
        if not isinstance(kernel_cache, KernelCache):
            return
        for signature in kernel_cache.signatures(prepared.targetctx):
            with _turn(self.py_func, fcntl.LOCK_SH):
                is_loaded = signature in prepared.overloads
                if not is_loaded and kernel_cache.contains(signature, prepared.targetctx):
                    # numba's own method, since the lock is held already
                    type(prepared).compile(prepared, signature)

    def __reduce__(self) -> str:
        return self.__qualname__

"""The only interface to numba.

`kernel` compiles a function on its first call and keeps the machine code on the node, in a folder named by the CPU, the
versions and the text of all kernels, so that an upgrade never loads stale code. A node's processes take turns by a file lock for
each kernel: the first compiles it, the others load it (processes that fill numba's cache with one function at the same time can
crash: numba #4807, #10128). Different kernels are compiled at the same time.
`device` marks a function that kernels call; it is compiled into them. `prefetch`, `load64`, `store64`, `bytes_at`,
`pointer_at`, `pread` and `fadvise` are some that numba lacks.

Kernels read arrays and fill arrays that the caller has checked; they raise nothing, and do no I/O except by these two, where a
Python call per read would cost more than the read. With NUMBA_DISABLE_JIT=1 both run as plain Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np

from megablend.fs.kernel_folder import private_kernel_folder
from megablend.jit_cache import KernelCache

P = ParamSpec("P")
R = TypeVar("R")

Pointer: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes in memory, of which only single ones can be read and written; without JIT, an array."""


@cache
def cache_dir() -> Path:
    """The node's folder of compiled kernels; see `private_kernel_folder`."""
    import llvmlite.binding as llvm
    import numba

    text = hashlib.blake2b(digest_size=8)
    for module in sorted((Path(__file__).parent / "kernels").rglob("*.py")):
        text.update(module.read_bytes())
    text.update(f"{numba.__version__} {llvm.get_host_cpu_name()} {os.uname().machine}".encode())
    return private_kernel_folder(Path(f"{os.uname().nodename}-{text.hexdigest()}"))


@contextlib.contextmanager
def _turn(function: Callable[..., Any], kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the node's lock of a kernel: one process compiles it, while none loads it; any number may load it concurrently."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a full disk, a file system without locks: numba's own renames must do
            lock = stack.enter_context(open(cache_dir() / name, "w"))
            fcntl.flock(lock, kind)
        yield


def _announce() -> None:
    """Print, once per node and version, that kernels are being compiled; called while a kernel's lock is held."""
    folder = cache_dir()
    with contextlib.suppress(OSError):  # already printed, also by another process; or the folder is not writable
        os.close(os.open(folder / "compiling", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW))
        if next(folder.rglob("*.nbi"), None) is None:  # else an earlier release has compiled them
            text = f"megablend: compiling kernels for this machine, once ({folder}); this can take about ten seconds"
            print(text, file=sys.stderr, flush=True)


_loading: list[float] = []


def loading_seconds() -> float:
    """Seconds in which this process has loaded or compiled kernels so far, over all threads."""
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
    """Compile `function` (nopython, nogil, cached on the node) on its first call with each set of argument types."""
    return cast("Callable[P, R]", _Kernel(function))


def load_kernels(module: ModuleType) -> None:
    """Load the kernels of a module that were compiled on this node before, for the argument types used then."""
    for each in list(vars(module).values()):
        if isinstance(each, _Kernel) and each.__module__ == module.__name__:
            each.load()


def device(function: Callable[P, R]) -> Callable[P, R]:
    """Mark `function` as callable from kernels only; of a kernel, return such a copy."""
    return cast("Callable[P, R]", _njit(getattr(function, "py_func", function)))


def _njit(function: Callable[..., Any], *, cached: bool = False) -> Callable[..., Any]:
    import numba
    from numba.core import config

    if vars(config)["DISABLE_JIT"]:  # NumPy's integers then wrap as silently as those of machine code
        return np.errstate(over="ignore")(function)
    return cast("Callable[..., Any]", numba.njit(nogil=True, cache=cached)(function))


def _prefetch() -> Callable[[np.ndarray[Any, Any], int], None]:
    from llvmlite import ir
    from numba.core import cgutils, config, types
    from numba.extending import intrinsic

    if vars(config)["DISABLE_JIT"]:
        return lambda array, index: None

    codegen: Any = cgutils

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        item = codegen.get_item_pointer(context, builder, signature.args[0], array, [args[1]], wraparound=False)
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # read, into the second-level cache (the first has too few slots for misses under way), data
        builder.call(fetch, [builder.bitcast(item, byte), word(0), word(2), word(1)])
        return context.get_dummy_value()

    def typed(typing: Any, array: Any, index: Any) -> Any:
        return types.void(array, types.intp), emit

    return cast("Callable[[np.ndarray[Any, Any], int], None]", intrinsic(typed))


prefetch = _prefetch()
"""prefetch(array, index): begin to load array[index], a 1-D array's, into the cache; any index is harmless."""


def _bytes_at() -> Callable[[int, int], np.ndarray[Any, np.dtype[np.uint8]]]:
    import numba
    from numba.core import config, types
    from numba.extending import intrinsic

    if vars(config)["DISABLE_JIT"]:
        return lambda address, size: np.ctypeslib.as_array((ctypes.c_uint8 * int(size)).from_address(int(address)))

    open_types: Any = types
    open_numba: Any = numba

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    def typed(typing: Any, address: Any) -> Any:
        return open_types.CPointer(types.uint8)(types.uintp), emit

    pointer: Any = intrinsic(typed)
    return device(lambda address, size: open_numba.carray(pointer(address), (size,)))


def _load64() -> Callable[[Pointer, int], np.uint64]:
    from llvmlite import ir
    from numba.core import config, types
    from numba.extending import intrinsic

    if vars(config)["DISABLE_JIT"]:
        return lambda pointer, index: np.uint64(int.from_bytes(pointer[index : index + 8].tobytes(), "little"))

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(64).as_pointer()), align=1)

    def typed(typing: Any, pointer: Any, index: Any) -> Any:
        return types.uint64(pointer, types.intp), emit

    return cast("Callable[[Pointer, int], np.uint64]", intrinsic(typed))


def _store64() -> Callable[[Pointer, int, np.uint64], None]:
    from llvmlite import ir
    from numba.core import config, types
    from numba.extending import intrinsic

    if vars(config)["DISABLE_JIT"]:
        return lambda pointer, index, word: pointer.__setitem__(
            slice(index, index + 8), np.frombuffer(word.tobytes(), np.uint8)
        )

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(64).as_pointer())
        builder.store(args[2], place, align=1)
        return context.get_dummy_value()

    def typed(typing: Any, pointer: Any, index: Any, word: Any) -> Any:
        return types.void(pointer, types.intp, types.uint64), emit

    return cast("Callable[[Pointer, int, np.uint64], None]", intrinsic(typed))


def _pointer_at() -> Callable[[int, int], Pointer]:
    from numba.core import config, types
    from numba.extending import intrinsic

    if vars(config)["DISABLE_JIT"]:
        return lambda address, size: np.ctypeslib.as_array((ctypes.c_uint8 * int(size)).from_address(int(address)))

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    open_types: Any = types

    def typed(typing: Any, address: Any, size: Any) -> Any:
        return open_types.CPointer(types.uint8)(types.uintp, size), emit

    return cast("Callable[[int, int], Pointer]", intrinsic(typed))


def _pread() -> Callable[[int, Pointer, int, int], int]:
    from numba.core import config, types

    if vars(config)["DISABLE_JIT"]:
        return lambda fd, pointer, size, offset: os.preadv(fd, [cast("Any", pointer)[:size]], offset)
    open_types: Any = types
    pointer = open_types.CPointer(types.uint8)
    found: Any = open_types.ExternalFunction("pread", types.intp(types.intc, pointer, types.uintp, types.int64))
    return cast("Callable[[int, Pointer, int, int], int]", found)


def _fadvise_plainly(fd: int, offset: int, size: int, advice: int) -> int:
    os.posix_fadvise(fd, offset, size, advice)
    return 0


def _fadvise() -> Callable[[int, int, int, int], int]:
    from numba.core import config, types

    if vars(config)["DISABLE_JIT"]:
        return _fadvise_plainly
    open_types: Any = types
    found: Any = open_types.ExternalFunction(
        "posix_fadvise", types.intc(types.intc, types.int64, types.int64, types.intc)
    )
    return cast("Callable[[int, int, int, int], int]", found)


def library_function(library: str, name: str, result: str, *arguments: str) -> Callable[..., int] | None:
    """A C function of a shared library, for kernels to call; None if this system does not have it.

    Args:
        library: as the loader knows it, such as "libzstd.so.1".
        result, arguments: numba's names of integer types; addresses are "uintp".
    """
    from llvmlite import binding as llvm
    from numba.core import config, types

    try:
        found = getattr(ctypes.CDLL(library), name)
        llvm.load_library_permanently(library)
    except (OSError, AttributeError, RuntimeError):
        return None
    if vars(config)["DISABLE_JIT"]:
        kinds = {"uintp": ctypes.c_size_t, "intp": ctypes.c_ssize_t, "intc": ctypes.c_int}
        found.restype, found.argtypes = kinds[result], [kinds[argument] for argument in arguments]
        return cast("Callable[..., int]", lambda *values: found(*map(int, values)))
    open_types: Any = types
    kind = getattr(open_types, result)(*(getattr(open_types, argument) for argument in arguments))
    return cast("Callable[..., int]", open_types.ExternalFunction(name, kind))


load64 = _load64()
"""load64(pointer, index): the 8 bytes from `index` on, little-endian."""
store64 = _store64()
"""store64(pointer, index, word): write 8 bytes from `index` on, little-endian."""
pointer_at = _pointer_at()
"""pointer_at(address, size): the bytes at that address, by index; the caller keeps them alive, and indices within `size`.

Unlike an array, a pointer costs nothing when it is passed on: numba counts an array's references, atomically, at every call."""
pread = _pread()
"""pread(fd, pointer, size, offset): read bytes of a file, as libc's does; returns the number of bytes, or -1."""
fadvise = _fadvise()
"""fadvise(fd, offset, size, advice): tell the system how bytes of a file will be used, as libc's posix_fadvise does."""


def _take_turns(dispatcher: Any) -> Callable[..., Any]:
    """`dispatcher.compile`, which numba calls for argument types that it has not met, with the kernel's lock held."""
    compile_, stored = dispatcher.compile, dispatcher._cache

    @_timed
    def compile_or_load(signature: object) -> Any:
        with _turn(dispatcher.py_func, fcntl.LOCK_SH):
            if stored.contains(signature, dispatcher.targetctx):
                return compile_(signature)
        with _turn(dispatcher.py_func):
            _announce()
            try:
                return compile_(signature)
            except OSError:  # it was compiled, and could not be kept (a full disk): asked again, numba has it
                return compile_(signature)

    return compile_or_load


class _Kernel:
    """A function that becomes machine code when it is first called; pickles by its name."""

    _compiled: Callable[..., Any] | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function
        self.__doc__, self.__name__, self.__module__ = function.__doc__, function.__name__, function.__module__
        self.__qualname__ = function.__qualname__

    def __call__(self, *args: Any) -> Any:
        return (self._compiled or self._prepare())(*args)

    def _prepare(self) -> Callable[..., Any]:
        from numba.core import config

        vars(config)["CACHE_DIR"] = str(cache_dir())
        prepared: Any = _njit(self.py_func, cached=True)
        if not vars(config)["DISABLE_JIT"]:
            prepared._cache = KernelCache(self.py_func)
            prepared.compile = _take_turns(prepared)
        # Of two threads that prepare it at once, one is the first: what is loaded into the other's would be loaded again.
        return cast("Callable[..., Any]", self.__dict__.setdefault("_compiled", prepared))

    def load(self) -> None:
        """Load the machine code of all argument types that the node has it for; compile nothing."""
        prepared: Any = self._compiled or self._prepare()
        if isinstance(stored := getattr(prepared, "_cache", None), KernelCache):
            for signature in stored.signatures(prepared.targetctx):
                with _turn(self.py_func, fcntl.LOCK_SH):
                    if signature not in prepared.overloads and stored.contains(signature, prepared.targetctx):
                        type(prepared).compile(prepared, signature)

    def __reduce__(self) -> str:
        return self.__qualname__


bytes_at = _bytes_at()
"""bytes_at(address, size): the uint8 array at that address in memory; the caller keeps it alive."""

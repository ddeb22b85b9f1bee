"""Functions that kernels need and numba lacks: single instructions, bytes at an address, and
functions of C libraries.

Each function `_x` makes the `x` at the end of this file: its `typed` gives numba the types of a
call, and its `emit` writes the machine code. With NUMBA_DISABLE_JIT=1 each `x` is plain Python.
Modules of numba are called through names of type Any (`open_types`, ...), since their annotations
lack functions.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from megablend.jit import device

Pointer: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes in memory that are read and written one at a time; without JIT, an array."""


def _prefetch() -> Callable[[np.ndarray[Any, Any], int], None]:
    from llvmlite import ir
    from numba.core import cgutils, config, types
    from numba.extending import intrinsic

    if vars(config)["DISABLE_JIT"]:
        return lambda array, index: None

    codegen: Any = cgutils

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        item = codegen.get_item_pointer(
            context, builder, signature.args[0], array, [args[1]], wraparound=False
        )
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function_type)
        # read, into the second-level cache (the first has too few slots for misses under way), data
        builder.call(fetch, [builder.bitcast(item, byte), word(0), word(2), word(1)])
        return context.get_dummy_value()

    def typed(typing: Any, array: Any, index: Any) -> Any:
        return types.void(array, types.intp), emit

    return cast("Callable[[np.ndarray[Any, Any], int], None]", intrinsic(typed))


def _bytes_at() -> Callable[[int, int], np.ndarray[Any, np.dtype[np.uint8]]]:
    import numba
    from numba.core import config, types
    from numba.extending import intrinsic

    if vars(config)["DISABLE_JIT"]:
        return lambda address, size: np.ctypeslib.as_array(
            (ctypes.c_uint8 * int(size)).from_address(int(address))
        )

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
        return lambda pointer, index: np.uint64(
            int.from_bytes(pointer[index : index + 8].tobytes(), "little")
        )

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(
            builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(64).as_pointer()), align=1
        )

    def typed(typing: Any, pointer: Any, index: Any) -> Any:
        return types.uint64(pointer, types.intp), emit

    return cast("Callable[[Pointer, int], np.uint64]", intrinsic(typed))


def _pointer_at() -> Callable[[int, int], Pointer]:
    from numba.core import config, types
    from numba.extending import intrinsic

    if vars(config)["DISABLE_JIT"]:
        return lambda address, size: np.ctypeslib.as_array(
            (ctypes.c_uint8 * int(size)).from_address(int(address))
        )

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    open_types: Any = types

    def typed(typing: Any, address: Any, size: Any) -> Any:
        return open_types.CPointer(types.uint8)(types.uintp, size), emit

    return cast("Callable[[int, int], Pointer]", intrinsic(typed))


def _pread() -> Callable[[int, Pointer, int, int], int]:
    from numba.core import config, types

    if vars(config)["DISABLE_JIT"]:
        return lambda fd, pointer, size, offset: os.preadv(
            fd, [cast("Any", pointer)[:size]], offset
        )
    open_types: Any = types
    pointer = open_types.CPointer(types.uint8)
    function: Any = open_types.ExternalFunction(
        "pread", types.intp(types.intc, pointer, types.uintp, types.int64)
    )
    return cast("Callable[[int, Pointer, int, int], int]", function)


def _fadvise_plainly(fd: int, offset: int, size: int, advice: int) -> int:
    os.posix_fadvise(fd, offset, size, advice)
    return 0


def _fadvise() -> Callable[[int, int, int, int], int]:
    from numba.core import config, types

    if vars(config)["DISABLE_JIT"]:
        return _fadvise_plainly
    open_types: Any = types
    function: Any = open_types.ExternalFunction(
        "posix_fadvise", types.intc(types.intc, types.int64, types.int64, types.intc)
    )
    return cast("Callable[[int, int, int, int], int]", function)


def library_function(
    library: str, name: str, result: str, *arguments: str
) -> Callable[..., int] | None:
    """Return a C function of a shared library for kernels to call; None if this system does not
    have the function.

    Args:
        library: the name by which the loader finds the library, such as "libzstd.so.1".
        result, arguments: numba's names of integer types; addresses are "uintp".
    """
    from llvmlite import binding as llvm
    from numba.core import config, types

    try:
        function = getattr(ctypes.CDLL(library), name)
        llvm.load_library_permanently(library)
    except (OSError, AttributeError, RuntimeError):
        return None
    if vars(config)["DISABLE_JIT"]:
        kinds = {"uintp": ctypes.c_size_t, "intc": ctypes.c_int}
        function.restype = kinds[result]
        function.argtypes = [kinds[argument] for argument in arguments]
        return cast("Callable[..., int]", lambda *values: function(*map(int, values)))
    open_types: Any = types
    signature = getattr(open_types, result)(
        *(getattr(open_types, argument) for argument in arguments)
    )
    return cast("Callable[..., int]", open_types.ExternalFunction(name, signature))


prefetch = _prefetch()
"""prefetch(array, index): begin to load an item of a 1-D array into the CPU's cache; any index is
harmless."""
load64 = _load64()
"""load64(pointer, index): return the 8 bytes from `index` on as a little-endian integer."""
pointer_at = _pointer_at()
"""pointer_at(address, size): return a pointer to the bytes at an address, which are accessed by
index; the caller keeps them alive, and every index below `size`.

Passing on a pointer costs nothing, whereas numba counts an array's references, atomically, at every
call."""
pread = _pread()
"""pread(fd, pointer, size, offset): read bytes of a file as libc's pread does; return the number of
bytes, or -1."""
fadvise = _fadvise()
"""fadvise(fd, offset, size, advice): tell the system how bytes of a file will be used, as libc's
posix_fadvise does."""
bytes_at = _bytes_at()
"""bytes_at(address, size): return the memory at an address as a uint8 array; the caller keeps it
alive."""

"""Loading compiled kernels from numba's cache, without the half of numba that only compiling needs.

Before numba loads anything, it imports its implementations of Python and NumPy, some 300 ms in every process. Machine code needs
none of them: all it refers to are LLVM's symbols, which numba's contexts and its runtime define, and Environments, which hold the
objects that it uses. Where this fails, as with another numba, numba's own loading takes over.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import Environment, _rebuild_env, lookup_environment
from numba.core.runtime import rtsys

_environments: dict[str, Any] = {}
"""Those of numba's functions whose modules are not imported, by name: machine code keeps their addresses."""


def _make_environment(module: str, constants: list[Any], name: str) -> Any:
    """As numba does, but without importing `module`: only object mode looks globals up, and no kernel is in object mode."""
    if module in sys.modules or lookup_environment(name) is not None:
        return _rebuild_env(module, constants, name)
    if name not in _environments:
        environment = Environment({"__name__": module})
        environment.consts[:] = constants
        environment.env_name = name
        _environments[name] = environment
    return _environments[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_rebuild_env.__module__, _rebuild_env.__name__):
            return _make_environment
        return super().find_class(module, name)


class KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function, loaded as described above."""

    def contains(self, signature: Any, context: Any) -> bool:
        """Whether machine code for `signature`, a tuple of argument types, is in the cache."""
        try:
            path = self._find(signature, context)
        except Exception:  # an index that cannot be read is compiled again
            return False
        return path is not None and os.path.exists(path)

    @global_compiler_lock
    def _find(self, signature: Any, context: Any) -> str | None:
        name = self._cache_file._load_index().get(self._index_key(signature, context.codegen()))
        return None if name is None else self._cache_file._data_path(name)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for `sig`; None where it is not in the cache. numba calls this with its lock held."""
        try:
            path = self._find(sig, target_context)
            if path is None:
                return None
            with open(path, "rb") as file:
                payload = _Unpickler(file).load()
            rtsys.initialize(target_context)
            return self._impl.rebuild(target_context, payload)
        except Exception:  # whatever is wrong, numba tells it, or does without
            return super().load_overload(sig, target_context)

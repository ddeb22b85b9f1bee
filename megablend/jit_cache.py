"""Loading compiled kernels from numba's cache, without the half of numba that only compiling needs.

Before numba loads machine code, it imports its implementations of Python and NumPy, which takes some
300 ms in every process. Machine code needs none of them: it refers only to symbols that numba's
contexts and its runtime define (kernels hash no strings, whose secret is defined elsewhere), and to
Environments, which hold the objects that it uses. If loading fails here, as with another version of
numba, numba's own loading takes over.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from numba.core import caching, compiler_lock, environment, runtime

_caching: Any = caching
_lock: Any = compiler_lock.global_compiler_lock
_numba_environment: Any = environment
_runtime: Any = runtime

_environments: dict[str, Any] = {}
"""The Environments of functions whose modules are not imported, by name. They are never removed, since
machine code has their addresses."""


def _make_environment(module: str, constants: list[Any], name: str) -> Any:
    """Rebuild an Environment as numba does, but without importing `module`: only object mode looks
    globals up, and no kernel is in object mode."""
    if module in sys.modules or _numba_environment.lookup_environment(name) is not None:
        return _numba_environment._rebuild_env(module, constants, name)
    if name not in _environments:
        made = _numba_environment.Environment({"__name__": module})
        made.consts[:] = constants
        made.env_name = name
        _environments[name] = made
    return _environments[name]


class _Unpickler(pickle.Unpickler):
    """Calls `_make_environment` instead of numba's own function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_numba_environment.__name__, "_rebuild_env"):
            return _make_environment
        return super().find_class(module, name)


class KernelCache(_caching.FunctionCache):  # type: ignore[misc]
    """numba's cache of one function, loaded as described above."""

    def contains(self, signature: Any, context: Any) -> bool:
        """Return whether machine code for `signature`, a tuple of argument types, is in the
        cache."""
        try:
            with _lock:
                path = self._find(signature, context)
        except Exception:  # an index that cannot be read is compiled again
            return False
        return path is not None and path.exists()

    def signatures(self, context: Any) -> list[Any]:
        """Return the tuples of argument types for which machine code is in the cache; none if its
        index cannot be read."""
        try:
            with _lock:
                keys = list(self._cache_file._load_index())
                return [key[0] for key in keys if key == self._index_key(key[0], context.codegen())]
        except Exception:  # an index that cannot be read is written again
            return []

    def _find(self, signature: Any, context: Any) -> Path | None:
        """Return the path of the machine code for a signature; None if there is none."""
        name = self._cache_file._load_index().get(self._index_key(signature, context.codegen()))
        return None if name is None else Path(self._cache_file._data_path(name))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function for `sig`; None if it is not in the cache. numba calls this
        with its lock held."""
        try:
            path = self._find(sig, target_context)
            if path is None:
                return None
            with path.open("rb") as file:
                payload = _Unpickler(file).load()
            _runtime.rtsys.initialize(target_context)
            return self._impl.rebuild(target_context, payload)
        except Exception:  # whatever is wrong, numba's own loading reports or handles it
            return super().load_overload(sig, target_context)

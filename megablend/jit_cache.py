"""Load compiled kernels from numba's cache, without the half of numba that is only needed to
compile.

Before numba loads machine code, it imports its implementations of Python and NumPy, which takes
some 300 ms in every process. Machine code needs none of them: it refers only to symbols that
numba's contexts and its runtime define (kernels do not hash strings; the secret for that is defined
elsewhere), and to Environments, which hold the objects that it uses. If loading fails here, as with
another version of numba, numba's own loading takes over.

numba neither flushes nor checks its files. So each file ends with a digest. A file that is damaged,
for instance by a power failure, is ignored, and its kernel is compiled again.
"""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Any

from numba.core import caching, compiler_lock, environment, runtime

from megablend.system.digest import DIGEST_BYTES, hex_digest

_caching: Any = caching
_lock: Any = compiler_lock.global_compiler_lock
_numba_environment: Any = environment
_runtime: Any = runtime

_environments: dict[str, Any] = {}
"""The Environments of functions whose modules are not imported, by name. They are never removed,
since machine code holds their addresses."""


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


def _is_whole(data: bytes) -> bool:
    """Return whether data ends with its hexadecimal digest."""
    end = -2 * DIGEST_BYTES
    return data[end:] == hex_digest(data[:end]).encode()


class _CheckedFiles(_caching.IndexDataCacheFile):  # type: ignore[misc]
    """numba's files of one function: an index, and a file for each set of argument types."""

    def save(self, key: Any, data: Any) -> None:
        """Save machine code in a file named by its key. numba numbers the files, so that an index
        which was begun anew could name a file of other argument types."""
        name = self._data_name(int(hex_digest(repr(key), size=6), 16))
        self._save_data(name, data)
        self._save_index(self._load_index() | {key: name})

    def _dump(self, obj: Any) -> bytes:
        data: bytes = super()._dump(obj)
        return data + hex_digest(data).encode()  # which unpickling ignores

    def _load_index(self) -> dict[Any, str]:
        """Return the names of files by key; none if the index is damaged."""
        try:
            with open(self._index_path, "rb") as file:
                pickle.load(file)  # numba's version
                index: dict[Any, str] = super()._load_index() if _is_whole(file.read()) else {}
        except Exception:  # whatever unpickling of damaged bytes raises
            return {}
        return index


class KernelCache(_caching.FunctionCache):  # type: ignore[misc]
    """numba's cache of one function, loaded as the docstring of this module describes."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _CheckedFiles(
            self.cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )

    def contains(self, signature: Any, context: Any) -> bool:
        """Return whether machine code for `signature`, a tuple of argument types, is in the
        cache."""
        with _lock:
            return self._read(signature, context) is not None

    def signatures(self, context: Any) -> list[Any]:
        """Return the tuples of argument types for which machine code is in the cache; none if its
        index cannot be read."""
        with _lock:
            keys = list(self._cache_file._load_index())
            return [key[0] for key in keys if key == self._index_key(key[0], context.codegen())]

    def _read(self, signature: Any, context: Any) -> bytes | None:
        """Return the pickled machine code for a signature; None if there is none, or it is
        damaged."""
        name = self._cache_file._load_index().get(self._index_key(signature, context.codegen()))
        try:
            data = b"" if name is None else Path(self._cache_file._data_path(name)).read_bytes()
        except OSError:
            return None
        return data if _is_whole(data) else None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function for `sig`; None if it is not in the cache. numba calls this
        with its lock held."""
        data = self._read(sig, target_context)
        if data is None:
            return None
        try:
            payload = _Unpickler(io.BytesIO(data)).load()
            _runtime.rtsys.initialize(target_context)
            return self._impl.rebuild(target_context, payload)
        except Exception:  # whatever is wrong, numba's own loading reports or handles it
            return super().load_overload(sig, target_context)

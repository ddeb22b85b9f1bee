"""Where a node's compiled kernels are cached: numba loads them as code, and their index by pickle."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from pathlib import Path

from megablend.fs.private_folder import find_private_folder

_VARIABLES = "MEGABLEND_KERNEL_CACHE", "XDG_CACHE_HOME"


def private_kernel_folder(name: Path) -> Path:
    """The folder `name` below MEGABLEND_KERNEL_CACHE, XDG_CACHE_HOME, ~/.cache or the temporary folder.

    The first that is private; otherwise a new temporary folder, which is removed when this process ends. Warns if
    MEGABLEND_KERNEL_CACHE is set but cannot be used.
    """
    requested = os.environ.get(_VARIABLES[0])
    bases = [Path(base).absolute() for variable in _VARIABLES if (base := os.environ.get(variable))]
    with contextlib.suppress(RuntimeError):  # a user without a home
        bases.append(Path("~/.cache").expanduser())
    with contextlib.suppress(OSError):  # no writable temporary folder
        bases.append(Path(tempfile.gettempdir()) / f"megablend-{os.geteuid()}")
    folder, problems = find_private_folder(
        bases, Path("megablend") / "private-kernels" / name, prefix="megablend-kernels-"
    )
    if requested and problems:
        warnings.warn(
            f"MEGABLEND_KERNEL_CACHE={requested}: {problems[0]}: files in it are run as code, so neither it nor its parents "
            f"may be writable by other users: compiled kernels are stored in {folder}",
            RuntimeWarning,
            stacklevel=2,
        )
    return folder

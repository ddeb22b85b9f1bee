"""Where a node's compiled kernels are kept: numba loads them as code, and their index by pickle."""

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

    The first that is private; where none is, a new temporary folder, which is removed when this process ends. Warns where
    MEGABLEND_KERNEL_CACHE is set and does not serve.
    """
    asked = os.environ.get(_VARIABLES[0])
    bases = [Path(base).absolute() for variable in _VARIABLES if (base := os.environ.get(variable))]
    with contextlib.suppress(RuntimeError):  # a user without a home
        bases.append(Path("~/.cache").expanduser())
    with contextlib.suppress(OSError):  # none that can be written to
        bases.append(Path(tempfile.gettempdir()) / f"megablend-{os.geteuid()}")
    folder, problems = find_private_folder(
        bases, Path("megablend") / "private-kernels" / name, prefix="megablend-kernels-"
    )
    if asked and problems:
        warnings.warn(
            f"MEGABLEND_KERNEL_CACHE={asked}: {problems[0]}: what lies there is run as code, so that it must be closed to other "
            f"users, and so must the folders above: compiled kernels go to {folder}",
            RuntimeWarning,
            stacklevel=2,
        )
    return folder

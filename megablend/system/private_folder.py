"""A folder that no other user can write to. It is used for files that are loaded as code: compiled
kernels, and the pickled index that numba keeps of them.

The folder is owned by this process's user, with no permission for anyone else, and only this user
and root can change its parent folders. A parent folder that others may write to is acceptable if
its sticky bit prevents them from renaming files of other users (/tmp).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from megablend.errors import ResourceError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""The permission bits that let other users write."""
_VARIABLE = "MEGABLEND_KERNEL_CACHE"
"""The environment variable that names a folder for compiled kernels."""


def find_private_folder(
    bases: Sequence[Path], name: Path, *, prefix: str
) -> tuple[Path, list[str]]:
    """Return the folder `name` under the first of `bases` where no other user can write to it. The
    folder is created if it is missing. If there is no such base, return a new temporary folder.

    Args:
        name: a relative path; its folders are created with permissions for this user only.
        prefix: the prefix of the name of a temporary folder, which is removed when this process
            exits.

    Returns: the folder, free of symbolic links; and for each base that cannot be used, the reason.
    Raises: OSError if no temporary folder can be created.
    """
    problems: list[str] = []
    for base in bases:
        folder, problem = _try_base(base, name)
        if problem is None:
            return folder, problems
        problems.append(problem)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(_remove, folder, os.getpid())
    return folder, problems


def _try_base(base: Path, name: Path) -> tuple[Path, str | None]:
    """Create the folder `name` under a base if it is missing.

    Returns: the folder; and the reason why it cannot be used, or None.
    """
    folder = base / name
    try:
        _make_folders(base, name)
        folder = folder.resolve(strict=True)
        problem = problem_with(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links, up to Python 3.12
        return folder, f"{folder}: {getattr(error, 'strerror', None) or error}"
    if problem is None and not os.access(folder, os.W_OK):
        problem = f"{folder} cannot be written to"
    return folder, problem


def problem_with(folder: Path) -> str | None:
    """Return the reason why another user could change files in `folder`, an absolute path without
    links; None if no user can.

    Raises: OSError if a part of the path cannot be inspected.
    """
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        return f"{folder} is not a folder"
    if state.st_uid != os.geteuid():
        return f"{folder} belongs to user {state.st_uid}"
    if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"{folder} is open to other users (mode {stat.S_IMODE(state.st_mode):o})"
    trusted = {os.geteuid(), 0, *_unmapped_root()}
    for above in folder.parents:
        state = above.lstat()
        if state.st_uid not in trusted:
            return f"{above} belongs to user {state.st_uid}"
        if state.st_mode & _OTHERS_WRITE and not state.st_mode & stat.S_ISVTX:
            return f"other users can write to {above} (mode {stat.S_IMODE(state.st_mode):o})"
    return None


def _make_folders(base: Path, name: Path) -> None:
    """Create the folders of the relative path `name` below `base`. If some exist and belong to this
    user, the write permissions of other users are removed from all but the last."""
    # Pathlib would create them with the permissions of the umask
    for above in reversed((base, *base.parents)):
        if not above.exists():
            above.mkdir(mode=0o700, exist_ok=True)
    folder = base
    for part in name.parts:
        folder = folder / part
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            state = folder.lstat()
            is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
            if is_own and state.st_mode & _OTHERS_WRITE and folder != base / name:
                folder.chmod(stat.S_IMODE(state.st_mode) & ~_OTHERS_WRITE)


def _unmapped_root() -> Iterator[int]:
    """Yield the id of the user that seems to own the system's folders in a container that does not
    map root; yield nothing elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        # The first mapping: the first id in the container, the same id outside, and the number
        words = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        first, _, count = (int(word) for word in words[:3])
        if first or count < (1 << 32) - 1:
            yield int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))


def _remove(folder: Path, pid: int) -> None:
    """Remove a temporary folder when the process that made it exits."""
    if os.getpid() == pid:  # a forked child leaves this to its parent
        shutil.rmtree(folder, ignore_errors=True)


def private_kernel_folder(name: Path) -> Path:
    """Return a private folder `name` for compiled kernels.

    MEGABLEND_KERNEL_CACHE, XDG_CACHE_HOME, ~/.cache and the system's temporary folder are tried in
    this order. If the folder would not be private in any of them, a new temporary folder is used,
    which is removed when this process exits. Warns of that, and if MEGABLEND_KERNEL_CACHE is set
    but cannot be used.

    Raises: ResourceError if there is no folder at all.
    """
    requested = os.environ.get(_VARIABLE)
    settings = (requested, os.environ.get("XDG_CACHE_HOME"))
    bases = [Path(setting).absolute() for setting in settings if setting]
    with contextlib.suppress(RuntimeError):  # a user without a home
        bases.append(Path("~/.cache").expanduser())
    with contextlib.suppress(OSError):  # no writable temporary folder
        bases.append(Path(tempfile.gettempdir()) / f"megablend-{os.geteuid()}")
    remedy = f"set {_VARIABLE} to a folder to which only this user can write"
    try:
        folder, problems = find_private_folder(
            bases, Path("megablend") / "private-kernels" / name, prefix="megablend-kernels-"
        )
    except OSError as error:
        raise ResourceError(f"compiled kernels cannot be stored ({error}); {remedy}") from error
    if requested and problems:
        warnings.warn(
            f"{_VARIABLE}={requested} is not used: {problems[0]}; compiled kernels, which are run as code, are stored in "
            f"{folder} instead",
            RuntimeWarning,
            stacklevel=2,
        )
    elif len(problems) == len(bases):
        warnings.warn(
            f"compiled kernels are not kept: each process compiles its own in {folder}; {remedy}",
            RuntimeWarning,
            stacklevel=2,
        )
    return folder

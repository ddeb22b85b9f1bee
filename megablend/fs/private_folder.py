"""A folder that no other user can write to: what lies in it is loaded as code.

Owned by this process's user, with no permission for anyone else, under folders that none but this user and root can change.
A folder that others may write to is fine above where its sticky bit keeps them from renaming what is not theirs (/tmp).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def find_private_folder(bases: Sequence[Path], name: Path, *, prefix: str) -> tuple[Path, list[str]]:
    """The folder `name` under the first of `bases` where it is private, made where it is not there; else a new temporary one.

    Args:
        name: relative; the folders that it consists of are made for this user alone.
        prefix: of the temporary folder's name, which is removed when this process ends.

    Returns: the folder, free of symbolic links; of each base that does not serve, why.
    Raises: OSError where no temporary folder can be made.
    """
    problems: list[str] = []
    for base in bases:
        folder, problem = _try(base, name)
        if problem is None:
            return folder, problems
        problems.append(problem)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(_remove, folder, os.getpid())
    return folder, problems


def _try(base: Path, name: Path) -> tuple[Path, str | None]:
    """The folder `name` under a base; why it does not serve, or None."""
    folder = base / name
    try:
        _make(base, name)
        folder = folder.resolve(strict=True)
        problem = problem_with(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, up to Python 3.12
        return folder, f"{folder}: {getattr(error, 'strerror', None) or error}"
    return folder, problem or (None if os.access(folder, os.W_OK) else f"{folder} cannot be written to")


def problem_with(folder: Path) -> str | None:
    """Why another user could change what lies in `folder`, an absolute path without links; None where none can.

    Raises: OSError where a part of the path cannot be looked at.
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


def _make(base: Path, name: Path) -> None:
    """Make the folders of `name`; those that are there and ours, and were made under a lenient umask, are closed to others."""
    for above in reversed((base, *base.parents)):  # pathlib would make them open to whom the umask allows
        if not above.exists():
            above.mkdir(mode=0o700, exist_ok=True)
    folder = base
    for part in name.parts:
        folder = folder / part
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            continue
        state = folder.lstat()
        is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
        if is_own and state.st_mode & _OTHERS_WRITE and folder != base / name:
            folder.chmod(stat.S_IMODE(state.st_mode) & ~_OTHERS_WRITE)


def _unmapped_root() -> Iterator[int]:
    """The user that the system's own folders seem to belong to in a container that root is not mapped into."""
    with contextlib.suppress(OSError, ValueError):
        inside, _, count = (int(word) for word in Path("/proc/self/uid_map").read_text(encoding="ascii").split()[:3])
        if inside or count < (1 << 32) - 1:
            yield int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)

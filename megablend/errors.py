"""All errors that megablend raises on purpose, and the remedies that several messages give.

    MegablendError
    ├── ConfigError (ValueError)          the config or the command line: exit code 2
    │   └── PlanError                     a blend, a split or a run that cannot be planned as requested
    ├── LaunchError (RuntimeError)        the launcher and the MPI library disagree on the number of processes: exit code 2
    ├── StateError (ValueError)           a checkpoint's state does not belong to this run: exit code 2
    ├── TransformError (RuntimeError)     the user's own function on samples: exit code 2
    ├── DataError (ValueError)            a data file: exit code 3
    │   ├── MissingFileError (FileNotFoundError)
    │   ├── CorruptFileError              its bytes do not conform to its format
    │   ├── ChangedFileError              it is not the file that was indexed
    │   ├── RefusedFileError              its source, or the system, denies access to it
    │   └── UnsupportedFileError          a valid file that megablend cannot read
    ├── CacheError (RuntimeError)         the cache: missing, damaged, in use: exit code 3
    │   └── DamagedCacheError             a table or manifest is not what was committed, which a build repairs
    └── ResourceError (RuntimeError)      the system denies a resource: memory, permission, open files: exit code 3

Any other exception that escapes is a bug in megablend: exit code 70. A message says which
file, where in it, what was found, what was expected and what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

CHANGED_REMEDY = "restore the original file, or give the run another name (`run:`) and run `megablend build CONFIG`"
"""The remedy for a file that has changed since it was indexed. Building again is not enough, since
a run keeps its index."""
NOT_ONE_FILE = (
    "or is not the same file on all nodes; let its writer finish, or put it on a file system that all ranks share, then "
    "build again"
)
"""The end of messages about a file that changed during a build: another possible cause, and the
remedies."""
WITHOUT_IT = "to continue without it, amend the run (`new_data` or `withdraw` of a stage, see docs/stages.md)"
"""The remedy for a file that a run needs and that is gone for good."""
MISSING_REMEDY = (
    f"restore the file; {WITHOUT_IT}; or, if the config lists it, remove it there, give the run another name (`run:`) and run "
    "`megablend build CONFIG`"
)
"""The remedy for a file that was indexed and no longer exists."""
REWRITE_REMEDY = "rewrite or re-download the file"
"""The remedy for a file that is found incomplete before it is indexed."""
UNFINISHED = f"truncated, or still being written; wait until it is written, or {REWRITE_REMEDY}"
"""The problem and the remedy of a file that ends early."""
REPAIR_REMEDY = "build again to repair it (`megablend build CONFIG`)"
"""The remedy for a damaged table of a cache. A build also repairs the tables of an older index that
a run uses."""
REMOVE_REMEDY = "remove it and build again (`megablend build CONFIG`)"
"""The remedy for a damaged file of a cache that a build computes again if it is missing and still
needed."""
REBUILD_REMEDY = (
    "run `megablend build CONFIG`; if the data has changed, first give the run another name (`run:`) or reset the run "
    "(`megablend runs reset CONFIG`)"
)
"""The remedy for an index that a run uses and that no longer exists."""


_PASSWORD = re.compile(r"(?<=:/)(/?)[^\s/?#@:]*:(?!\d+[/?#])\S*@")
"""Matches the user and the password of a URL, also of one that `pathlib` has shortened."""


class MegablendError(Exception):
    """Base class of all errors that megablend raises on purpose. Passwords in the URLs of a message
    are left out."""

    exit_code = 70

    def __init__(self, message: str = "") -> None:
        super().__init__(_PASSWORD.sub(r"\1...@", message))


class ConfigError(MegablendError, ValueError):
    """The config or the command line requests something that does not exist, or contradicts
    itself."""

    exit_code = 2


class PlanError(ConfigError):
    """A blend, a split or a run cannot be planned as requested."""


class LaunchError(MegablendError, RuntimeError):
    """The launcher and the MPI library disagree on the number of processes."""

    exit_code = 2


class StateError(MegablendError, ValueError):
    """A checkpoint's state does not belong to this run."""

    exit_code = 2


class TransformError(MegablendError, RuntimeError):
    """The user's transform of samples failed, or returned a value that cannot be collated."""

    exit_code = 2


class DataError(MegablendError, ValueError):
    """A data file cannot be read as requested; the message starts with its path (and byte
    offset)."""

    exit_code = 3

    def __init__(self, path: str, problem: str = "", *, offset: int | None = None) -> None:
        self.path = path
        self.problem = problem
        self.offset = offset
        where = path if offset is None else f"{path} at byte {offset}"
        # torch raises a loader worker's error again with the worker's traceback as its only argument,
        # so `problem` may be absent
        super().__init__(f"{where}: {problem}" if problem else where)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_data_error, (type(self), self.path, self.problem, self.offset)


class MissingFileError(DataError, FileNotFoundError):
    """A data file does not exist."""


class CorruptFileError(DataError):
    """A file's bytes do not conform to its format."""


class ChangedFileError(DataError):
    """A file has changed since it was indexed."""


class RefusedFileError(DataError):
    """The source of a file, or the system, denies access to it until the credentials, permissions
    or settings are changed."""


class UnsupportedFileError(DataError):
    """A valid file that megablend cannot read."""


class CacheError(MegablendError, RuntimeError):
    """The cache is missing, damaged or in use by another build."""

    exit_code = 3


class DamagedCacheError(CacheError):
    """A table or manifest of the cache differs from what was committed. A build repairs it."""

    def __init__(self, message: str, problem: str | None = None) -> None:
        super().__init__(message)
        self.problem = message if problem is None else problem
        """The message without its remedy."""

    @classmethod
    def of(cls, problem: str) -> DamagedCacheError:
        """Return the error for a problem, with the remedy appended. The text of the problem says
        where it is, what was found and what was expected."""
        return cls(f"{problem}; {REPAIR_REMEDY}", problem)


class ResourceError(MegablendError, RuntimeError):
    """The system denies a resource (memory, threads, open files, a permission), or a disk fails."""

    exit_code = 3


def _rebuild_data_error(
    error_class: type[DataError], path: str, problem: str, offset: int | None
) -> DataError:
    """Rebuild a DataError that was pickled."""
    return error_class(path, problem, offset=offset)


def did_you_mean(name: str, known: Iterable[str], *, before: str = "", cutoff: float = 0.6) -> str:
    """Return the question "did you mean ...?" with the known name most similar to `name`,
    preferably one that begins with it; "" if none is similar.

    Args:
        before: the text that separates the question from the message before it.
        cutoff: the lowest similarity, 0 to 1; see difflib.get_close_matches.
    """
    near = difflib.get_close_matches(name, list(known), n=10, cutoff=cutoff)
    near = [candidate for candidate in near if candidate.startswith(name)] or near
    return f"{before}did you mean {near[0]!r}?" if near else ""

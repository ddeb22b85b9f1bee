"""Every error megablend raises on purpose.

    MegablendError
    ├── ConfigError (ValueError)          the config or the command line: exit code 2
    │   └── PlanError                     a blend, a split or a run that cannot be planned as asked
    ├── LaunchError (RuntimeError)        the launcher and the MPI library disagree: exit code 2
    ├── StateError (ValueError)           a checkpoint's state does not belong to this run: exit code 2
    ├── TransformError (RuntimeError)     the user's own function on samples: exit code 2
    ├── DataError (ValueError)            a data file: exit code 3
    │   ├── MissingFileError (FileNotFoundError)
    │   ├── CorruptFileError              its bytes are not what its format says
    │   ├── ChangedFileError              it is not the file that was indexed
    │   └── UnsupportedFileError          a valid file that we cannot read
    ├── CacheError (RuntimeError)         the cache: missing, damaged, in use: exit code 3
    └── ResourceError (RuntimeError)      the system refuses something: memory, permission, open files: exit code 3

Anything else that escapes is a bug of ours: exit code 70. A message says which file, where in it, what was found, what was
expected and what to do.
"""

from __future__ import annotations


class MegablendError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 70


class ConfigError(MegablendError, ValueError):
    """The config or the command line asks for something that does not exist or contradicts itself."""

    exit_code = 2


class PlanError(ConfigError):
    """A blend, a split or a run cannot be planned as asked."""


class LaunchError(MegablendError, RuntimeError):
    """The launcher started another number of processes than the MPI library sees."""

    exit_code = 2


class StateError(MegablendError, ValueError):
    """A checkpoint's state does not belong to this run."""

    exit_code = 2


class TransformError(MegablendError, RuntimeError):
    """The function that the user gave for samples failed, or returned what cannot be collated."""

    exit_code = 2


CHANGED_REMEDY = (
    "restore the original file; or give the run another name (`run:`) and run `megablend build CONFIG`, since a run keeps the "
    "index that it began with"
)
"""What to do about a file that is not the one that was indexed: building again does not move a run to the new index."""


REPAIR_REMEDY = "build again to repair it (`megablend build CONFIG`)"
"""What to do about a damaged table of a cache: a build makes tables again, of the index that a run keeps, too."""


class DataError(MegablendError, ValueError):
    """A data file cannot be read as asked; the message starts with its path (and byte offset)."""

    exit_code = 3

    def __init__(self, path: str, problem: str = "", *, offset: int | None = None) -> None:
        self.path = path
        self.problem = problem
        self.offset = offset
        where = path if offset is None else f"{path} at byte {offset}"
        # Torch raises a loader worker's error anew, with the worker's trace for its only argument.
        super().__init__(f"{where}: {problem}" if problem else where)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_data_error, (type(self), self.path, self.problem, self.offset)


class MissingFileError(DataError, FileNotFoundError):
    """A data file is not there."""


class CorruptFileError(DataError):
    """A file's bytes are not what its format says they must be."""


class ChangedFileError(DataError):
    """A file is not the one that was indexed."""


class UnsupportedFileError(DataError):
    """A valid file that megablend cannot read."""


class CacheError(MegablendError, RuntimeError):
    """The cache is missing, damaged or in use by another build."""

    exit_code = 3


class ResourceError(MegablendError, RuntimeError):
    """The system refuses what is needed: memory, threads, open files, a permission; or a disk fails."""

    exit_code = 3


def _rebuild_data_error(kind: type[DataError], path: str, problem: str, offset: int | None) -> DataError:
    return kind(path, problem, offset=offset)

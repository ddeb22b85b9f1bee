"""Which storages there are, by the scheme of the locations that they hold: megablend's own, and those of other packages.

Another package adds one by an entry point of the group `megablend.storages`, whose name is the scheme:

    [project.entry-points."megablend.storages"]
    zip = "my_package:make_zip_storage"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from megablend.errors import ConfigError

if TYPE_CHECKING:  # a config is read without NumPy
    from megablend.storage.base import Storage

ENTRY_POINTS = "megablend.storages"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """What a config asks of its storages; each takes what it has a use for."""

    direct: bool = False
    """Read blocks past the system's page cache."""
    max_open_files: int | None = None
    """Descriptors of files that the process keeps; None for the storage's own choice."""


StorageFactory: TypeAlias = "Callable[[StorageOptions], Storage]"


def _make_local(options: StorageOptions) -> Storage:
    from megablend.storage.descriptors import shared_pool
    from megablend.storage.direct import DirectStorage  # compiled kernels: a config is read without them
    from megablend.storage.local import LocalStorage

    kind = DirectStorage if options.direct else LocalStorage
    return kind(shared_pool("local", options.max_open_files))


STORAGES: dict[str, StorageFactory] = {"": _make_local}
"""By scheme, in small letters; "" is that of plain paths."""


def find_storage(scheme: str) -> StorageFactory | None:
    """What makes the storage of a scheme; None where no package has one.

    Raises: ConfigError where a package has one that cannot be loaded.
    """
    if scheme not in STORAGES:
        import importlib.metadata

        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=scheme):
            try:
                STORAGES[scheme] = entry.load()
            except Exception as error:  # of another package: whatever it is
                raise ConfigError(
                    f"{scheme}://: its storage {entry.value!r} cannot be loaded ({type(error).__name__}: {error}); "
                    "repair or remove the package that it is in"
                ) from error
            break
    return STORAGES.get(scheme)

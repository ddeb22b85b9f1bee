"""The available storages, by the scheme of their locations: megablend's own storages, and those of
other packages.

Another package adds a storage by an entry point of the group `megablend.storages`, whose name is
the scheme:

    [project.entry-points."megablend.storages"]
    zip = "my_package:make_zip_storage"
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megablend.errors import ConfigError
from megablend.storage.location import MIRROR_VARIABLE, find_scheme
from megablend.storage.object_options import ObjectOptions
from megablend.storage.setting_values import parse_local_path

if TYPE_CHECKING:  # a config is read without NumPy
    from megablend.storage.base import Storage
    from megablend.storage.mirror_options import MirrorOptions


ENTRY_POINTS = "megablend.storages"
"""The group of entry points by which other packages add storages."""
_ALTERNATIVES = {
    "hf": "download the dataset once (`hf download`) and use the folder's path, or https:// URLs of its files",
    "msc": "use the bucket's s3://, gs:// or az:// URL, and set its endpoint under `storage`",
    "gcs": "write gs://",
    "s3a": "write s3://",
    "s3n": "write s3://",
    "abfs": "write az://container/key, and set the account under `storage` or in AZURE_STORAGE_ACCOUNT_NAME",
    "abfss": "write az://container/key, and set the account under `storage` or in AZURE_STORAGE_ACCOUNT_NAME",
    "azure": "write az://",
}
"""The remedies for schemes that have no storage, but that users often try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """The storage options of a config. Each storage uses the options that apply to it."""

    direct: bool = False
    """Whether to read blocks without the system's page cache."""
    max_open_files: int | None = None
    """The number of descriptors that the process keeps open; None for the storage's default."""
    objects: ObjectOptions = field(default_factory=ObjectOptions)
    """The settings for object stores and web servers."""


StorageFactory: TypeAlias = "Callable[[StorageOptions], Storage]"
"""A function that creates the storage for a scheme, given the options of a config."""


def find_storage(scheme: str) -> StorageFactory | None:
    """Return the factory of a scheme's storage; None if no package provides one.

    Raises: ConfigError if a package provides a storage that cannot be loaded.
    """
    if scheme not in STORAGES:
        import importlib.metadata

        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=scheme):
            try:
                STORAGES[scheme] = entry.load()
            except Exception as error:  # code of another package may raise anything
                raise ConfigError(
                    f"{scheme}://: its storage {entry.value!r} cannot be loaded ({type(error).__name__}: {error}); "
                    "fix the package that provides it"
                ) from error
            break
    return STORAGES.get(scheme)


def explain_scheme(scheme: str) -> str:
    """Return the message for a scheme that has no storage, with an alternative."""
    instead = _ALTERNATIVES.get(scheme)
    known = ", ".join(f"{name}://" for name in OBJECT_SCHEMES)
    return f"{scheme}:// is not supported: {instead or f'expected a plain path or one of {known}'}"


def find_mirror(objects: ObjectOptions) -> MirrorOptions | None:
    """Return the settings of the mirror from the config, or else from the environment; None if
    neither sets a mirror. Raises: ConfigError."""
    folder = os.environ.get(MIRROR_VARIABLE)
    if objects.mirror is not None or not folder:
        return objects.mirror
    if Path(folder).is_file():
        raise ConfigError(f"{MIRROR_VARIABLE}: {folder} is a file\nset it to the mirror's folder")
    # Imported here, since importing pydantic takes long, and only mirrors need it
    from megablend.storage.mirror_options import MirrorOptions, make_mirror_absolute

    try:
        return make_mirror_absolute(MirrorOptions(folder=parse_local_path(folder)), Path.cwd())
    except ValueError as error:
        raise ConfigError(f"{MIRROR_VARIABLE}: {error}") from None


def _make_local(options: StorageOptions) -> Storage:
    """Create the storage of plain paths, behind a mirror if one covers mounted folders."""
    from megablend.storage.descriptors import shared_pool

    # Imported here, since they load compiled kernels, which reading a config does not need
    from megablend.storage.direct import DirectStorage
    from megablend.storage.local import LocalStorage

    storage_class = DirectStorage if options.direct else LocalStorage
    storage = storage_class(shared_pool("local", options.max_open_files))
    mirror = find_mirror(options.objects)
    if mirror is None or all(map(find_scheme, mirror.prefixes)):
        return storage
    return _read_through(mirror, storage, options)


def _make_objects(options: StorageOptions) -> Storage:
    """Create the storage of object stores and web servers, behind a mirror if there is one."""
    from megablend.storage.objects.store import ObjectStorage

    mirror = find_mirror(options.objects)
    storage = ObjectStorage(dataclasses.replace(options.objects, mirror=mirror))
    return storage if mirror is None else _read_through(mirror, storage, options)


def _read_through(mirror: MirrorOptions, storage: Storage, options: StorageOptions) -> Storage:
    """Return a storage that reads another storage through a mirror. `mirror` is a layer above this
    one, so it is imported by name, and only if there is a mirror."""
    ranks = importlib.import_module("megablend.mirror.rank.mirror_storage")
    read_through: Storage = ranks.MirrorStorage(storage, mirror, options.objects)
    return read_through


OBJECT_SCHEMES = ("s3", "gs", "az", "http", "https")
"""The schemes that are read through a client which does not work after a fork."""
STORAGES: dict[str, StorageFactory] = {
    "": _make_local,
    **dict.fromkeys(OBJECT_SCHEMES, _make_objects),
}
"""The factories of storages by scheme, in lower case; "" stands for plain paths."""

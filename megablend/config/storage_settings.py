"""Load the settings of object stores without a config. Megatron's datasets, and commands that are
given the URL of a cache, use this."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from megablend.config.load import read_config_file
from megablend.errors import ConfigError
from megablend.storage.object_options import ObjectOptions
from megablend.storage.store_options import make_files_absolute, parse_options

VARIABLE = "MEGABLEND_STORAGE"
"""The environment variable that names a YAML or JSON file with a `storage` key, such as a
config."""


def load_storage_settings(given: object = None) -> ObjectOptions:
    """Load settings of object stores.

    Args:
        given: URL prefixes, each with its settings, as under `storage` of a config; or the path of
            a YAML or JSON file that has them under `storage`. If None, the file named by the
            environment variable MEGABLEND_STORAGE is used, if it is set.

    Raises: ConfigError, which names the file or the variable.
    """
    if isinstance(given, ObjectOptions):
        return given
    if isinstance(given, Mapping):
        return _parse(given, "storage", Path.cwd())
    if given is None:
        path = os.environ.get(VARIABLE)
        return _load(path, f"{VARIABLE}: ") if path else ObjectOptions()
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(
            f"storage: found {given!r}, expected URL prefixes, each with its settings, or the path of a YAML or JSON file with "
            "them under `storage`"
        )
    return _load(os.fspath(given), "storage: ")


def _load(path: str, place: str) -> ObjectOptions:
    """Load the settings in a file. They are cached until the file changes, since thousands of
    datasets may need them."""
    try:
        stat = Path(path).stat()
        version: tuple[int, ...] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except OSError:
        version = ()  # reading the file raises the error
    try:
        return _load_version(path, str(Path.cwd()), version)
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None


@lru_cache(maxsize=8)
def _load_version(path: str, folder: str, version: tuple[int, ...]) -> ObjectOptions:
    """Load the settings in a file. `version` is only part of the cache key. A relative path is
    relative to `folder`."""
    keys, places = read_config_file(Path(path))
    if "storage" not in keys:
        raise ConfigError(
            f"{path}: has no key `storage`; expected URL prefixes under it, each with its settings"
        )
    return _parse(keys["storage"], places.describe(["storage"]), Path(folder, path).parent)


def _parse(settings: object, place: str, base: Path) -> ObjectOptions:
    """Parse settings. Raises: ConfigError.

    Args:
        base: the folder for relative paths in the settings.
    """
    try:
        return make_files_absolute(parse_options(settings), base)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None

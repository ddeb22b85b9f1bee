"""How a DataLoader starts its workers: not by fork where files or the cache are in an object store, since its client does not
survive that."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

from megablend.config.model import Config
from megablend.errors import ConfigError
from megablend.storage.location import find_scheme
from megablend.storage.registry import OBJECT_SCHEMES


def choose_start_method(options: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Options for a DataLoader, with the `multiprocessing_context` that the sources require.

    Raises: ConfigError where `fork` is requested but cannot work, or where a worker runs the script that started it.
    """
    remote = next((path for path in _paths_of(config) if find_scheme(path) in OBJECT_SCHEMES), None)
    if not options["num_workers"] or remote is None:
        return dict(options)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "the script is run again by a worker that it started: put its code under `if __name__ == '__main__':`, which is "
            "required for workers that read from an object store"
        )
    context = options.get("multiprocessing_context")
    if context is None:
        return {**options, "multiprocessing_context": "forkserver"}
    method = context if isinstance(context, str) else context.get_start_method()
    if method == "fork":
        raise ConfigError(
            f"multiprocessing_context: found 'fork', expected 'forkserver' or 'spawn': {remote} is read through a client that "
            "does not work after a fork"
        )
    return dict(options)


def _paths_of(config: Config) -> list[str]:
    return [config.cache, *(path for source in config.all_sources.values() for path in source.path)]

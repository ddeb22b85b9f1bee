"""Whether the ranks of a build were given the same config."""

from __future__ import annotations

from megablend.caches.find import is_remote
from megablend.config import Config
from megablend.distributed.base import Communicator
from megablend.distributed.same_settings import check_same_settings

_OF_A_NODE = frozenset(
    {"local_cache", "storage", "memory", "direct_io", "file_checks_per_second", "on_bad_sample", "warnings"}
)
"""Keys that a node may set for itself: they do not change what is built."""


def check_same_config(launch: Communicator, config: Config) -> None:
    """Check that the configs of all ranks request the same index and run. Collective.

    Raises: ConfigError, on all ranks, that names the keys that differ, and the ranks.
    """
    # a folder may have another path on another node; that it is the same one is checked by a file in it
    skipped = _OF_A_NODE if is_remote(config.cache) else _OF_A_NODE | {"cache"}
    if launch.size > 1:
        check_same_settings(launch, config.model_dump(exclude=set(skipped)))

"""`Session`: a config or a cache, with the storage, ledger and run that belong to it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megablend.caches.base import CacheStore
from megablend.caches.find import find_store, is_remote
from megablend.config import Config, load_config
from megablend.config.runtime import Runtime
from megablend.config.storage_settings import load_storage_settings
from megablend.errors import CacheError, ConfigError, PlanError
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.lazy import cached_property
from megablend.operations.runs import check_split, open_run
from megablend.run.companion import load_companion
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import load_ledger
from megablend.run.open import open_ledger
from megablend.run.run import Run
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.object_options import ObjectOptions

ConfigLike = str | Path | Mapping[str, Any] | Config


class Session:
    """The context of a command or a call: a config, or a cache and the name of a run. Attributes
    such as the storage and the ledger are computed when they are first needed, and kept.

    Accessing an attribute may raise the errors of its computation: ConfigError if a config cannot
    be read, CacheError if a ledger is damaged.
    """

    def __init__(
        self,
        what: ConfigLike,
        *,
        cache: str | None = None,
        run: str | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Begin a session. Nothing is read yet.

        Args:
            what: a config (its path, or the same as a dict), or a cache (its folder or URL).
            cache: cache folder, instead of the config's.
            run: name of a run, instead of the config's.
            storage: the storage that reads files, instead of the config's storage.

        Raises: ConfigError if two caches are given.
        """
        path = Path(what) if isinstance(what, str | Path) else None
        self.what = what
        self.is_cache = is_remote(what) or (path is not None and path.is_dir())
        """Whether a cache is given: a URL, or an existing folder."""
        self.is_config = path is None or (path.exists() and not path.is_dir())
        """Whether a config is given: a dict, an existing file, or a pipe of the shell."""
        if self.is_cache and cache is not None:
            raise ConfigError(
                f"found two caches, {what} and {str(cache)!r} (`--cache`), expected one; leave out "
                "`--cache`, which can only be used with a config"
            )
        self._cache = cache
        self._run = run
        self._storage = storage and storage.for_reading()

    @cached_property
    def config(self) -> Config:
        """The config, checked."""
        return load_config(self.what, cache=self._cache)

    @cached_property
    def cache(self) -> CacheStore:
        """The cache, whether it exists or not. If a cache in an object store is given, it is
        accessed with the settings of MEGABLEND_STORAGE."""
        if isinstance(self.what, str | Path) and not self.is_config:
            return find_store(self.what, load_storage_settings() if is_remote(self.what) else None)
        return self.config.cache_store

    @cached_property
    def objects(self) -> ObjectOptions:
        """The options for access to object stores. If they include a mirror, it is used without the
        other nodes of its cluster."""
        return (self.config.storage if self.is_config else load_storage_settings()).alone()

    @cached_property
    def storage(self) -> Storage:
        """The storage for indexing and checking files. It uses the page cache, since the files are
        often read again soon."""
        return self._storage or make_storage(objects=self.objects)

    @cached_property
    def run_storage(self) -> Storage:
        """The storage for reading the files of the run, with the config's `direct_io`."""
        return self._storage or make_storage(
            direct=self.is_config and self.config.direct_io, objects=self.objects
        )

    @cached_property
    def run(self) -> str:
        """Name of the run. Raises: ConfigError if a cache is given without one."""
        if self._run is None and self.is_cache:
            raise ConfigError(
                f"{self.cache.location}: is a cache, which can hold several runs; give the name of a run as well "
                f"(`megablend runs list {shlex.quote(self.cache.location)}` lists them)"
            )
        return self.config.run if self._run is None else self._run

    @cached_property
    def ledger(self) -> Ledger | None:
        """The run's ledger at the time of the first access; None if the run was not built."""
        return load_ledger(self.cache, self.run)

    @cached_property
    def snapshots(self) -> list[str]:
        """Digests of the indexes that the cache has, the oldest first."""
        return list_snapshots(self.cache)

    def require_ledger(self) -> Ledger:
        """Return the ledger. Raises: CacheError if the run was not built."""
        if self.ledger is None:
            raise CacheError(
                f"{self.cache}: contains no run {self.run!r}; run `megablend build CONFIG` first, or choose one of the runs "
                f"that `megablend runs list {shlex.quote(self.cache.location)}` lists"
            )
        return self.ledger

    def open(self, split: str = "train") -> Run:
        """Open a split of the run as it was committed, even if the config has been edited since
        then.

        If a cache was given, or the name of a run that is not the config's, the run is opened by
        its ledger. Otherwise, valid and test are opened as loaders open them, since only the config
        determines their order. Train is opened by its ledger with the config's masks and extra
        columns, as far as they still apply.

        Raises: ConfigError, PlanError if the run does not have the split; CacheError if the run
            was not built, or its index is gone.
        """
        check_split(split)
        if self.is_cache or self.run != self.config.run:
            return self.open_by_ledger(split)
        if split != "train":
            return open_run(self.config, split, storage=self.run_storage)
        ledger = self.require_ledger()
        runtime = Runtime.of(self.config)
        companion = load_companion(self.cache, ledger, self.config.request_digest)
        if companion is None:  # the config was edited: its stages, which set the masks, may differ
            runtime = dataclasses.replace(runtime, stage_masks=())
            companion = load_companion(self.cache, ledger, ledger.request)
        try:
            return open_ledger(ledger, split, runtime, self.run_storage.for_reading(), companion)
        except PlanError:  # the config has extra columns that the run's index lacks
            return self.open_by_ledger(split)

    def open_by_ledger(self, split: str = "train") -> Run:
        """Open a split of the run without its config: files are read from their indexed paths, and
        there are no masks and no extra columns.

        Raises: CacheError if the run was not built; ConfigError if the split was not recorded.
        """
        ledger = self.require_ledger()
        runtime = Runtime(cache=self.cache, objects=self.objects)
        if not self.is_cache:
            runtime = dataclasses.replace(
                runtime, direct_io=self.config.direct_io, memory=self.config.memory
            )
        companion = load_companion(self.cache, ledger, ledger.request)
        return open_ledger(ledger, split, runtime, self.run_storage.for_reading(), companion)

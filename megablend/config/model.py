"""The validated config of a run: its settings, the settings of its stages, and the requirements
that follow for the index."""

from __future__ import annotations

from fractions import Fraction

from pydantic import BaseModel, PrivateAttr, model_validator

from megablend.caches.base import CacheStore
from megablend.caches.find import find_store
from megablend.config.checks import check_caps, check_settings, check_stages
from megablend.config.read_spec import ReadSpec, make_options
from megablend.config.settings import (
    LENGTHS,
    MAX_RUN_NAME,
    OLD_KEYS,
    RUN_NAME,
    SPLITS,
    Settings,
    Warnings,
)
from megablend.config.source import Source
from megablend.config.stages import MASKS, check_listed
from megablend.order.registry import find_order
from megablend.storage.location import find_root
from megablend.system.digest import digest_json

OUTSIDE_REQUEST = frozenset(
    (
        # Where the cache, the run and the files are
        "cache",
        "local_cache",
        "run",
        "path",
        # What a sample has in addition to its tokens, and what the tokens are checked against
        "extra_columns",
        "vocab_size",
        "eod_token",
        *MASKS,
        # How files are read, and what happens if that fails
        "memory",
        "file_checks_per_second",
        "direct_io",
        "storage",
        "warnings",
        "on_bad_sample",
        "on_unreadable",
        # How text is tokenised, which is done when a run is built on the tokens
        "tokenizer",
        "token_files",
        "on_bad_document",
        "max_bad",
        "max_document",
    )
)
"""Keys of a config, and of its sources and stages, that cannot change which tokens a sample has.
All other keys are part of `Config.request_digest`."""
TOKENS = "tokens"
"""Name of the token column in the files that `build` makes from text."""
__all__ = [
    "LENGTHS",
    "MAX_RUN_NAME",
    "OLD_KEYS",
    "RUN_NAME",
    "SPLITS",
    "Config",
    "Settings",
    "Warnings",
]


def _list_written(value: object) -> object:
    """Convert models to lists of their keys and validated values, sorted by key. Only keys that
    were set and can affect the order are included."""
    if isinstance(value, BaseModel):
        keys = sorted(value.model_fields_set - OUTSIDE_REQUEST)
        return [[key, _list_written(getattr(value, key))] for key in keys]
    if isinstance(value, dict):
        return list(map(_list_written, sorted(value.items())))
    if isinstance(value, list | tuple):
        return list(map(_list_written, value))
    return str(value) if isinstance(value, Fraction) else value


class Config(Settings):
    """A config as returned by `load_config`. In contrast to `Settings`, it checks that the keys are
    consistent, and provides derived values such as the settings of each stage."""

    _snapshot: int = PrivateAttr(0)
    """The value of the property `snapshot`."""
    _withdrawn: frozenset[str] = PrivateAttr(frozenset())
    """The sources that any stage withdraws; only set in the settings of a stage."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        """Check that the keys are consistent; see `megablend.config.checks`."""
        lengths = check_settings(self)
        stage_configs: tuple[Config, ...] = ()
        if self.stages:
            names = [source.name for source in self.sources["train"]]
            check_listed(self.stages, names, lengths)
            stage_configs = self.stage_configs
            check_stages(self.stages, stage_configs, ends_with_run=bool(lengths))
        if self.on_exhausted == "redistribute":
            check_caps([self, *stage_configs])
        return self

    @property
    def stage_configs(self) -> tuple[Config, ...]:
        """The settings of each stage of train, each as a config without stages and without a
        length. If the config lists no stages, this is the config itself. They are computed on each
        access, which is slow with many sources."""
        if not self.stages:
            return (self,)
        train = self.sources["train"]
        configs = list[Config]()
        for stage, settings in zip(self.stages, self.stage_configs_ignoring_sources, strict=True):
            if stage.sources or stage.withdraw:
                train = tuple(map(stage.change_source, train))
            update = {"sources": self.sources | {"train": train}}
            configs.append(settings.model_copy(update=update))
        return tuple(configs)

    @property
    def stage_configs_ignoring_sources(self) -> tuple[Config, ...]:
        """Like `stage_configs`, but each config has the sources of the top level, without the
        changes of stages. This is much faster if many sources change."""
        if not self.stages:
            return (self,)
        current = self.model_copy(update={"stages": ()} | dict.fromkeys(LENGTHS))
        current._withdrawn = frozenset(name for stage in self.stages for name in stage.withdraw)
        configs = list[Config]()
        for stage in self.stages:
            current = current.model_copy(update=stage.find_changes())
            current._snapshot += stage.changes_index
            configs.append(current)
        return tuple(configs)

    @property
    def request_digest(self) -> str:
        """A digest of the keys that the config sets and that can affect the order of
        samples. Defaults are left out, so that a later release with other defaults returns the same
        digest for the same config."""
        return digest_json(_list_written(self), as_stored=True)

    @property
    def cache_store(self) -> CacheStore:
        """The store of the cache."""
        return find_store(self.cache, self.storage, self.local_cache)

    @property
    def roots(self) -> dict[str, str]:
        """The folders of the sources' token files, by the sources' names in the index."""
        return {name: find_root(source.token_paths) for name, source in self.all_sources.items()}

    @property
    def withdrawn(self) -> frozenset[str]:
        """The sources that a stage withdraws, by their names in the index."""
        prefix = "train/" if self.listed_by_split else ""
        named = self._withdrawn.union(*(stage.withdraw for stage in self.stages))
        return frozenset(prefix + name for name in named)

    @property
    def snapshot(self) -> int:
        """The number, counted from 0 within the run, of the index snapshot that this stage (or the
        top level) reads."""
        return self._snapshot

    @property
    def num_snapshots(self) -> int:
        """The number of index snapshots that the stages read."""
        return self._snapshot + 1 + sum(stage.changes_index for stage in self.stages)

    def needs_documents(self, source: Source, snapshot: int | None = None) -> bool:
        """Return whether the index has to contain the source's document boundaries.

        Args:
            snapshot: the number, within the run, of the snapshot in question; None for all.
        """
        return (
            source.append_eod is not None
            or source.text is not None  # `find` reports where a line is read
            or source.documents is not None
            or (self.split is not None and max(self.split) != 1)
            or bool(source.extra_columns)
            or (
                self.needs_lengths if snapshot is None else self.needs_lengths_of_snapshot(snapshot)
            )
        )

    def read_spec(self, source: Source) -> ReadSpec:
        """Return how the source's files are indexed and read, as a ReadSpec."""
        is_text = source.text is not None
        return ReadSpec(
            format="parquet" if is_text else source.format,
            column=TOKENS if is_text else source.column,
            count_documents=self.needs_documents(source),
            block_bytes=self.block_bytes,
            options=make_options(source.options),
        )

    @property
    def sources_needing_lengths(self) -> list[str]:
        """The sources for which the length of every document is required, by their names in the
        index."""
        if not self.needs_lengths:
            return []
        return [
            name for split in SPLITS if self.is_blended(split) for name in self.sources_of(split)
        ]

    @property
    def needs_lengths(self) -> bool:
        """Whether the order of the top level, or of a stage, arranges single documents, which
        requires the length of each document."""
        orders = [self.order, *(stage.order or self.order for stage in self.stages)]
        return any(map(_arranges_documents, orders))

    def needs_lengths_of_snapshot(self, snapshot: int) -> bool:
        """Return whether an order arranges single documents of one snapshot of the index.

        Args:
            snapshot: the number of the snapshot within the run.
        """
        number = self._snapshot
        order = self.order
        is_by_document = not self.stages and number == snapshot and self.top_level_needs_lengths
        # The configs of the stages are not computed, since that is slow
        for stage in self.stages:
            number += stage.changes_index
            order = stage.order or order
            is_by_document |= number == snapshot and _arranges_documents(order)
        if is_by_document:
            return True
        # The order of the top level applies to valid and test, which may read any snapshot, and to
        # the first snapshot as long as the run has no stages.
        is_read = snapshot == 0 or any(map(self.is_blended, SPLITS[1:]))
        return is_read and self.top_level_needs_lengths

    @property
    def top_level_needs_lengths(self) -> bool:
        """Whether the order of the top level arranges single documents."""
        return _arranges_documents(self.order)


def _arranges_documents(order: str) -> bool:
    """Return whether an order shuffles single documents rather than whole blocks."""
    return find_order(order).unit == "document"

"""The settings of a run that do not affect its order: where it is stored and read from, and what
the dict of a sample contains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from megablend.caches.base import CacheStore
from megablend.config.model import Config
from megablend.config.settings import Masks, Settings
from megablend.storage.object_options import ObjectOptions

_DEFAULTS = {name: field.default for name, field in Settings.model_fields.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The settings that are taken from a config when a committed run is opened. A run that is
    opened without a config has the defaults."""

    cache: CacheStore
    objects: ObjectOptions
    """The settings for access to object stores."""
    memory: int = _DEFAULTS["memory"]
    on_bad_sample: str = _DEFAULTS["on_bad_sample"]
    file_checks_per_second: float = _DEFAULTS["file_checks_per_second"]
    direct_io: bool = _DEFAULTS["direct_io"]
    masks: Masks = field(default_factory=Masks)
    """The masks of the top level, which are also those of valid and test."""
    stage_masks: tuple[Masks, ...] = ()
    """The masks of each stage that the config lists; empty if no stage changes samples."""
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Patterns of the token files of each source, by name in the index. The files of a source that
    is not listed are in the folder that the last build recorded."""
    extra_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the extra columns of each source that has any, by name in the index."""

    @classmethod
    def of(cls, config: Config) -> Runtime:
        """Return the settings of a config."""
        stage_masks: tuple[Masks, ...] = ()
        if any(map(attrgetter("changes_samples"), config.stages)):
            stage_masks = tuple(stage.masks for stage in config.stage_configs_ignoring_sources)
        paths = dict[str, tuple[str, ...]]()
        extra_columns = dict[str, tuple[str, ...]]()
        for name, source in config.all_sources.items():
            paths[name] = source.token_paths
            if source.extra_columns:
                extra_columns[name] = source.extra_columns
        return cls(
            cache=config.cache_store,
            objects=config.storage,
            memory=config.memory,
            on_bad_sample=config.on_bad_sample,
            file_checks_per_second=config.file_checks_per_second,
            direct_io=config.direct_io,
            masks=config.masks,
            stage_masks=stage_masks,
            paths=paths,
            extra_columns=extra_columns,
        )

"""The sources that a config requests to be indexed."""

from __future__ import annotations

from megablend.config import Config
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage


def list_specs(config: Config, storage: Storage | None = None) -> list[SourceSpec]:
    """Return the sources of a config that must be indexed, with their extra columns. These are all
    sources that are not withdrawn.

    Args:
        storage: looks up the token files of text sources. Without it, text sources have the paths
            of their text.

    Raises: the same errors as `find_tokenised`; CacheError if some text is not tokenised.
    """
    withdrawn = config.withdrawn
    specs = [
        SourceSpec(
            name=name,
            patterns=source.path,
            read=config.read_spec(source),
            extra_columns=source.extra_columns,
            skip_unreadable=config.on_unreadable == "skip",
            place=source.place,
        )
        for name, source in config.all_sources.items()
        if name not in withdrawn
    ]
    if storage is None or not has_text(config):
        return specs
    from megablend.text.source import find_tokenised  # imported only if it is needed

    return find_tokenised(config, specs, storage)


def has_text(config: Config) -> bool:
    """Return whether one of the config's sources is text."""
    return any(source.text is not None for source in config.all_sources.values())

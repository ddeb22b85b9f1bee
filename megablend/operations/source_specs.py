"""What a config requests to be indexed."""

from __future__ import annotations

from megablend.config import Config
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage


def list_specs(checked: Config, storage: Storage | None = None) -> list[SourceSpec]:
    """The sources that a config requests to be indexed, with their extra columns:
    all that are not withdrawn.

    Args:
        storage: of text sources, the token files are listed. Without it, they have the paths of
            the text.

    Raises: CacheError if some text is not tokenised; as `find_tokenised`.
    """
    specs = [
        SourceSpec(
            name=name,
            patterns=source.path,
            read=checked.read_spec(source),
            extra_columns=source.extra_columns,
            skip_unreadable=checked.on_unreadable == "skip",
            place=source.place,
        )
        for name, source in checked.all_sources.items()
        if name not in checked.withdrawn
    ]
    if storage is None or not has_text(checked):
        return specs
    from megablend.text.source import find_tokenised  # few need it

    return find_tokenised(checked, specs, storage)


def has_text(checked: Config) -> bool:
    """Whether a source is text."""
    return any(source.text is not None for source in checked.all_sources.values())

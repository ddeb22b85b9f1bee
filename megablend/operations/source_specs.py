"""What a config requests to be indexed."""

from __future__ import annotations

from megablend.config import Config
from megablend.index.build.source_spec import SourceSpec


def list_specs(checked: Config) -> list[SourceSpec]:
    """The sources that a config requests to be indexed, with their extra columns:
    all that are not withdrawn."""
    return [
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

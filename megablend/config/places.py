"""Where a key is in a config file, and how messages write it."""

from __future__ import annotations

from collections.abc import Sequence

from megablend.config.limited_yaml import Lines


class Places:
    """Line numbers of a config's keys.

    Args:
        name: of the file, or what stands for it.
        lines: None for a config that was not read from a file.
    """

    def __init__(self, name: str, lines: Lines) -> None:
        self.name, self._lines = name, lines

    def line(self, location: Sequence[str | int]) -> str:
        """`file:line` of the deepest part of a location that exists in the file."""
        lines, line = self._lines, None
        for part in location:
            if isinstance(lines, dict):
                found = lines.get(str(part))
                if found is None:
                    continue  # a level that validation inserted (train), or a missing key
                line, lines = found
            elif isinstance(lines, list) and isinstance(part, int) and part < len(lines):
                line, lines = lines[part]
        return self.name if line is None else f"{self.name}:{line + 1}"

    def split(self, name: str) -> list[str]:
        """The location part for a split's sources, if the config lists sources by split."""
        top = self._lines if isinstance(self._lines, dict) else {}
        return [name] if isinstance(top.get("sources", (0, None))[1], dict) else []


def join_keys(location: Sequence[str | int]) -> str:
    """A location as messages write it: `sources[0].path`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")

"""Reading a checkpoint's state from a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megablend.errors import ConfigError
from megablend.system.failures import translating
from megablend.system.limited_json import parse_json


def read_state(path: str | Path) -> dict[str, Any]:
    """A state saved as JSON, unchecked. Raises: ConfigError where the file is not one;
    ResourceError where it cannot be read."""
    with translating(str(path)):
        text = Path(path).read_text(encoding="utf-8")
    try:
        record = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{path}: expected a state saved as JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{path}: found {type(record).__name__}, expected a state saved as JSON (of `loader.state_dict()`)"
        )
    return record

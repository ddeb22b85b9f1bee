"""Explain errors in a config, each in a message of one line: the file, line and key, what was
found, and what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megablend.config.limited_yaml import Lines
from megablend.config.model import Config, Warnings
from megablend.config.other_names import explain_unknown
from megablend.config.source import Model, Source
from megablend.config.stages import StageSettings, StageSource
from megablend.errors import did_you_mean


@dataclass(frozen=True)
class Places:
    """The line numbers of a config's keys, for messages."""

    name: str
    """The file name that messages show, or `config` for a dict."""
    lines: Lines
    """The line numbers of the file's keys; None for a config that was not read from a file."""

    def describe(self, location: Sequence[str | int]) -> str:
        """Return the prefix of messages about a location: `file:line: keys`. The line is that of
        the innermost key of the location that exists in the file."""
        lines = self.lines
        line = None
        for part in location:
            if isinstance(lines, dict):
                entry = lines.get(str(part))
                if entry is None:
                    continue  # a level that validation inserted (train), or a missing key
                line, lines = entry
            elif isinstance(lines, list) and isinstance(part, int) and part < len(lines):
                line, lines = lines[part]
        file = self.name if line is None else f"{self.name}:{line + 1}"
        return f"{file}: {join_keys(location)}" if location else file

    def split(self, name: str) -> list[str]:
        """Return the part of a location that names a split: [name], or an empty list if the config
        does not list its sources by split."""
        top = self.lines if isinstance(self.lines, dict) else {}
        return [name] if isinstance(top.get("sources", (0, None))[1], dict) else []


class Place(NamedTuple):
    """A place in a config. Its text, which only messages need, is made when it is formatted."""

    places: Places
    location: tuple[str | int, ...]

    def __str__(self) -> str:
        return self.places.describe(self.location)


def join_keys(location: Sequence[str | int]) -> str:
    """Return a location as text for messages, such as `sources[0].path`."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in location
    ).lstrip(".")


_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "dict_type": "keys with values",
    "string_type": "text",
    "string_too_short": "text",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "other characters",
    "tuple_type": "a list",
}
"""Descriptions of the expected value, for values of the wrong type, by pydantic's name of the
error."""
_KEYS: dict[type[Model], str] = {
    Config: "cache, sequence_length and sources",
    Source: "name, path and weight",
    StageSettings: "samples, lanes and sources",
    StageSource: "weight and max_epochs",
    Warnings: "max_epochs and min_source_samples",
}
"""Examples of each model's keys, for messages about a value that should be a mapping."""
_PATTERNS = {
    "run": "at most 100 letters, digits, `.`, `_` and `-`, the first a letter or digit",
    "name": "a name without spaces and slashes",
}
"""Descriptions of the expected value, for keys whose text must match a pattern."""
MAX_VALUE = 80
"""Maximum number of characters of an invalid value that a message shows."""
_PLACE = re.compile(r"(\w+)(?:(?:\.(\w+))?\[(\d+)\])?: ")
"""Matches the prefix of messages from validators of the whole config. It is a key, a source of a
split, or a stage."""


def explain_errors(error: ValidationError, places: Places) -> Iterator[str]:
    """Yield a one-line message for each validation error. It contains the place, and the key as it
    is spelled in the config."""
    for problem in error.errors():
        location = [part for part in problem["loc"] if part not in ("train", "[key]")]
        message = problem["msg"].removeprefix("Value error, ")
        if not location:
            location, message = _split_message(message, places)
        yield f"{places.describe(location)}: {_explain(problem, location, message)}"


def _split_message(message: str, places: Places) -> tuple[list[str | int], str]:
    """Split a message from a validator of the whole config into its prefix, parsed as a location,
    and the rest; see _PLACE. The location is empty if the message has no such prefix."""
    start = _PLACE.match(message)
    if start is None:
        return [], message
    key, split, number = start.groups()
    location: list[str | int] = [key]
    if split is not None:
        location += places.split(split)
    if number is not None:
        location.append(int(number))
    return location, message[start.end() :]


def _explain(problem: ErrorDetails, location: Sequence[str | int], message: str) -> str:
    """Return the message about a validation error, without its place.

    Args:
        message: the message of pydantic or of a validator.
    """
    try:
        value = repr(problem["input"])
    except (RecursionError, ValueError):  # deep lists; Python writes no numbers of 4,301 digits
        value = f"a {type(problem['input']).__name__} that is too long to show"
    if len(value) > MAX_VALUE:
        value = f"{value[:MAX_VALUE]}..."
    error_type = problem["type"]
    if error_type == "value_error":  # from one of our validators
        if list(location) == ["tokens"] and "/" in str(problem["input"]):
            return f"{message}; the folder for token files is `token_files`"
        return message
    if error_type == "extra_forbidden":
        hint = explain_unknown(str(location[-1]), _known_keys(location), list(Source.model_fields))
        return f"unknown key; {hint}"
    if error_type == "missing":
        return "missing; it is required"
    if error_type == "literal_error":
        expected = problem["ctx"]["expected"]
        choices = expected.replace("'", " ").split()
        hint = did_you_mean(str(problem["input"]), choices, before="; ")
        return f"found {value}, expected {expected}{hint}"
    if error_type == "model_type":
        return f"found {value}, expected keys such as {_KEYS[_find_model(location)]}"
    if error_type in _EXPECTED:
        expected = _EXPECTED[error_type].format(**problem.get("ctx", {}))
        return f"found {value}, expected {_PATTERNS.get(str(location[-1]), expected)}"
    return f"found {value}: {message[0].lower()}{message[1:]}"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """Return the valid keys at the location of an unknown key."""
    fields = _find_model(location[:-1]).model_fields
    return [field.alias or name for name, field in fields.items()]


def _find_model(location: Sequence[str | int]) -> type[Model]:
    """Return the model to which the keys at a location belong."""
    if not location:
        return Config
    if location[0] == "stages":
        return StageSettings if len(location) == 2 else StageSource
    return Warnings if location[0] == "warnings" else Source

"""The base class of the settings that a user writes under `storage`, and the types of their
values."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from megablend.errors import did_you_mean
from megablend.storage.setting_values import (
    parse_local_path,
    parse_number,
    parse_size,
    parse_text,
    parse_whole,
)


class Settings(BaseModel):
    """The base class of settings by name: frozen, hashable, and without unknown names. A setting
    that is None by default may be written as None."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
    expected: ClassVar[str]
    """A description of valid settings, for the error message about an invalid value."""


S = TypeVar("S", bound=Settings)


def read_settings(kind: type[S], given: object) -> S:
    """Check settings that a user wrote. Raises: ValueError, which names the setting."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
    name = "".join(map(str, problem["loc"]))
    match problem["type"]:
        case "model_type":
            raise ValueError(f"found {given!r}, expected {kind.expected}")
        case "missing":
            raise ValueError(f"has no `{name}`; set it")
        case "extra_forbidden":
            hint = did_you_mean(name, kind.model_fields, before="; ")
            raise ValueError(f"{name}: unknown setting{hint}")
        case "bool_type":
            raise ValueError(f"{name}: found {problem['input']!r}, expected true or false")
    message = problem["msg"].removeprefix("Value error, ")
    raise ValueError(f"{name}: {message}" if name else message)


Text = Annotated[str, BeforeValidator(parse_text)]
LocalPath = Annotated[str, BeforeValidator(parse_local_path)]
Size = Annotated[int, BeforeValidator(parse_size)]
Seconds = Annotated[float, BeforeValidator(partial(parse_number, unit="seconds"))]
Rate = Annotated[int, BeforeValidator(partial(parse_whole, unit="bytes per second"))]

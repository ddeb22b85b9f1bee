"""Loading a config file or a dict as a validated `Config`.

Each problem is reported in one line: file, line, key, what was found, what was expected, the closest valid spelling. Relative
paths are relative to the config file (for a dict: to the working directory).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megablend.caches.find import check_location, is_remote
from megablend.config.limited_yaml import compose_and_load, read_limited
from megablend.config.model import OLD_KEYS, Config
from megablend.config.other_names import explain_unknown
from megablend.config.source import Source
from megablend.config.stages import StageSettings, StageSource
from megablend.errors import ConfigError
from megablend.storage.location import check_schemes, find_scheme, make_absolute
from megablend.storage.objects.urls import LIST_ENDING, expand_location, is_web, split_query
from megablend.storage.registry import explain_scheme, find_storage
from megablend.system.failures import cause_of, remedy_of


def load_config(config: str | Path | Mapping[str, Any] | Config, *, cache: str | None = None) -> Config:
    """Read and validate a config.

    Args:
        config: path of a YAML or JSON file, or the same as a dict.
        cache: replaces the config's `cache`; relative to the working directory.

    Returns: the config with all paths absolute.
    Raises: ConfigError, with one line for each problem.
    """
    if cache is not None:
        cache = _cache_location(str(cache), Path.cwd(), "--cache")
    if isinstance(config, Config):
        return config if cache is None else config.model_copy(update={"cache": cache})
    if isinstance(config, Mapping):
        data, place, base = dict(config), _Places("config", None), Path.cwd()
    elif not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"found {type(config).__name__}, expected a config: a path of a YAML or JSON file, or its keys as a dict"
        )
    else:
        data, place = _read(Path(config))
        base = Path(config).absolute().parent
    if cache is not None:
        data["cache"] = cache
    try:
        checked = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaints(error, place, data))) from None
    return _absolute(checked, base, place)


def _read(path: Path) -> tuple[dict[str, Any], _Places]:
    try:
        text = read_limited(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config: {cause_of(error)}: {remedy_of(error.errno)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: cannot read the config: {error}") from None
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # YAML allows no tabs between tokens, and JSON strings contain none
    try:
        node, data = compose_and_load(text)  # JSON is YAML
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        language = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{where}: not valid {language}: {getattr(error, 'problem', None) or error}") from None
    places = _Places(str(path), node)
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise ConfigError(f"{path}: found {found}, expected keys such as cache, sequence_length, sources")
    for key, line in places.duplicates():
        raise ConfigError(f"{path}:{line}: {key}: duplicate key; keep one")
    return data, places


_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "model_type": "keys such as name, path and weight",
    "dict_type": "keys with values",
    "string_type": "text",
    "string_too_short": "text",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "other characters",
    "tuple_type": "a list",
}
"""What was expected instead of a value of the wrong type, by pydantic's name for the error."""
_PATTERNS = {
    "run": "at most 100 letters, digits, `.`, `_` and `-`, the first a letter or digit",
    "name": "a name without spaces and slashes",
}
"""The same for texts that have to match a pattern, by key."""

_PLACE = re.compile(r"(\w+)(?:(?:\.(\w+))?\[(\d+)\])?: ")
"""Prefix of messages from validators of the whole config: a key, a source of a split, or a stage."""


class _Places:
    """Line numbers of a config's keys."""

    def __init__(self, name: str, node: yaml.Node | None) -> None:
        self.name = name
        self.node = node

    def line(self, location: Sequence[str | int]) -> str:
        """`file:line` of the deepest part of a location that exists in the file."""
        node, line = self.node, None
        for part in location:
            if isinstance(node, yaml.MappingNode):
                found = next(((k, v) for k, v in node.value if k.value == str(part)), None)
                if found is None:
                    continue  # a level that validation inserted (train), or a missing key
                line, node = found[0].start_mark.line, found[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
        return self.name if line is None else f"{self.name}:{line + 1}"

    def split(self, name: str) -> list[str]:
        """The location part for a split's sources, if the config lists sources by split."""
        top = self.node.value if isinstance(self.node, yaml.MappingNode) else []
        return [name] if any(k.value == "sources" and isinstance(v, yaml.MappingNode) for k, v in top) else []

    def duplicates(self) -> Iterator[tuple[str, int]]:
        """Duplicate keys in a mapping, with their lines."""
        stack, visited = [self.node], set[int]()
        while stack:
            node = stack.pop()
            if id(node) in visited:  # an alias, perhaps to a node that contains it
                continue
            visited.add(id(node))
            if isinstance(node, yaml.MappingNode):
                seen = set()
                for key, value in node.value:
                    if key.value in seen:
                        yield str(key.value), key.start_mark.line + 1
                    seen.add(key.value)
                    stack.append(value)
            elif isinstance(node, yaml.SequenceNode):
                stack.extend(node.value)


def _complaints(error: ValidationError, places: _Places, data: Mapping[str, Any]) -> Iterator[str]:
    """One line for each problem, with its place and key as the config spells it."""
    written = {new: old for old, new in OLD_KEYS.items() if old in data}
    for problem in error.errors():
        location = [part for part in problem["loc"] if part not in ("train", "[key]")]
        location[:1] = [written.get(str(part), part) for part in location[:1]]
        message = problem["msg"].removeprefix("Value error, ")
        if not location and (start := _PLACE.match(message)):
            location, message = [start[1]], message[start.end() :]
            if start[2] is not None:
                location += places.split(start[2])
            if start[3] is not None:
                location.append(int(start[3]))
        key = _key(location)
        if problem["type"] == "extra_forbidden":
            hint = explain_unknown(str(location[-1]), _known_keys(location), list(Source.model_fields))
            message = f"unknown key; {hint}"
        elif problem["type"] == "missing":
            message = "missing; it is required"
        elif problem["type"] == "literal_error":
            expected = problem["ctx"]["expected"]
            near = difflib.get_close_matches(str(problem["input"]), expected.replace("'", " ").split(), n=1)
            message = f"found {problem['input']!r}, expected {expected}"
            message += f"; did you mean {near[0]!r}?" if near else ""
        elif problem["type"] in _EXPECTED:
            expected = _EXPECTED[problem["type"]].format(**problem.get("ctx", {}))
            message = f"found {problem['input']!r}, expected {_PATTERNS.get(str(location[-1]), expected)}"
        elif problem["type"] != "value_error":
            message = f"found {problem['input']!r}: {message[0].lower()}{message[1:]}"
        yield f"{places.line(location)}: {key}: {message}" if key else f"{places.name}: {message}"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """The keys that may stand where an unknown one was found."""
    if location[0] == "stages":
        fields = StageSettings.model_fields if len(location) == 3 else StageSource.model_fields
    else:
        fields = Source.model_fields if len(location) > 1 else Config.model_fields
    return [field.alias or name for name, field in fields.items()]


def _absolute(config: Config, base: Path, places: _Places) -> Config:
    """Make paths absolute, refuse unsupported locations, and record in each source where the config defines it."""

    def vocab_size(given: int | str | None, place: str) -> int | str | None:
        return _absolute_path(given, base, f"{place}.vocab_size") if isinstance(given, str) else given

    urls: dict[str, str] = {}

    def placed(source: Source, *location: str | int) -> Source:
        place = f"{places.line(location)}: {_key(location)}"
        listed = (each for path in source.path for each in _expand_urls(path, base, f"{place}.path"))
        paths = tuple(_take_query(_absolute_location(path, base, f"{place}.path"), urls) for path in listed)
        _check_one_storage(paths, f"{place}.path")
        found = source.model_copy(update={"path": paths, "vocab_size": vocab_size(source.vocab_size, place)})
        found._place = place
        return found

    sources = {}
    for split, listed in config.sources.items():
        above = ("sources", split) if config.listed_by_split else ("sources",)
        sources[split] = tuple(placed(source, *above, i) for i, source in enumerate(listed))
    cache = _cache_location(config.cache, base, f"{places.line(['cache'])}: cache")
    local_cache = config.local_cache
    if local_cache is not None:
        local_cache = _absolute_path(local_cache, base, f"{places.line(['local_cache'])}: local_cache")
    size = vocab_size(config.vocab_size, places.line(["vocab_size"]))
    objects = dataclasses.replace(config.storage, urls=tuple(urls.items())) if urls else config.storage
    update = {
        "cache": cache,
        "local_cache": local_cache,
        "sources": sources,
        "vocab_size": size,
        "storage": objects,
    }
    return config.model_copy(update=update)


def _expand_urls(location: str, base: Path, place: str) -> list[str]:
    """The URLs that a location expands to (a URL with braces, or a text file of URLs); other locations unchanged."""
    is_list = location.endswith(LIST_ENDING) and not find_scheme(location)
    try:
        return expand_location(_absolute_path(location, base, place) if is_list else location)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _take_query(location: str, urls: dict[str, str]) -> str:
    """The location without a URL's query, which is recorded in `urls` for use in requests."""
    if not is_web(location):
        return location
    plain, query = split_query(location)
    if urls.setdefault(plain, query) != query:
        raise ConfigError(f"{plain}: given with two different queries; keep one")
    return plain


def _absolute_location(location: str, base: Path, place: str) -> str:
    """The location of data: unchanged if a storage handles its scheme, otherwise an absolute path."""
    scheme = find_scheme(location)
    if scheme and scheme != "file" and "\0" not in location:
        if find_storage(scheme) is None:
            raise ConfigError(f"{place}: found {location!r}; {explain_scheme(scheme)}")
        return location
    return _absolute_path(location, base, place)


def _cache_location(location: str, base: Path, place: str) -> str:
    """The location of a cache: the URL of a prefix of an object store as it is, otherwise an absolute path."""
    if not is_remote(location) or location.startswith("file://") or "\0" in location:
        return _absolute_path(location, base, place)
    try:
        check_location(location)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return location.rstrip("/")


def _check_one_storage(locations: Sequence[str], place: str) -> None:
    try:
        check_schemes(locations)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def _absolute_path(path: str, base: Path, place: str) -> str:
    if "\0" in path:
        raise ConfigError(f"{place}: found {path!r}; paths cannot contain NUL")
    if not path:
        raise ConfigError(f"{place}: found '', expected a path; use `.` for the current folder")
    if path.startswith("file://"):
        raise ConfigError(f"{place}: found {path!r}; write it as a plain path: `{_plain_path(path)}`")
    if "://" in path:
        raise ConfigError(f"{place}: found {path!r}; expected a path on a local or mounted disk")
    return make_absolute(os.path.expanduser(path), str(base))  # noqa: PTH111  (a Path loses a leading `./`, and so expands `./~x`)


def _plain_path(url: str) -> str:
    """The path of a file:// URL. The host is dropped; percent signs are literal, as in other paths."""
    rest = url.removeprefix("file://")
    return rest if rest.startswith("/") else f"/{rest.partition('/')[2]}"


def _key(location: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")

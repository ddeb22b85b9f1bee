"""Load a config file, or a dict, as a validated `Config`.

Each problem is reported in one line: file, line, key, what was found, what was
expected, the closest valid spelling. Relative paths are relative to the config file
(for a dict: to the working directory).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megablend.config.absolute import make_cache_absolute, make_paths_absolute
from megablend.config.complaints import Places, explain_errors
from megablend.config.limited_yaml import parse_document, read_limited
from megablend.config.model import Config
from megablend.config.tokenizer_file import with_eods
from megablend.errors import ConfigError
from megablend.system.failures import cause_of, remedy_of

MAX_PROBLEMS = 20
"""Maximum number of problems that an error lists."""
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|.)")
"""Matches an escape sequence in a JSON string, or two escape sequences that form one character (a
UTF-16 surrogate pair), which YAML does not support."""


def load_config(
    config: str | Path | Mapping[str, Any] | Config, *, cache: str | None = None
) -> Config:
    """Read and validate a config.

    Args:
        config: path of a YAML or JSON file, or the same as a dict.
        cache: replaces the config's `cache`; relative to the working directory.

    Returns: the config with all paths absolute.
    Raises: ConfigError, with one line for each problem.
    """
    if cache is not None:
        cache = make_cache_absolute(str(cache), Path.cwd(), "--cache")
    if isinstance(config, Config):
        return config if cache is None else config.model_copy(update={"cache": cache})
    if isinstance(config, Mapping):
        data = dict(config)
        places = Places("config", None)
        base = Path.cwd()
    elif not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"found {type(config).__name__}, expected a config: the path of a YAML or JSON file, or a dict with its "
            "keys"
        )
    else:
        data, places = read_config_file(Path(config))
        base = Path(config).absolute().parent
    if cache is not None:
        data["cache"] = cache
    try:
        with_ids = with_eods(data, base, places) if "tokenizer" in data else data
        checked = Config.model_validate(with_ids)
    except ValidationError as error:
        raise ConfigError(_join_problems(error, places)) from None
    return make_paths_absolute(checked, base, places)


def _join_problems(error: ValidationError, places: Places) -> str:
    """Return a line for each of the first errors in a config, and a line with the number of the
    others."""
    lines = list(islice(explain_errors(error, places), MAX_PROBLEMS))
    more = error.error_count() - len(lines)
    if more > 0:
        lines.append(f"{places.name}: {more:,} more problem{'s' * (more > 1)}; fix these first")
    return "\n".join(lines)


def _join_surrogates(escape: re.Match[str]) -> str:
    """Return an escape sequence in a form that YAML supports: a surrogate pair is replaced by the
    character that it encodes."""
    text = escape.group()
    return str(json.loads(f'"{text}"')) if len(text) > 2 else text


def read_config_file(path: Path) -> tuple[dict[str, Any], Places]:
    """Read a YAML or JSON file, without validating its values.

    Returns: the keys with their values, and the line number of each key for messages.
    Raises: ConfigError for a file that cannot be read, is not a mapping or has duplicate keys.
    """
    try:
        text = read_limited(path)
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder; give the path of a YAML or JSON file") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the config: {cause_of(error)}: {remedy_of(error.errno)}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: cannot read the config: {error}") from None
    if path.suffix == ".json":
        # YAML allows no tabs between tokens, and JSON strings contain none
        text = text.replace("\t", " ")
        text = _ESCAPE.sub(_join_surrogates, text)
    try:
        document = parse_document(text)  # JSON is YAML
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        language = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(
            f"{where}: not valid {language}: {getattr(error, 'problem', None) or error}"
        ) from None
    data = document.data
    if not isinstance(data, dict):
        description = "nothing" if data is None else type(data).__name__
        # Some commands read a config twice
        remedy = "" if path.is_file() else "; a pipe can be read only once: write it to a file"
        raise ConfigError(
            f"{path}: found {description}, expected keys such as cache, sequence_length, sources{remedy}"
        )
    if document.duplicates:
        key, line = document.duplicates[0]
        raise ConfigError(f"{path}:{line}: {key}: duplicate key; keep one")
    return data, Places(str(path), document.lines)

"""The tokenizer's part of a description: its `unique_identifiers`,
given as JSON or by the tokenizer itself.

They depend on how the training script builds the tokenizer (by class path, or the legacy class with
all its options), and are exact only from there: an earlier run's description.txt has them.
Megatron-core, if it is installed, can build the tokenizers of the former kind.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megablend.errors import ConfigError
from megablend.system.limited_json import parse_json


def identifiers_of(tokenizer: Any) -> dict[str, Any]:
    """The identifiers of a tokenizer object, as they are after json.dumps and json.loads.
    Raises: ConfigError if it has none."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(tokenizer.unique_identifiers))
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"the tokenizer {type(tokenizer).__name__} has no unique_identifiers that JSON can hold ({error}); "
            "Megatron names its cache by them"
        ) from None
    return found


def read_identifiers(given: str) -> dict[str, Any]:
    """Identifiers from inline JSON, from a JSON file,
    or from the description.txt of a dataset or of a blend.

    Raises: ConfigError if there are none.
    """
    inline = given.lstrip().startswith("{")
    place = "the tokenizer's identifiers" if inline else given
    try:
        found = parse_json(given if inline else Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{place}: expected JSON, or a JSON file such as an earlier run's description.txt "
            f"({error})"
        ) from None
    if isinstance(found, dict) and found.get("datasets"):
        found = found["datasets"][0]
    if isinstance(found, dict) and "dataset_path" in found:
        found = found.get("tokenizer")
    if not isinstance(found, dict) or "class" not in found:
        raise ConfigError(
            f"{place}: found {found!r}; expected an object with a `class`, as in an earlier run's description.txt"
        )
    return found


def build_identifiers(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The identifiers of the tokenizer that the installed megatron-core builds
    from Megatron's flags.

    Args:
        flags: all of Megatron's tokenizer flags, by the names of their attributes, words as tuples;
            the same as in training.

    Raises: ConfigError if megatron-core is not installed, or cannot build it.
    """
    given = "give --tokenizer-identifiers, such as an earlier run's description.txt"
    if flags.get("legacy_tokenizer"):
        raise ConfigError(
            f"--legacy-tokenizer: megatron-core does not build such tokenizers (the training script does); {given}"
        )
    try:
        with warnings.catch_warnings():
            # Of the GPU libraries that megatron-core misses, as it is imported
            warnings.simplefilter("ignore")
            from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer-type needs megatron-core ({error}); install it, or {given}"
        ) from None
    try:
        tokenizer = build_tokenizer(
            SimpleNamespace(**{name: _as_argparse(value) for name, value in flags.items()})
        )
    except Exception as error:  # the tokenizer's library may raise anything
        raise ConfigError(
            f"--tokenizer-type {flags['tokenizer_type']}: megatron-core cannot build it ({type(error).__name__}: "
            f"{error}); check its flags, or {given}"
        ) from error
    return identifiers_of(tokenizer)


def _as_argparse(value: Any) -> Any:
    """Words as argparse gives them, a list, or None if there are none:
    identifiers hold how they print."""
    return (list(value) or None) if isinstance(value, tuple) else value

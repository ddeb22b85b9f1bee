"""The identifiers of the tokenizer (its `unique_identifiers`), which are part of every description.
They are given as JSON, or taken from a tokenizer object.

The identifiers depend on how the training script builds the tokenizer: by class path, or as the
legacy class with all its options. They are exact only if they come from the training script itself,
for example from the description.txt of an earlier run. If megatron-core is installed, it can build
tokenizers by class path.
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
    """Return the identifiers of a tokenizer object, converted to JSON and back. Raises: ConfigError
    if the tokenizer has no identifiers, or JSON cannot store them."""
    try:
        identifiers: dict[str, Any] = json.loads(json.dumps(tokenizer.unique_identifiers))
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"the tokenizer {type(tokenizer).__name__} has no unique_identifiers that JSON can hold ({error}), but Megatron's "
            "cache needs them; set them to text and numbers"
        ) from None
    return identifiers


def read_identifiers(text_or_path: str) -> dict[str, Any]:
    """Read the identifiers of a tokenizer from inline JSON, from a JSON file, or from the
    description.txt of a dataset or of a blend.

    Raises: ConfigError if no identifiers are found.
    """
    is_inline = text_or_path.lstrip().startswith("{")
    location = "the tokenizer's identifiers" if is_inline else text_or_path
    try:
        record = parse_json(
            text_or_path if is_inline else Path(text_or_path).read_text(encoding="utf-8")
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{location}: expected JSON, or a JSON file such as an earlier run's description.txt "
            f"({error})"
        ) from None
    if isinstance(record, dict) and record.get("datasets"):
        record = record["datasets"][0]
    if isinstance(record, dict) and "dataset_path" in record:
        record = record.get("tokenizer")
    if not isinstance(record, dict) or "class" not in record:
        raise ConfigError(
            f"{location}: found {record!r}; expected an object with a `class`, as in an earlier run's description.txt"
        )
    return record


def build_identifiers(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identifiers of the tokenizer that the installed megatron-core builds from
    Megatron's flags.

    Args:
        flags: the values of all of Megatron's tokenizer flags, by attribute name, as given in
            training. Lists of words are tuples.

    Raises: ConfigError if megatron-core is not installed, or cannot build the tokenizer.
    """
    remedy = "give --tokenizer-identifiers, such as an earlier run's description.txt"
    if flags.get("legacy_tokenizer"):
        raise ConfigError(
            f"--legacy-tokenizer: megatron-core does not build such tokenizers (the training script does); {remedy}"
        )
    try:
        with warnings.catch_warnings():
            # Importing megatron-core warns of GPU libraries that are missing
            warnings.simplefilter("ignore")
            try:
                from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
            except ModuleNotFoundError:  # before 0.17
                from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer-type needs megatron-core ({error}); install it, or {remedy}"
        ) from None
    values = {name: _as_argparse(value) for name, value in flags.items()}
    # Versions from 0.18 use other names for three values. Versions from 0.17 pad the vocabulary;
    # the padding is not part of the identifiers.
    values |= {
        "metadata_path": values.get("tokenizer_metadata"),
        "special_tokens": values.get("tokenizer_special_tokens"),
        "tokenizer_sentencepiece_ignore_extra_whitespaces": not values.get(
            "no_tokenizer_sentencepiece_ignore_extra_whitespaces"
        ),
        "pad_vocab_size": False,
        "padded_vocab_size": 0,
    }
    try:
        tokenizer = build_tokenizer(SimpleNamespace(**values))
    except Exception as error:  # the tokenizer's library may raise anything
        raise ConfigError(
            f"--tokenizer-type {flags['tokenizer_type']}: megatron-core cannot build it ({type(error).__name__}: "
            f"{error}); check its flags, or {remedy}"
        ) from error
    return identifiers_of(tokenizer)


def _as_argparse(value: Any) -> Any:
    """Convert a tuple of words to what argparse returns: a list, or None if there are no words.
    This matters because the identifiers contain printed values."""
    return (list(value) or None) if isinstance(value, tuple) else value

"""Blends as on Megatron's command line: alternating weights and prefixes, or prefixes alone.

Megatron guesses by whether the number of words is odd, so that a forgotten word makes paths of weights; such lists are
refused here. Source: megatron.core.datasets.utils.get_blend_from_list, get_blend_and_blend_per_split.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megablend.errors import ConfigError
from megablend.megatron.request.request import SPLITS, Blend
from megablend.system.limited_json import parse_json


def blend_from_words(words: Sequence[str], *, place: str) -> Blend:
    """The blend that a list of words means.

    Args:
        place: flag or file that holds the words, for messages.

    Raises: ConfigError where weights and prefixes do not alternate.
    """
    words = [word.strip() for word in words]
    numbers = [_is_number(word) for word in words]
    try:
        if not any(numbers):
            return Blend(prefixes=tuple(words))
        if numbers == [True, False] * (len(words) // 2):
            return Blend(prefixes=tuple(words[1::2]), weights=tuple(map(float, words[::2])))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    wrong = next((i for i, is_number in enumerate(numbers) if is_number != (i % 2 == 0)), len(words))
    found = repr(words[wrong]) if wrong < len(words) else "the end"
    raise ConfigError(
        f"{place}: word {wrong + 1} of {len(words)} is {found}; expected a weight before each prefix, "
        "as in 0.3 /data/a 0.7 /data/b, or prefixes alone (one that looks like a number needs a path, such as ./30)"
    )


def read_words(path: str) -> list[str]:
    """The words of a file (--data-args-path). Raises: ConfigError where it cannot be read."""
    return _read(path).split()


def read_blends(path: str) -> tuple[Blend | None, ...]:
    """Blends by split, out of a JSON file with the keys train, valid and test (--per-split-data-args-path).

    Each is a list of words, a string of words, or null. Raises: ConfigError.
    """
    try:
        found = parse_json(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path}: invalid JSON ({error})") from None
    if not isinstance(found, dict) or not set(SPLITS) <= set(found):
        raise ConfigError(
            f"{path}: expected an object with the keys train, valid and test (null for a split without data)"
        )
    return tuple(_blend_of(found[split], place=f"{path}, {split}") for split in SPLITS)


def _blend_of(value: Any, *, place: str) -> Blend | None:
    if value is None:
        return None
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
        raise ConfigError(f"{place}: found {value!r}; expected a list of words, a string of words, or null")
    return blend_from_words([str(word) for word in words], place=place)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None

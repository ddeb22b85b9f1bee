"""A tokenizer file: its definition, the digest of everything in it that changes tokens, and whether
gigatoken is known to support this kind of tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megablend.config.tokenizer_file import find_tokenizer
from megablend.errors import ConfigError

_NOT_TOKENS = ("truncation", "padding", "decoder", "version")
"""The keys of a tokenizer.json that cannot change the tokens of a whole text."""
_SPLITS = {1, 3}
"""The possible numbers of regular expressions that split text before a byte-level model. DeepSeek's
tokenizers have three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """The contents of a tokenizer.json, with truncation and padding switched off."""

    path: str
    definition: str
    """The contents of the file, as JSON."""
    digest: str
    is_listed: bool
    """Whether gigatoken is known to read this kind of tokenizer correctly. gigatoken also loads
    other kinds, and gives wrong tokens for some of them without an error."""
    has_normalizer: bool
    """Whether text is normalised to NFC before it is split."""


def load_tokenizer(setting: str) -> TokenizerFile:
    """Load the tokenizer that the setting `tokenizer` of a config names. Raises: ConfigError if it
    cannot be loaded."""
    path = find_tokenizer(setting)
    state = path.stat()
    return _load(path, (state.st_mtime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=4)
def _load(path: Path, version: tuple[int, ...]) -> TokenizerFile:
    """Load a tokenizer.json.

    Args:
        version: values that differ if the file has changed, so that it is loaded again.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        deciding = {key: value for key, value in data.items() if key not in _NOT_TOKENS}
        if not isinstance(data["model"], dict):
            raise TypeError("its `model` is not a JSON object")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: is not a tokenizer.json ({type(error).__name__}: {error}); {_explain_remedy(path)}"
        ) from error
    canonical = json.dumps(deciding, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return TokenizerFile(
        path=str(path),
        definition=json.dumps({**data, "truncation": None, "padding": None}),
        digest=hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest(),
        is_listed=is_listed(data),
        has_normalizer=(_find_normalizer(data) or {}).get("type") == "NFC",
    )


def _explain_remedy(path: Path) -> str:
    """Return an explanation of how to get a tokenizer.json. A `.model` may be a renamed
    tokenizer.json, but is usually a SentencePiece or tiktoken model."""
    if path.suffix != ".model":
        return "write one with `tokenizer.save`"
    return (
        "a SentencePiece or tiktoken .model must be converted: use the tokenizer.json next to it, or write one with "
        "`transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`"
    )


def is_listed(data: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json is of a kind for which gigatoken is known to give the same
    tokens as `tokenizers`.

    These kinds are byte-level BPE split by regular expressions or by ByteLevel itself, and BPE with
    byte fallback after Metaspace or its equivalents.
    """
    model = data["model"]
    added = data.get("added_tokens") or ()
    variants = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        return False
    if any(model.get(key) for key in variants):
        return False
    if any(token.get(key) for token in added for key in ("single_word", "lstrip", "rstrip")):
        return False
    if model.get("byte_fallback"):
        return _is_metaspace(data)
    normalizer = _find_normalizer(data)
    if normalizer is not None:
        is_nfc = normalizer.get("type") == "NFC"
        if not is_nfc or any(token.get("normalized") for token in added):
            return False
    return _is_byte_level(data.get("pre_tokenizer") or {})


def _find_normalizer(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the normalizer; None if there is none, or only an empty sequence, as in DeepSeek's
    tokenizers."""
    normalizer: Mapping[str, Any] | None = data.get("normalizer")
    return None if normalizer == {"type": "Sequence", "normalizers": []} else normalizer


def _is_byte_level(pre: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits text by regular expressions and maps bytes to
    characters."""
    if pre.get("type") == "ByteLevel":
        return pre.get("use_regex", True) is True
    if pre.get("type") != "Sequence":
        return False
    *splits, last = pre.get("pretokenizers") or [{}]
    return (
        len(splits) in _SPLITS
        and all(map(_is_split, splits))
        and last.get("type") == "ByteLevel"
        and last.get("use_regex", True) is False
    )


def _is_split(step: Mapping[str, Any]) -> bool:
    """Return whether a step of a pre-tokenizer keeps each match of its regular expression as a
    word. Copies of OpenAI's tokenizers remove the text between matches, but their expressions leave
    no such text."""
    is_regex = step.get("type") == "Split" and "Regex" in (step.get("pattern") or {})
    behaviour = step.get("behavior"), bool(step.get("invert"))
    return is_regex and behaviour in (("Isolated", False), ("Removed", True))


def _is_metaspace(data: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer replaces blanks by ▁. In tokenizers like Llama 2's, the normalizer
    does this. Gemma's tokenizers also split text at blanks. Newer files have the pre-tokenizer
    Metaspace instead."""
    pre = data.get("pre_tokenizer")
    normalizer = data.get("normalizer")
    steps = (normalizer or {}).get("normalizers") or ([normalizer] if normalizer else [])
    required = {"Prepend": ("prepend", "▁"), "Replace": ("pattern", {"String": " "})}
    for step in steps:
        key, value = required.get(step.get("type"), ("", None))
        if step.get(key) != value or step.get("content", "▁") != "▁":
            return False
    if pre is None or _is_gemma(pre):
        return any(step["type"] == "Replace" for step in steps)
    return not steps and pre.get("type") == "Metaspace" and pre.get("replacement") == "▁"


def _is_gemma(pre: Mapping[str, Any]) -> bool:
    """Return whether this is the pre-tokenizer of Gemma's tokenizers."""
    return pre == {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }

"""A tokenizer as token files depend on it: its definition, a digest of what decides tokens, and
whether gigatoken is known to read its kind."""

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
"""Parts of a tokenizer.json that cannot change the tokens of a whole text."""
_SPLITS = {1, 3}
"""How many regular expressions split text before a byte-level model; three in DeepSeek's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A tokenizer.json without truncation and padding."""

    path: str
    definition: str
    """JSON."""
    digest: str
    is_listed: bool
    """Whether gigatoken is known to read this kind right. It loads others too, and gives other
    tokens without an error."""
    has_normalizer: bool
    """Whether its text is normalised, to NFC, before it is split."""


def load_tokenizer(given: str) -> TokenizerFile:
    """Load the tokenizer that a config names. Raises: ConfigError."""
    path = find_tokenizer(given)
    state = path.stat()
    return _load(path, (state.st_mtime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=4)
def _load(path: Path, version: tuple[int, ...]) -> TokenizerFile:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: each for key, each in data.items() if key not in _NOT_TOKENS}
        if not isinstance(data["model"], dict):
            raise TypeError("its model is not an object")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a tokenizer.json ({type(error).__name__}: {error}); write it with `tokenizer.save`"
        ) from error
    canonical = json.dumps(kept, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    whole = {**data, "truncation": None, "padding": None}
    return TokenizerFile(
        path=str(path),
        definition=json.dumps(whole),
        digest=hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest(),
        is_listed=is_listed(data),
        has_normalizer=(_find_normalizer(data) or {}).get("type") == "NFC",
    )


def is_listed(data: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json is of a kind that gigatoken is known to read as `tokenizers` does:
    byte-level BPE split by regular expressions or by ByteLevel itself, or BPE with byte fallback
    behind Metaspace or what stands for it."""
    model = data["model"]
    added = data.get("added_tokens") or ()
    plain = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    is_plain = not any(model.get(key) for key in plain)
    if model.get("type", "BPE") != "BPE" or "merges" not in model or not is_plain:
        return False
    if any(each.get(key) for each in added for key in ("single_word", "lstrip", "rstrip")):
        return False
    if model.get("byte_fallback"):
        return _is_metaspace(data)
    normalizer = _find_normalizer(data)
    if normalizer is not None:
        is_nfc = normalizer.get("type") == "NFC"
        if not is_nfc or any(each.get("normalized") for each in added):
            return False
    return _is_byte_level(data.get("pre_tokenizer") or {})


def _find_normalizer(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """None also for a sequence of none, as DeepSeek's has."""
    found: Mapping[str, Any] | None = data.get("normalizer")
    return None if found == {"type": "Sequence", "normalizers": []} else found


def _is_byte_level(pre: Mapping[str, Any]) -> bool:
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


def _is_split(each: Mapping[str, Any]) -> bool:
    """Whether what an expression matches is kept; copies of OpenAI's remove what it does not
    match, which is nothing."""
    is_regex = each.get("type") == "Split" and "Regex" in (each.get("pattern") or {})
    how = each.get("behavior"), bool(each.get("invert"))
    return is_regex and how in (("Isolated", False), ("Removed", True))


def _is_metaspace(data: Mapping[str, Any]) -> bool:
    """Llama 2's kind writes blanks as ▁ in its normalizer, Gemma's also splits there, and newer
    files have a pre-tokenizer Metaspace."""
    pre = data.get("pre_tokenizer")
    normalizer = data.get("normalizer")
    steps = (normalizer or {}).get("normalizers") or ([normalizer] if normalizer else [])
    known = {"Prepend": ("prepend", "▁"), "Replace": ("pattern", {"String": " "})}
    for step in steps:
        key, value = known.get(step.get("type"), ("", None))
        if step.get(key) != value or step.get("content", "▁") != "▁":
            return False
    if pre is None or _is_gemma(pre):
        return any(step["type"] == "Replace" for step in steps)
    return not steps and pre.get("type") == "Metaspace" and pre.get("replacement") == "▁"


def _is_gemma(pre: Mapping[str, Any]) -> bool:
    return pre == {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }

"""How many token ids a tokenizer has, from its tokenizer.json; no library is needed for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megablend.errors import ConfigError


def read_vocab_size(path: str) -> int:
    """The number of ids of a tokenizer: one more than the largest, added tokens included.

    Args:
        path: a tokenizer.json as Hugging Face's tokenizers write it.

    Raises: ConfigError where it cannot be read, or is something else.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        ids = [
            *_model_ids(data["model"]["vocab"]),
            *(token["id"] for token in data.get("added_tokens") or ()),
        ]
        largest = max(ids)
        if not isinstance(largest, int) or largest < 0:
            raise TypeError(f"its largest id is {largest!r}")
        return largest + 1
    except OSError as error:
        raise ConfigError(
            f"vocab_size: {path}: cannot read the tokenizer: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"vocab_size: {path}: not a tokenizer.json ({type(error).__name__}: {error}); give the number of token ids instead"
        ) from error


def _model_ids(vocab: Any) -> list[int]:
    """Ids of a model's own tokens: a dict has them as values, the list of a unigram model as
    places."""
    return list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))

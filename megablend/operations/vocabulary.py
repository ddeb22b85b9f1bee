"""The sizes of the vocabularies of a config's sources: the numbers of their token ids."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from megablend.config import Config, Source
from megablend.config.tokenizer_file import find_tokenizer
from megablend.errors import ConfigError


def vocab_sizes(config: Config) -> dict[str, int | None]:
    """Return the number of token ids of each source, by its name in the index; None if the config
    gives no number.

    Raises: ConfigError if a tokenizer cannot be read, or an end-of-document token is not in its
        vocabulary.
    """
    read_once = cache(read_vocab_size)  # several sources may share a tokenizer
    sizes = dict[str, int | None]()
    for name, source in config.all_sources.items():
        setting = _find_setting(config, source)
        size = read_once(setting) if isinstance(setting, str) else setting
        if size is not None and source.append_eod is not None and source.append_eod >= size:
            raise ConfigError(
                f"{source.place}: append_eod {source.append_eod} is not in a vocabulary of {size:,}; expected 0 to {size - 1}"
            )
        sizes[name] = size
    return sizes


def _find_setting(config: Config, source: Source) -> int | str | None:
    """Return the size of a source's vocabulary, or the path of its tokenizer; None if the config
    gives neither."""
    if source.vocab_size is not None:
        return source.vocab_size
    if config.vocab_size is None and source.text is not None and config.tokenizer is not None:
        return str(find_tokenizer(config.tokenizer))
    return config.vocab_size


def read_vocab_size(path: str) -> int:
    """Return the number of ids of a tokenizer: one more than its largest id, added tokens included.

    Args:
        path: a tokenizer.json as Hugging Face's tokenizers library writes it.

    Raises: ConfigError if it cannot be read, or is something else.
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
            f"vocab_size: {path}: cannot read the tokenizer: {error.strerror}; give a readable tokenizer.json, or the number "
            "of token ids"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"vocab_size: {path}: not a tokenizer.json ({type(error).__name__}: {error}); give the number of token ids instead"
        ) from error


def _model_ids(vocab: Any) -> list[int]:
    """Return the ids of a model's own tokens: the values of a dict, or, of the list of a unigram
    model, the indices."""
    return list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))

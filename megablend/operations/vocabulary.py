"""Find the vocabulary size of each source of a config."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from megablend.config import Config, Source
from megablend.config.tokenizer_file import find_tokenizer
from megablend.errors import ConfigError


def vocab_sizes(config: Config) -> dict[str, int | None]:
    """Return the vocabulary size of each source, by its name in the index; None if the config does
    not give it.

    Raises: ConfigError if a tokenizer cannot be read, or an end-of-document token is not in the
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
    """Return the vocabulary size of a source, or the path of its tokenizer; None if the config
    gives neither."""
    if source.vocab_size is not None:
        return source.vocab_size
    if config.vocab_size is None and source.text is not None and config.tokenizer is not None:
        return str(find_tokenizer(config.tokenizer))
    return config.vocab_size


def read_vocab_size(path: str) -> int:
    """Return the vocabulary size of a tokenizer: its largest id, including added tokens, plus one.

    Args:
        path: path of a tokenizer.json, as written by Hugging Face's tokenizers library.

    Raises: ConfigError if the file cannot be read, or is not a tokenizer.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        ids = [
            *_model_ids(data["model"]["vocab"]),
            *(token["id"] for token in data.get("added_tokens") or ()),
        ]
        largest = max(ids)
        if not isinstance(largest, int) or largest < 0:
            raise TypeError(f"the largest token id is {largest!r}")
        return largest + 1
    except OSError as error:
        raise ConfigError(
            f"vocab_size: {path}: cannot read the tokenizer: {error.strerror}; give a readable tokenizer.json, or the number "
            "of token ids"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"vocab_size: {path}: is not a tokenizer.json ({type(error).__name__}: {error}); give the number of token ids instead"
        ) from error


def _model_ids(vocab: Any) -> list[int]:
    """Return the token ids of a tokenizer model, without added tokens. The vocabulary is a dict
    from tokens to ids or, for a unigram model, a list whose indices are the ids."""
    return list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))

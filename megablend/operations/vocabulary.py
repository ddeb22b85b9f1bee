"""Find the vocabulary size of each source of a config."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from megablend.config import Config, Source
from megablend.config.tokenizer_file import find_tokenizer, read_vocab_size
from megablend.errors import ConfigError


def vocab_sizes(config: Config) -> dict[str, int | None]:
    """Return the vocabulary size of each source, by its name in the index; None if the config does
    not give it.

    Raises: ConfigError if a tokenizer cannot be read, or an end-of-document token is not in the
        vocabulary.
    """
    read_once = cache(_read_size)  # several sources may share a tokenizer
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


def _read_size(tokenizer: str) -> int:
    """Return the vocabulary size of a tokenizer. Raises: ConfigError, naming the key."""
    try:
        return read_vocab_size(Path(tokenizer))
    except ConfigError as error:
        raise ConfigError(f"vocab_size: {error}") from error


def _find_setting(config: Config, source: Source) -> int | str | None:
    """Return the vocabulary size of a source, or the path of its tokenizer; None if the config
    gives neither."""
    if source.vocab_size is not None:
        return source.vocab_size
    if config.vocab_size is None and source.text is not None and config.tokenizer is not None:
        return str(find_tokenizer(config.tokenizer))
    return config.vocab_size

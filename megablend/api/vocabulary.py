"""How many token ids there are, as far as the config says."""

from __future__ import annotations

from megablend.config import Config
from megablend.config.vocab import read_vocab_size
from megablend.errors import ConfigError

MAX_IDS = 1 << 32
"""Token ids there can be at all, where no `vocab_size` is given."""


def vocab_sizes(config: Config) -> dict[str, int | None]:
    """Of each source, by its name in the index, how many token ids there are; None where the config does not say.

    Raises: ConfigError where a tokenizer cannot be read, or an end-of-document token is not in its vocabulary.
    """
    read: dict[str, int] = {}
    sizes: dict[str, int | None] = {}
    for name, source in config.all_sources.items():
        given = source.vocab_size if source.vocab_size is not None else config.vocab_size
        if isinstance(given, str):
            given = read[given] if given in read else read.setdefault(given, read_vocab_size(given))
        if given is not None and source.append_eod is not None and source.append_eod >= given:
            raise ConfigError(
                f"{source.place}: append_eod {source.append_eod} is not in a vocabulary of {given:,}; expected 0 to {given - 1}"
            )
        sizes[name] = given
    return sizes

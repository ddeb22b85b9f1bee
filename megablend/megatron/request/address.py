"""Addresses: the entries of a blend, which name the files of a dataset. An address is the prefix of
a `.bin/.idx` pair, or a URL-like text such as
`parquet:/data/web/*.parquet?column=input_ids&append_eod=0`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megablend.errors import ConfigError, did_you_mean
from megablend.storage.location import find_scheme, make_absolute
from megablend.storage.registry import OBJECT_SCHEMES, explain_scheme, find_storage
from megablend.storage.url_checks import check_secrets

PAIR = "megatron"
_SCHEME = re.compile(r"(parquet|arrow):(?!//)")
_OPTIONS = ("column", "append_eod", "documents", "index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A parsed entry of a blend: the files of a dataset, and how to read documents from them."""

    format: str
    """The format of the files: parquet, arrow, or PAIR for a `.bin/.idx` pair."""
    pattern: str
    """Path or glob of the files; for a pair, its prefix."""
    column: str | None = None
    append_eod: int | None = None
    """Token appended to each document as it is read; None to append none."""
    documents: str | None = None
    """The delimiter of the documents of a flat column: file, row_group, or the id of the token that
    ends each document."""
    index: str | None = None
    """Digest of the index snapshot that lists the files; None if it is not known."""

    def __str__(self) -> str:
        values = {
            "column": self.column,
            "append_eod": self.append_eod,
            "documents": self.documents,
            "index": self.index,
        }
        options = "&".join(f"{name}={value}" for name, value in values.items() if value is not None)
        scheme = "" if self.format == PAIR else f"{self.format}:"
        return f"{scheme}{self.pattern}{'?' if options else ''}{options}"


def parse_address(text: str) -> Address:
    """Parse an address. A path without a scheme is the prefix of a pair. File patterns are made
    absolute, prefixes stay as written.

    Raises: ConfigError for an option that is unknown or invalid; see also check_prefix.
    """
    check_prefix(text)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Address(format=PAIR, pattern=text)
    rest = text[scheme.end() :]
    pattern, mark, query = rest.rpartition("?")
    if not mark or "=" not in query:  # a question mark, if any, is part of the pattern
        pattern = rest
        query = ""
    options = _parse_options(text, query)
    return Address(
        format=scheme[1],
        pattern=make_absolute(pattern, str(Path.cwd())),
        column=options.get("column"),
        append_eod=_parse_token(text, options.get("append_eod")),
        documents=_parse_documents(text, options.get("documents")),
        index=options.get("index"),
    )


def check_prefix(prefix: str) -> None:
    """Check an entry of a blend without looking at any file.

    Raises: ConfigError if the entry is not a string, has a scheme that no storage reads, or ends
        with `.bin` or `.idx`.
    """
    if not isinstance(prefix, str):
        raise ConfigError(f"a blend has the entry {prefix!r}; expected a string, such as str(path)")
    if _SCHEME.match(prefix):
        return
    scheme = find_scheme(prefix)
    if scheme == "msc" or (scheme and find_storage(scheme) is None):
        raise ConfigError(f"{prefix}: {explain_scheme(scheme)}")
    if prefix.endswith((".bin", ".idx")):
        raise ConfigError(
            f"{prefix}: Megatron adds .bin and .idx itself; give the path without its suffix"
        )


def check_pair(word: str) -> None:
    """Check that an address is the prefix of a pair. Raises: ConfigError if it is not; see also
    parse_address."""
    format_name = parse_address(word).format
    if format_name != PAIR:
        raise ConfigError(
            f"{word}: is not a .bin/.idx pair; use `{format_name}:` addresses only in training, with "
            "MegablendGPTDataset"
        )


def is_in_object_store(word: str) -> bool:
    """Return whether the files of an address or a prefix are in an object store.
    Raises: see parse_address."""
    return "://" in word and find_scheme(parse_address(word).pattern) in OBJECT_SCHEMES


def _parse_options(text: str, query: str) -> Mapping[str, str]:
    check_secrets(text)
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in _OPTIONS:
            hint = did_you_mean(name, _OPTIONS, before="; ")
            raise ConfigError(
                f"{text}: unknown option {name!r}{hint} (known: column, append_eod, documents)"
            )
        if name in options or not value:
            raise ConfigError(
                f"{text}: option {name!r} has {'two values' if name in options else 'no value'}; give one"
            )
        options[name] = value
    return options


def _parse_token(text: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not _is_token(value):
        raise ConfigError(f"{text}: append_eod is {value!r}; expected a token id (0 to 4294967295)")
    return int(value)


def _parse_documents(text: str, value: str | None) -> str | None:
    if value in (None, "file", "row_group"):
        return value
    if not _is_token(value):
        raise ConfigError(
            f"{text}: documents is {value!r}; expected file, row_group or the token id that ends documents"
        )
    return str(int(value))


def _is_token(value: str) -> bool:
    return value.isdecimal() and int(value) < 1 << 32

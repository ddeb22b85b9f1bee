"""The format_options of raw files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megablend.errors import did_you_mean

DTYPES = ("uint16", "uint32", "int32", "int64")
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RawOptions:
    """The options of raw files in a config."""

    dtype: str | None = None
    """numpy name of the tokens' dtype; None if the file's header states it."""
    header_bytes: int | None = None
    """Number of bytes before the tokens; with None, known headers are recognized."""
    eod_token: int | None = None
    """The token that each document ends with; it is part of the document."""
    bos_token: int | None = None
    """The token that each document begins with; it is part of the document."""
    allow_container: bool = False
    """Whether a file is read as tokens even if its bytes look like those of a Parquet, Arrow, gzip,
    zstd, zip or `.npy` file."""

    @property
    def separator(self) -> int | None:
        """The token that ends or begins documents; None if a file is one document."""
        return self.bos_token if self.eod_token is None else self.eod_token

    def check_fit(self, dtype: str) -> None:
        """Check that the separator fits this dtype. Raises: ValueError."""
        if self.separator is not None and self.separator > np.iinfo(dtype).max:
            name = "bos_token" if self.eod_token is None else "eod_token"
            raise ValueError(
                f"{name} {self.separator} does not fit the token dtype {dtype} (at most {np.iinfo(dtype).max}); "
                "correct the token or the dtype"
            )


def parse_options(options: Mapping[str, Any]) -> RawOptions:
    """Parse the options of a source. Raises: ValueError if an option is invalid; the message names
    the option, what was found, and what was expected."""
    for name, value in options.items():
        _check_value(name, value)
    parsed = RawOptions(**options)
    if parsed.eod_token is not None and parsed.bos_token is not None:
        raise ValueError("found both eod_token and bos_token; set only one of them")
    if parsed.dtype is not None:
        parsed.check_fit(parsed.dtype)
        token_bytes = np.dtype(parsed.dtype).itemsize
        if (parsed.header_bytes or 0) % token_bytes:
            raise ValueError(
                f"header_bytes: found {parsed.header_bytes}, expected a multiple of {token_bytes}, the size "
                f"of a {parsed.dtype}"
            )
    return parsed


def _check_value(name: str, value: object) -> None:
    """Check the value of a single option. Raises: ValueError."""
    known = ("dtype", "header_bytes", "eod_token", "bos_token", "allow_container")
    if name not in known:
        hint = did_you_mean(name, known, before="; ") or ";"
        raise ValueError(f"unknown option {name!r}{hint} known: {', '.join(known)}")
    if name == "allow_container":
        if not isinstance(value, bool):
            raise ValueError(f"{name}: found {value!r}, expected true or false")
    elif name == "dtype":
        if value not in (None, *DTYPES):
            raise ValueError(f"dtype: found {value!r}, expected one of {', '.join(DTYPES)}")
    else:
        maximum = _MAX_HEADER_BYTES if name == "header_bytes" else (1 << 32) - 1
        if value is not None and not _is_count(value, maximum):
            raise ValueError(
                f"{name}: found {value!r}, expected a whole number from 0 to {maximum}"
            )


def _is_count(value: object, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum

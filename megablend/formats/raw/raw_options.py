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
    """Bytes before the tokens; None recognizes known headers."""
    eod_token: int | None = None
    """Documents end with this token, which is part of them."""
    bos_token: int | None = None
    """Documents begin with this token, which is part of them."""

    allow_container: bool = False
    """Bytes that are those of a Parquet, Arrow, gzip, zstd, zip or `.npy` file are read as tokens
    nevertheless."""

    @property
    def separator(self) -> int | None:
        """The token that ends or begins documents; None if a file is one document."""
        return self.bos_token if self.eod_token is None else self.eod_token

    def check_fit(self, dtype: str) -> None:
        """Check that the separator fits this dtype. Raises: ValueError."""
        if self.separator is not None and self.separator > np.iinfo(dtype).max:
            name = "bos_token" if self.eod_token is None else "eod_token"
            raise ValueError(
                f"{name} {self.separator} does not fit tokens of {dtype} (up to {np.iinfo(dtype).max}); correct one of the two"
            )


def parse_options(options: Mapping[str, Any]) -> RawOptions:
    """Parse the options of a source. Raises: ValueError, which names the option,
    what was found and expected."""
    known = ("dtype", "header_bytes", "eod_token", "bos_token", "allow_container")
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, known, before="; ") or ";"
            raise ValueError(f"unknown option {name!r}{hint} known: {', '.join(known)}")
        if name == "allow_container":
            if not isinstance(value, bool):
                raise ValueError(f"{name}: found {value!r}, expected true or false")
            continue
        if name == "dtype" and value not in (None, *DTYPES):
            raise ValueError(f"dtype: found {value!r}, expected one of {', '.join(DTYPES)}")
        most = _MAX_HEADER_BYTES if name == "header_bytes" else (1 << 32) - 1
        if name != "dtype" and value is not None and not _is_count(value, most):
            raise ValueError(f"{name}: found {value!r}, expected a whole number from 0 to {most}")
    found = RawOptions(**options)
    if found.eod_token is not None and found.bos_token is not None:
        raise ValueError("found both eod_token and bos_token; set only one of them")
    if found.dtype is not None:
        found.check_fit(found.dtype)
        if (found.header_bytes or 0) % np.dtype(found.dtype).itemsize:
            raise ValueError(
                f"header_bytes: found {found.header_bytes}, expected a multiple of {np.dtype(found.dtype).itemsize}, the size "
                f"of a {found.dtype}"
            )
    return found


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most

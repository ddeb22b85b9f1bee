"""The `mirror` of a config's `storage`: a folder on each node for what is read of remote files."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import math
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megablend.errors import did_you_mean
from megablend.storage.location import find_scheme, has_prefix

VARIABLE = "MEGABLEND_MIRROR"
"""Names the folder of the mirror, where no config does."""
REMOTE_PREFIXES = ("s3://", "gs://", "az://", "http://", "https://")
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """The settings of a mirror. Picklable and hashable."""

    folder: str
    """On a local disk, for this mirror alone; an absolute path."""
    size: int | None = None
    """Bytes that it may take; None: what `reserve` leaves."""
    reserve: int | None = None
    """Bytes of the file system that are left to others; None: a twentieth of it."""
    prefixes: tuple[str, ...] = REMOTE_PREFIXES
    """URL prefixes, and mounted folders, whose files are kept. Nothing else is ever fetched."""
    patience: float = 20.0
    """Seconds after which a rank reads without the node process."""
    group: str | None = None
    """Whose members may read all that is in the folder, in addition to its user."""

    def covers(self, location: str) -> bool:
        """Whether reads of a location go through the mirror."""
        return any(has_prefix(location, prefix) for prefix in self.prefixes)

    def allows(self, location: str) -> bool:
        """Whether a node process may fetch a location that somebody asks for: it is below a prefix,
        not by way of `..` or a link, and it is at no address of this machine or of its links unless
        a prefix names that host."""
        prefixes = [prefix for prefix in self.prefixes if has_prefix(location, prefix)]
        path = location.partition("://")[2] or location
        if not prefixes or "\0" in location or ".." in path.split("/") or "?" in location:
            return False
        if not find_scheme(location):
            real = os.path.realpath(location)
            return any(has_prefix(real, os.path.realpath(prefix)) for prefix in prefixes)
        if find_scheme(location) in ("http", "https") and _is_near(location):
            return any(prefix not in REMOTE_PREFIXES for prefix in prefixes)
        return True

    def as_json(self) -> dict[str, Any]:
        """What `parse_mirror` reads, as JSON gives it back."""
        fields = dataclasses.asdict(self) | {"prefixes": list(self.prefixes)}
        return {name: value for name, value in fields.items() if value is not None}


def parse_mirror(given: object) -> MirrorOptions:
    """The `mirror` setting of a config. Raises: ValueError, which names the key."""
    if isinstance(given, str):
        given = {"folder": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"mirror: found {given!r}, expected a folder, or settings with `folder`")
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        parse = _PARSERS.get(str(name))
        if parse is None:
            hint = did_you_mean(str(name), _PARSERS, before="; ")
            raise ValueError(f"mirror: {name}: unknown setting{hint}")
        if value is None and name != "folder":
            continue
        try:
            parsed[str(name)] = parse(value)
        except ValueError as error:
            raise ValueError(f"mirror: {name}: {error}") from None
    if "folder" not in parsed:
        raise ValueError("mirror: has no `folder`; set one on a local disk of each node")
    return MirrorOptions(**parsed)


def make_mirror_absolute(options: MirrorOptions, base: Path) -> MirrorOptions:
    """The same with the paths in it relative to `base` made absolute."""

    def absolute(path: str) -> str:
        return os.path.normpath(base / Path(path).expanduser())

    prefixes = tuple(each if find_scheme(each) else absolute(each) for each in options.prefixes)
    return dataclasses.replace(options, folder=absolute(options.folder), prefixes=prefixes)


def _is_near(location: str) -> bool:
    """Whether a URL's host is an address of this machine or of its links."""
    host = (urlsplit(location).hostname or "").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # 127.1, 2130706433 and 0x7f000001 are 127.0.0.1, too
        with contextlib.suppress(OSError):
            return _is_near(f"http://{socket.inet_ntoa(socket.inet_aton(host))}/")
        return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_link_local or mapped.is_unspecified)


def _parse_text(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in os.fspath(value):
        raise ValueError(f"found {value!r}, expected text")
    return str(os.fspath(value))


def _parse_size(value: object) -> int:
    written = _SIZE.fullmatch(str(value))
    if written is None or isinstance(value, bool):
        raise ValueError(f"found {value!r}, expected a size such as 500GB")
    number, prefix, binary = written.groups()
    power = " KMGT".index(prefix.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def _parse_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"found {value!r}, expected a number above 0 (seconds)")
    return float(value)


def _parse_prefixes(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"found {value!r}, expected a list of URL prefixes and folders")
    return tuple(_parse_text(each) for each in value)


_PARSERS: dict[str, Callable[[object], object]] = {
    "folder": _parse_text,
    "size": _parse_size,
    "reserve": _parse_size,
    "prefixes": _parse_prefixes,
    "patience": _parse_seconds,
    "group": _parse_text,
}
assert _PARSERS.keys() == {each.name for each in dataclasses.fields(MirrorOptions)}

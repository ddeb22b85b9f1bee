"""The `mirror` of a config's `storage`: a folder on each node for what is read of remote files."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megablend.storage.location import find_scheme, has_prefix, lower_scheme
from megablend.storage.setting_values import (
    Parsers,
    parse_flag,
    parse_local_path,
    parse_rate,
    parse_seconds,
    parse_settings,
    parse_size,
    parse_text,
    parse_whole,
)
from megablend.storage.url_checks import split_address

VARIABLE = "MEGABLEND_MIRROR"
"""The environment variable that names the mirror's folder if no config does."""
REMOTE_PREFIXES = ("s3://", "gs://", "az://", "http://", "https://")
LAUNCHERS = ("slurm", "torch", "etcd")
"""Values of `nodes` for what lists the nodes in place of the config: Slurm, torchrun, etcd."""
ALL = "all"
"""The value of `copies` for a copy on each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files by which nodes authenticate one another."""

    certificate: str
    """This node's certificate."""
    key: str
    """The private key of `certificate`."""
    ca: str
    """The certificate of the authority that signed the certificates of all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """How nodes find one another by etcd."""

    endpoints: tuple[str, ...]
    """URLs of its members."""
    nodes_expected: int
    """How many nodes the first start of the cluster waits for."""
    prefix: str = "megablend"
    """What all keys begin with, different for each cluster."""
    lease: float = 15.0
    """Seconds without a sign of life after which a node no longer belongs to the cluster."""
    user: str | None = None
    """The user's name; None: that of the environment, or none at all."""
    password_file: str | None = None
    """A file with the user's password; None: the password of the environment."""
    tls: TlsFiles | None = None
    """By which etcd and this node authenticate one another."""


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
    """A group whose members may read all that is in the folder, in addition to its user."""
    data_port: int | None = None
    """The port at which HTTP programs that have the token read datasets: on loopback, unless `tls`
    or `insecure` is set. None: there is no such port."""
    token_file: str | None = None
    """A file with the token of these programs."""
    nodes: tuple[str, ...] | str | None = None
    """The machines that share what they hold, this one too: each as host:port; the path of a file
    with one a line; or one of LAUNCHERS, which knows them. None: this machine alone."""
    etcd: EtcdOptions | None = None
    """How etcd is reached, if `nodes` is etcd."""
    copies: int | str = 1
    """How many nodes are to hold each page, 1 or more; or ALL."""
    port: int = 7171
    """Where this node listens for the others."""
    advertise: str | None = None
    """`host` or `host:port` by which the others reach this node; None: by its name."""
    strict: bool = False
    """Nodes that are missing at the start are an error, not a warning."""
    secret_file: str | None = None
    """A file with the secret that all nodes share: it signs what they say to one another."""
    tls: TlsFiles | None = None
    """Nodes talk by TLS, and authenticate one another by these certificates."""
    insecure: bool = False
    """Nodes may talk without `secret_file` and `tls`, also over addresses that are not this
    machine's own."""
    max_peer_rate: int | None = None
    """Limit of the bytes per second that this node sends to others."""

    def covers(self, location: str) -> bool:
        """Return whether reads of a location go through the mirror."""
        return any(has_prefix(location, prefix) for prefix in self.prefixes)

    def find_refusal(self, location: str) -> str:
        """Why a node process may not fetch a location that somebody asks for; empty if it may: it is
        below a prefix, not by way of `..` or a link, and it is at no address of this machine or of
        its links unless a prefix names that host."""
        prefixes = [prefix for prefix in self.prefixes if has_prefix(location, prefix)]
        path = location.partition("://")[2] or location
        if not prefixes:
            return "is outside the prefixes that this node's mirror may fetch"
        if "\0" in location or ".." in path.split("/") or "?" in location:
            return "has `..`, `?` or a NUL in its path, which this node's mirror does not fetch"
        if not find_scheme(location):
            real = os.path.realpath(location)
            if not any(has_prefix(real, os.path.realpath(prefix)) for prefix in prefixes):
                return "is a link out of the prefixes that this node's mirror may fetch"
        is_near = find_scheme(location) in ("http", "https") and _is_near(location)
        if is_near and all(prefix in REMOTE_PREFIXES for prefix in prefixes):
            return "is on this machine or its links, and no prefix has its host"
        return ""

    def alone(self) -> MirrorOptions:
        """Return the same folder without the other nodes: for commands, which do not wait for
        them."""
        settings: dict[str, Any] = _CLUSTER_DEFAULTS
        return dataclasses.replace(self, **settings)

    def as_json(self) -> dict[str, Any]:
        """What `parse_mirror` reads, as JSON gives it back."""
        return dataclasses.asdict(self, dict_factory=_without_none)


def _without_none(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}


def parse_mirror(given: object) -> MirrorOptions:
    """Parse the `mirror` setting of a config. Raises: ValueError, which names the key."""
    if isinstance(given, str):
        given = {"folder": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"mirror: found {given!r}, expected a folder, or settings with `folder`")
    try:
        parsed = parse_settings(given, _PARSERS, MirrorOptions)
        if "folder" not in parsed:
            raise ValueError("has no `folder`; set one on a local disk of each node")
        options = MirrorOptions(**parsed)
        _check_cluster(options)
    except ValueError as error:
        raise ValueError(f"mirror: {error}") from None
    return options


def _check_cluster(options: MirrorOptions) -> None:
    """Raises: ValueError if settings of several nodes do not go together."""
    nodes = options.nodes
    for name, default in _CLUSTER_DEFAULTS.items():
        value = getattr(options, name)
        is_for_data_port = options.data_port is not None and name in ("tls", "insecure")
        if nodes is None and not is_for_data_port and value != default:
            raise ValueError(
                f"{name}: found {value!r}, but no `nodes`, which it needs; set `nodes`, or leave it out"
            )
    if (nodes == "etcd") != (options.etcd is not None):
        raise ValueError(
            "etcd: found without `nodes: etcd`; write both, or none of them"
            if options.etcd is not None
            else "nodes: found etcd, but no `etcd` with `endpoints` and `nodes_expected`; set them"
        )
    if isinstance(nodes, tuple) and options.copies != ALL and int(options.copies) > len(nodes):
        raise ValueError(
            f"copies: found {options.copies}, expected at most {len(nodes)}, the number of `nodes`, or `{ALL}`"
        )
    if options.secret_file is not None and options.tls is not None:
        raise ValueError("secret_file: found together with `tls`; keep one of them")
    if (options.data_port is None) != (options.token_file is None):
        raise ValueError("data_port and token_file: found one of them; set both, or none")
    if options.data_port == options.port and nodes is not None:
        raise ValueError(f"data_port: found {options.port}, which is `port`; choose another")


def make_mirror_absolute(options: MirrorOptions, base: Path) -> MirrorOptions:
    """Return the same with the paths in it relative to `base` made absolute."""

    def absolute(path: Any) -> Any:
        return path and os.path.normpath(base / Path(path).expanduser())

    has_file = isinstance(options.nodes, str) and options.nodes not in LAUNCHERS

    def tls_of(files: TlsFiles | None) -> TlsFiles | None:
        if files is None:
            return None
        paths = dataclasses.asdict(files)
        return TlsFiles(**{name: absolute(path) for name, path in paths.items()})

    etcd = options.etcd
    if etcd is not None:
        etcd = dataclasses.replace(
            etcd, password_file=absolute(etcd.password_file), tls=tls_of(etcd.tls)
        )
    return dataclasses.replace(
        options,
        folder=absolute(options.folder),
        prefixes=tuple(each if find_scheme(each) else absolute(each) for each in options.prefixes),
        nodes=absolute(options.nodes) if has_file else options.nodes,
        token_file=absolute(options.token_file),
        secret_file=absolute(options.secret_file),
        tls=tls_of(options.tls),
        etcd=etcd,
    )


def _is_near(location: str) -> bool:
    """Return whether a URL's host is an address of this machine or of its links."""
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


def _parse_prefixes(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"found {value!r}, expected a list of URL prefixes and folders")
    for each in map(parse_text, value):
        is_folder = not find_scheme(each) and each.startswith(("/", "~"))
        if not is_folder and not lower_scheme(each).startswith(REMOTE_PREFIXES):
            raise ValueError(
                f"found {each!r}, expected a URL prefix such as s3://bucket/, or the absolute path of a folder"
            )
    return tuple(map(parse_text, value))


def _parse_nodes(value: object) -> tuple[str, ...] | str:
    if isinstance(value, str | os.PathLike):
        path = parse_local_path(value)
        if (split_address(path) or ("", None))[1] is not None:
            raise ValueError(f"found {path!r}, expected a list of nodes: [{path}, ...]")
        return path
    if not isinstance(value, list | tuple) or not value:
        names = ", ".join(f"`{each}`" for each in LAUNCHERS)
        raise ValueError(
            f"found {value!r}, expected a list of host:port, the path of a file with one per line, or {names}"
        )
    for i, each in enumerate(value):
        address = split_address(each) if isinstance(each, str) else None
        if address is None or address[1] is None:
            raise ValueError(f"found {each!r}, expected host:port")
        if each in value[:i]:
            raise ValueError(f"found {each!r} twice; list each node once")
    return tuple(value)


def _parse_copies(value: object) -> int | str:
    if value == ALL:
        return ALL
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"found {value!r}, expected a whole number, 1 or more, or `{ALL}`")
    return value


def _parse_port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 16:
        raise ValueError(f"found {value!r}, expected a port, 1 to 65535")
    return value


def _parse_advertise(value: object) -> str:
    text = parse_text(value)
    if split_address(text) is None:
        raise ValueError(f"found {value!r}, expected host or host:port")
    return text


def _parse_tls(value: object) -> TlsFiles:
    names = [each.name for each in dataclasses.fields(TlsFiles)]
    if not isinstance(value, Mapping) or not value.keys() >= set(names):
        raise ValueError(f"found {value!r}, expected paths under the keys {', '.join(names)}")
    return TlsFiles(**parse_settings(value, dict.fromkeys(names, parse_local_path), TlsFiles))


def _parse_endpoints(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"found {value!r}, expected a list of URLs such as http://host:2379")
    for each in map(parse_text, value):
        parts = urlsplit(each)
        address = split_address(parts.netloc)
        is_whole = parts.path in ("", "/") and not parts.query
        if parts.scheme not in ("http", "https") or address is None or not is_whole:
            raise ValueError(f"found {each!r}, expected a URL such as http://host:2379")
    return tuple(map(parse_text, value))


def _parse_prefix(value: object) -> str:
    text = parse_text(value)
    if _PREFIX.fullmatch(text) is None:
        raise ValueError(f"found {value!r}, expected letters, digits, `-`, `_`, `.` and `/` within")
    return text


def _parse_etcd(value: object) -> EtcdOptions:
    if not isinstance(value, Mapping):
        raise ValueError(f"found {value!r}, expected settings with `endpoints`, `nodes_expected`")
    parsed = parse_settings(value, _ETCD_PARSERS, EtcdOptions)
    for name in ("endpoints", "nodes_expected"):
        if name not in parsed:
            raise ValueError(f"has no `{name}`; set it")
    return EtcdOptions(**parsed)


_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_ETCD_PARSERS: Parsers = {
    "endpoints": _parse_endpoints,
    "nodes_expected": partial(parse_whole, unit="nodes"),
    "prefix": _parse_prefix,
    "lease": parse_seconds,
    "user": parse_text,
    "password_file": parse_local_path,
    "tls": _parse_tls,
}
_PARSERS: Parsers = {
    "folder": parse_local_path,
    "size": parse_size,
    "reserve": partial(parse_size, least=0),
    "prefixes": _parse_prefixes,
    "patience": parse_seconds,
    "group": parse_text,
    "data_port": _parse_port,
    "token_file": parse_local_path,
    "nodes": _parse_nodes,
    "etcd": _parse_etcd,
    "copies": _parse_copies,
    "port": _parse_port,
    "advertise": _parse_advertise,
    "strict": parse_flag,
    "secret_file": parse_local_path,
    "tls": _parse_tls,
    "insecure": parse_flag,
    "max_peer_rate": parse_rate,
}
_FIELDS = {each.name: each.default for each in dataclasses.fields(MirrorOptions)}
assert _PARSERS.keys() == _FIELDS.keys()
_CLUSTER_DEFAULTS = dict(list(_FIELDS.items())[list(_FIELDS).index("nodes") :])
"""Defaults of `nodes`, and of the fields that follow it, which need `nodes`."""

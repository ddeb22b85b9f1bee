"""The settings of a mirror, a folder on each node that keeps the bytes that were read of remote
files; `mirror_parser` parses them."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megablend.storage.location import find_scheme, has_prefix

VARIABLE = "MEGABLEND_MIRROR"
"""The environment variable that names the mirror's folder if no config does."""
REMOTE_PREFIXES = ("s3://", "gs://", "az://", "http://", "https://")
"""The prefixes that a mirror covers by default: all object stores and web servers."""
LAUNCHERS = ("slurm", "torch", "etcd")
"""The values of `nodes` that leave the list of nodes to Slurm, torchrun or etcd."""
ALL = "all"
"""The value of `copies` for a copy on each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files by which nodes authenticate one another."""

    certificate: str
    """This node's certificate."""
    key: str
    """The private key of `certificate`."""
    ca: str
    """The certificate of the authority that signed the certificates of all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """The settings by which nodes find one another through etcd."""

    endpoints: tuple[str, ...]
    """URLs of the members of etcd."""
    nodes_expected: int
    """The number of nodes that the first start of the cluster waits for."""
    prefix: str = "megablend"
    """The prefix of all keys, different for each cluster."""
    lease: float = 15.0
    """Seconds without a sign of life after which a node no longer belongs to the cluster."""
    user: str | None = None
    """The name of etcd's user; None for the environment's, or for no user."""
    password_file: str | None = None
    """A file with the user's password; None for the environment's password."""
    tls: TlsFiles | None = None
    """The files by which etcd and this node authenticate one another; None for no TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """The settings of a mirror. Picklable and hashable."""

    folder: str
    """A folder on a local disk for this mirror alone; an absolute path."""
    size: int | None = None
    """Bytes that the folder may take; None for all that `reserve` leaves."""
    reserve: int | None = None
    """Bytes of the file system that are left to others; None for a twentieth of it."""
    prefixes: tuple[str, ...] = REMOTE_PREFIXES
    """URL prefixes, and mounted folders, whose files are kept. Nothing else is ever fetched."""
    patience: float = 20.0
    """Seconds after which a rank reads without the node process."""
    group: str | None = None
    """A group whose members may read all files in the folder, in addition to its user."""
    data_port: int | None = None
    """The port at which HTTP programs that have the token read datasets: on loopback, unless `tls`
    or `insecure` is set. None for no such port."""
    token_file: str | None = None
    """A file with the token that HTTP programs send."""
    nodes: tuple[str, ...] | str | None = None
    """The nodes that share the bytes they hold, with this one among them: each as host:port; the
    path of a file with a node on each line; or one of LAUNCHERS. None for this node alone."""
    etcd: EtcdOptions | None = None
    """The settings of etcd, if `nodes` is etcd."""
    copies: int | str = 1
    """The number of nodes that should hold each page, 1 or more; or ALL."""
    port: int = 7171
    """The port at which this node listens for other nodes."""
    advertise: str | None = None
    """The `host` or `host:port` by which other nodes reach this node; None for its name."""
    strict: bool = False
    """Whether nodes that are missing at the start are an error, not a warning."""
    secret_file: str | None = None
    """A file with the secret that all nodes share, by which they sign their messages."""
    tls: TlsFiles | None = None
    """The certificates of nodes that talk by TLS; None for no TLS."""
    insecure: bool = False
    """Whether nodes may talk without `secret_file` and `tls` even over addresses that are not this
    machine's own."""
    max_peer_rate: int | None = None
    """Limit of the bytes per second that this node sends to others."""

    def covers(self, location: str) -> bool:
        """Return whether reads of a location go through the mirror."""
        return any(has_prefix(location, prefix) for prefix in self.prefixes)

    def find_refusal(self, location: str) -> str:
        """Return the reason why a node process may not fetch a location that a client requests, and
        what to do, in two lines; "" if it may. It may fetch locations below a prefix, but none with `..`, `?` or a NUL in its
        path, no symbolic link that leads outside the prefixes, and no URL with a loopback,
        link-local or local host, unless a prefix names that host."""
        prefixes = [prefix for prefix in self.prefixes if has_prefix(location, prefix)]
        path = location.partition("://")[2] or location
        remedy = f"add a prefix of it to `mirror.prefixes` on this node, which lists {', '.join(self.prefixes)}"
        if not prefixes:
            return f"is outside the prefixes that this node's mirror may fetch\n{remedy}"
        if "\0" in location or ".." in path.split("/") or "?" in location:
            return (
                "has `..`, `?` or a NUL in its path, which a mirror does not fetch\n"
                "give the file another name at its source, or leave it out by a pattern"
            )
        if not find_scheme(location):
            real = os.path.realpath(location)
            if not any(has_prefix(real, os.path.realpath(prefix)) for prefix in prefixes):
                return f"is a symbolic link that leads outside the prefixes that this node's mirror may fetch\n{remedy}"
        is_near = find_scheme(location) in ("http", "https") and _is_near(location)
        if is_near and all(prefix in REMOTE_PREFIXES for prefix in prefixes):
            return f"has a loopback, link-local or local host, which no prefix names\n{remedy}"
        return ""

    def alone(self) -> MirrorOptions:
        """Return the settings of the same folder without the other nodes: for commands, which do
        not wait for these."""
        settings: dict[str, Any] = CLUSTER_DEFAULTS
        return dataclasses.replace(self, **settings)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a dict, from which `parse_mirror` restores them."""
        return dataclasses.asdict(self, dict_factory=_without_none)


def _without_none(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}


def _is_near(location: str) -> bool:
    """Return whether the host of a URL is a loopback, link-local or local one."""
    host = (urlsplit(location).hostname or "").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # 127.1, 2130706433 and 0x7f000001 are also 127.0.0.1
        with contextlib.suppress(OSError):
            return _is_near(f"http://{socket.inet_ntoa(socket.inet_aton(host))}/")
        return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_link_local or mapped.is_unspecified)


_FIELDS = {option.name: option.default for option in dataclasses.fields(MirrorOptions)}
CLUSTER_DEFAULTS = dict(list(_FIELDS.items())[list(_FIELDS).index("nodes") :])
"""Defaults of `nodes`, and of the fields that follow `nodes`, which have no meaning without it."""
_PATHS = {"folder", "token_file", "secret_file", "password_file", "certificate", "key", "ca"}
"""The fields of all options that are paths on this machine."""


def make_mirror_absolute(options: MirrorOptions, base: Path) -> MirrorOptions:
    """Return the same options with all paths in them made absolute, from `base` on."""
    names_file = isinstance(options.nodes, str) and options.nodes not in LAUNCHERS
    prefixes = (
        prefix if find_scheme(prefix) else _make_absolute(prefix, base)
        for prefix in options.prefixes
    )
    absolute: MirrorOptions = _make_paths_absolute(options, base)
    return dataclasses.replace(
        absolute,
        prefixes=tuple(prefixes),
        nodes=_make_absolute(options.nodes, base) if names_file else options.nodes,
    )


def _make_paths_absolute(options: Any, base: Path) -> Any:
    """Return the same options with those of _PATHS made absolute, also within inner options."""
    absolute = dict[str, Any]()
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if dataclasses.is_dataclass(value):
            absolute[option.name] = _make_paths_absolute(value, base)
        elif option.name in _PATHS and value is not None:
            absolute[option.name] = _make_absolute(value, base)
    return dataclasses.replace(options, **absolute)


def _make_absolute(path: Any, base: Path) -> str:
    return os.path.normpath(base / Path(path).expanduser())

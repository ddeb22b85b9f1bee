"""The settings of a mirror: a folder on each node that keeps the bytes that were read from remote
files."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, model_validator

from megablend.storage.location import find_scheme, has_prefix
from megablend.storage.mirror_values import (
    ALL,
    LAUNCHERS,
    REMOTE_PREFIXES,
    Address,
    Copies,
    Endpoints,
    KeyPrefix,
    Lease,
    MirrorSize,
    Nodes,
    Port,
    Prefixes,
)
from megablend.storage.setting_values import parse_size, parse_whole
from megablend.storage.settings import LocalPath, Rate, Seconds, Settings, Text, read_settings

S = TypeVar("S", bound=Settings)


class TlsFiles(Settings):
    """The PEM files with which nodes authenticate each other."""

    expected: ClassVar[str] = "paths under the keys certificate, key, ca"
    certificate: LocalPath
    """This node's certificate."""
    key: LocalPath
    """The private key of `certificate`."""
    ca: LocalPath
    """The certificate of the authority that signed the certificates of all nodes."""


Tls = Annotated[TlsFiles, BeforeValidator(partial(read_settings, TlsFiles))]


class EtcdOptions(Settings):
    """The settings of etcd, through which nodes find each other."""

    expected: ClassVar[str] = "settings with `endpoints`, `nodes_expected`"
    endpoints: Endpoints
    """URLs of the members of etcd."""
    nodes_expected: Annotated[int, BeforeValidator(partial(parse_whole, unit="nodes"))]
    """The number of nodes to wait for when the cluster is first started."""
    prefix: KeyPrefix = "megablend"
    """The prefix of all keys, different for each cluster."""
    lease: Lease = 15.0
    """The time in seconds without a sign of life after which a node no longer belongs to the
    cluster."""
    user: Text | None = None
    """The name of etcd's user; None for the name in the environment, if there is one."""
    password_file: LocalPath | None = None
    """A file with the user's password; None for the password in the environment."""
    tls: Tls | None = None
    """The files with which etcd and this node authenticate each other; None for no TLS."""


class MirrorOptions(Settings):
    """The settings of a mirror. Picklable and hashable."""

    expected: ClassVar[str] = "a folder, or settings with `folder`"
    folder: LocalPath
    """A folder on a local disk for this mirror alone; an absolute path."""
    size: MirrorSize | None = None
    """The maximum size of the folder in bytes, LEAST_SIZE or more; None for all the space that
    `reserve` leaves."""
    reserve: Annotated[int, BeforeValidator(partial(parse_size, minimum=0))] | None = None
    """The number of bytes of the file system that are left free for other uses; None for a
    twentieth of its size."""
    prefixes: Prefixes = REMOTE_PREFIXES
    """URL prefixes, and mounted folders, whose files are kept in the mirror. The mirror fetches no
    other files."""
    patience: Seconds = 20.0
    """The time in seconds after which a rank stops waiting for the node process, and reads without
    it."""
    group: Text | None = None
    """A group whose members may read all files in the folder, in addition to its user."""
    data_port: Port | None = None
    """The port at which HTTP programs can read datasets if they have the token; None for no such
    port. It is open on loopback only, unless `tls` or `insecure` is set."""
    token_file: LocalPath | None = None
    """A file with the token that HTTP programs send."""
    nodes: Nodes | None = None
    """The nodes that share the bytes that they hold, including this node; None for this node alone.
    Either a list of host:port, or the path of a file with a node on each line, or one of
    LAUNCHERS."""
    etcd: Annotated[EtcdOptions, BeforeValidator(partial(read_settings, EtcdOptions))] | None = None
    """The settings of etcd, if `nodes` is etcd."""
    copies: Copies = 1
    """The number of nodes that should hold each page, 1 or more; or ALL."""
    port: Port = 7171
    """The port at which this node listens for other nodes."""
    advertise: Address | None = None
    """The `host` or `host:port` at which other nodes reach this node; None for the name of this
    node."""
    strict: bool = False
    """Whether nodes that are missing at the start are an error, not a warning."""
    secret_file: LocalPath | None = None
    """A file with the secret that all nodes share, and with which they sign their messages."""
    tls: Tls | None = None
    """The certificates for TLS between nodes; None for no TLS."""
    insecure: bool = False
    """Whether nodes may communicate without `secret_file` and `tls` even over addresses that are
    not this machine's own."""
    max_peer_rate: Rate | None = None
    """The maximum number of bytes per second that this node sends to other nodes."""

    @model_validator(mode="after")
    def _check_cluster(self) -> MirrorOptions:
        """Check that the settings of several nodes are consistent. Raises: ValueError."""
        nodes = self.nodes
        for name, default in CLUSTER_DEFAULTS.items():
            value = getattr(self, name)
            is_for_data_port = self.data_port is not None and name in ("tls", "insecure")
            if nodes is None and not is_for_data_port and value != default:
                raise ValueError(f"{name}: needs `nodes`; set `nodes`, or remove `{name}`")
        if (nodes == "etcd") != (self.etcd is not None):
            raise ValueError(
                "etcd: found without `nodes: etcd`; set both or neither"
                if self.etcd is not None
                else "nodes: found etcd, but no `etcd` with `endpoints` and `nodes_expected`; set them"
            )
        if isinstance(nodes, tuple) and self.copies != ALL and int(self.copies) > len(nodes):
            raise ValueError(
                f"copies: found {self.copies}, expected at most {len(nodes)}, the number of `nodes`, or `{ALL}`"
            )
        if self.secret_file is not None and self.tls is not None:
            raise ValueError("secret_file: found together with `tls`; keep one of them")
        if (self.data_port is None) != (self.token_file is None):
            raise ValueError(
                "data_port and token_file: only one of them is set; set both or neither"
            )
        if self.data_port == self.port and nodes is not None:
            raise ValueError(f"data_port: found {self.port}, which is `port`; choose another")
        return self

    def covers(self, location: str) -> bool:
        """Return whether reads of a location go through the mirror."""
        return any(has_prefix(location, prefix) for prefix in self.prefixes)

    def find_refusal(self, location: str) -> str:
        """Return the reason why a node process may not fetch a location that a client requests, and
        the remedy on a second line; "" if it may fetch the location.

        A node process may fetch locations below a prefix. Exceptions are paths with `..`, `?` or a
        NUL, symbolic links that lead outside the prefixes, and URLs with a loopback, link-local or
        local host that no prefix names.
        """
        prefixes = [prefix for prefix in self.prefixes if has_prefix(location, prefix)]
        path = location.partition("://")[2] or location
        remedy = (
            f"add a prefix of it to `mirror.prefixes` on this node (now {', '.join(self.prefixes)})"
        )
        if not prefixes:
            return f"is outside the prefixes that this node's mirror may fetch\n{remedy}"
        if "\0" in location or ".." in path.split("/") or "?" in location:
            return (
                "has `..`, `?` or a NUL in its path, which a mirror does not fetch\n"
                "rename the file at its source, or exclude it by the pattern"
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
        """Return the same settings, but without the other nodes. Commands use them, since they do
        not wait for other nodes."""
        return self.model_copy(update=CLUSTER_DEFAULTS)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as JSON, from which `parse_mirror` restores them."""
        return self.model_dump(mode="json", exclude_none=True)


def parse_mirror(given: object) -> MirrorOptions:
    """Parse the `mirror` setting of a config. Raises: ValueError, which names the key."""
    try:
        return read_settings(MirrorOptions, {"folder": given} if isinstance(given, str) else given)
    except ValueError as error:
        raise ValueError(f"mirror: {error}") from None


def _is_near(location: str) -> bool:
    """Return whether the host of a URL is a loopback, link-local or local host."""
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


_FIELDS = {name: field.default for name, field in MirrorOptions.model_fields.items()}
CLUSTER_DEFAULTS = dict(list(_FIELDS.items())[list(_FIELDS).index("nodes") :])
"""The defaults of `nodes` and of all fields after it. The later fields have no meaning if `nodes`
is not set."""
_PATHS = {"folder", "token_file", "secret_file", "password_file", "certificate", "key", "ca"}
"""The names of the fields, in all options, that are paths on this machine."""


def make_mirror_absolute(options: MirrorOptions, base: Path) -> MirrorOptions:
    """Return the same options with all paths in them made absolute, relative to `base`."""
    absolute = _make_paths_absolute(options, base)
    prefixes = (
        prefix if find_scheme(prefix) else _make_absolute(prefix, base)
        for prefix in options.prefixes
    )
    update: dict[str, Any] = {"prefixes": tuple(prefixes)}
    if isinstance(options.nodes, str) and options.nodes not in LAUNCHERS:
        update["nodes"] = _make_absolute(options.nodes, base)
    return absolute.model_copy(update=update)


def _make_paths_absolute(options: S, base: Path) -> S:
    """Return the same options with the fields in _PATHS made absolute, including those of nested
    options."""
    update = dict[str, Any]()
    for name, value in options:
        if isinstance(value, Settings):
            update[name] = _make_paths_absolute(value, base)
        elif name in _PATHS and value is not None:
            update[name] = _make_absolute(value, base)
    return options.model_copy(update=update)


def _make_absolute(path: str, base: Path) -> str:
    return os.path.normpath(base / Path(path).expanduser())

"""The `mirror` setting of a config's `storage`, as `MirrorOptions`: each setting has a parser."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from megablend.storage.location import find_scheme, lower_scheme
from megablend.storage.mirror_options import (
    ALL,
    CLUSTER_DEFAULTS,
    LAUNCHERS,
    REMOTE_PREFIXES,
    EtcdOptions,
    MirrorOptions,
    TlsFiles,
)
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

_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


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
    """Check that the settings of several nodes go together. Raises: ValueError."""
    nodes = options.nodes
    for name, default in CLUSTER_DEFAULTS.items():
        value = getattr(options, name)
        is_for_data_port = options.data_port is not None and name in ("tls", "insecure")
        if nodes is None and not is_for_data_port and value != default:
            raise ValueError(f"{name}: is set, but needs `nodes`; set `nodes`, or leave it out")
    if (nodes == "etcd") != (options.etcd is not None):
        raise ValueError(
            "etcd: found without `nodes: etcd`; set both or neither"
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
        raise ValueError("data_port and token_file: only one of them is set; set both or neither")
    if options.data_port == options.port and nodes is not None:
        raise ValueError(f"data_port: found {options.port}, which is `port`; choose another")


def _check_list(value: object, expected: str) -> Sequence[Any]:
    """Check that a value is a list with at least one item. Raises: ValueError."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"found {value!r}, expected a list of {expected}")
    return value


def _parse_prefixes(value: object) -> tuple[str, ...]:
    prefixes = tuple(map(parse_text, _check_list(value, "URL prefixes and folders")))
    for prefix in prefixes:
        is_folder = not find_scheme(prefix) and prefix.startswith(("/", "~"))
        if not is_folder and not lower_scheme(prefix).startswith(REMOTE_PREFIXES):
            raise ValueError(
                f"found {prefix!r}, expected a URL prefix such as s3://bucket/, or the absolute path of a folder"
            )
    return prefixes


def _parse_nodes(value: object) -> tuple[str, ...] | str:
    if isinstance(value, str | os.PathLike):
        path = parse_local_path(value)
        address = split_address(path)
        if address is not None and address.port is not None:
            raise ValueError(f"found {path!r}, expected a list of nodes: [{path}, ...]")
        return path
    names = ", ".join(f"`{launcher}`" for launcher in LAUNCHERS)
    nodes = _check_list(value, f"host:port, the path of a file with one per line, or {names}")
    for i, node in enumerate(nodes):
        address = split_address(node) if isinstance(node, str) else None
        if address is None or address.port is None:
            raise ValueError(f"found {node!r}, expected host:port")
        if node in nodes[:i]:
            raise ValueError(f"found {node!r} twice; list each node once")
    return tuple(nodes)


def _parse_copies(value: object) -> int | str:
    if value == ALL:
        return ALL
    if type(value) is not int or value < 1:
        raise ValueError(f"found {value!r}, expected a whole number, 1 or more, or `{ALL}`")
    return value


def _parse_port(value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 16:
        raise ValueError(f"found {value!r}, expected a port, 1 to 65535")
    return value


def _parse_advertise(value: object) -> str:
    text = parse_text(value)
    if split_address(text) is None:
        raise ValueError(f"found {value!r}, expected host or host:port")
    return text


def _parse_tls(value: object) -> TlsFiles:
    names = [option.name for option in dataclasses.fields(TlsFiles)]
    if not isinstance(value, Mapping) or not value.keys() >= set(names):
        raise ValueError(f"found {value!r}, expected paths under the keys {', '.join(names)}")
    return TlsFiles(**parse_settings(value, dict.fromkeys(names, parse_local_path), TlsFiles))


def _parse_endpoints(value: object) -> tuple[str, ...]:
    endpoints = tuple(map(parse_text, _check_list(value, "URLs such as http://host:2379")))
    for endpoint in endpoints:
        parts = urlsplit(endpoint)
        is_server = parts.path in ("", "/") and not parts.query and split_address(parts.netloc)
        if parts.scheme not in ("http", "https") or not is_server:
            raise ValueError(f"found {endpoint!r}, expected a URL such as http://host:2379")
    return endpoints


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
    "reserve": partial(parse_size, minimum=0),
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
"""The parser of each field of MirrorOptions."""
assert _PARSERS.keys() == {option.name for option in dataclasses.fields(MirrorOptions)}

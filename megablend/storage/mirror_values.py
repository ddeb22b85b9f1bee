"""Parsers for the values of a mirror's settings."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from megablend.storage.location import find_scheme, lower_scheme
from megablend.storage.setting_values import (
    list_of,
    parse_local_path,
    parse_number,
    parse_size,
    text_that,
)
from megablend.storage.url_checks import split_address

REMOTE_PREFIXES = ("s3://", "gs://", "az://", "http://", "https://")
"""The prefixes that a mirror covers by default: all object stores and web servers."""
LAUNCHERS = ("slurm", "torch", "etcd")
"""The values of `nodes` that leave the list of nodes to Slurm, torchrun or etcd."""
ALL = "all"
"""The value of `copies` for a copy on each node."""
LEAST_SIZE = 4 << 10
"""The minimum size of a mirror in bytes. It is the size of a page: a smaller mirror could hold
nothing."""
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


def _is_prefix(text: str) -> bool:
    is_folder = not find_scheme(text) and text.startswith(("/", "~"))
    return is_folder or lower_scheme(text).startswith(REMOTE_PREFIXES)


def _is_endpoint(text: str) -> bool:
    parts = urlsplit(text)
    is_server = parts.path in ("", "/") and not parts.query and split_address(parts.netloc)
    return parts.scheme in ("http", "https") and bool(is_server)


def _parse_node(node: object) -> str:
    address = split_address(node) if isinstance(node, str) else None
    if address is None or address.port is None:
        raise ValueError(f"found {node!r}, expected host:port")
    return str(node)


def _parse_nodes(value: object) -> tuple[str, ...] | str:
    if isinstance(value, str | os.PathLike):
        path = parse_local_path(value)
        address = split_address(path)
        if address is not None and address.port is not None:
            raise ValueError(f"found {path!r}, expected a list of nodes: [{path}, ...]")
        return path
    nodes = _parse_list_of_nodes(value)
    for i, node in enumerate(nodes):
        if node in nodes[:i]:
            raise ValueError(f"found {node!r} twice; list each node once")
    return nodes


def _parse_copies(value: object) -> int | str:
    if value == ALL:
        return ALL
    if type(value) is not int or value < 1:
        raise ValueError(f"found {value!r}, expected a whole number, 1 or more, or `{ALL}`")
    return value


def _parse_lease(value: object) -> float:
    seconds = parse_number(value, "seconds")
    if seconds < 1:
        raise ValueError(f"found {value!r}, expected 1 second or more, as etcd's leases have")
    return seconds


def _parse_port(value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 16:
        raise ValueError(f"found {value!r}, expected a port, 1 to 65535")
    return value


parse_mirror_size = partial(parse_size, minimum=LEAST_SIZE)
_parse_list_of_nodes = list_of(
    _parse_node, "host:port, the path of a file with one per line, or `slurm`, `torch`, `etcd`"
)
_parse_prefixes = list_of(
    text_that(_is_prefix, "a URL prefix such as s3://bucket/, or the absolute path of a folder"),
    "URL prefixes and folders",
)
_parse_endpoints = list_of(
    text_that(_is_endpoint, "a URL such as http://host:2379"), "URLs such as http://host:2379"
)
_parse_address = text_that(split_address, "host or host:port")
_parse_key_prefix = text_that(_PREFIX.fullmatch, "letters, digits, `-`, `_`, `.` and `/` within")
MirrorSize = Annotated[int, BeforeValidator(parse_mirror_size)]
Prefixes = Annotated[tuple[str, ...], BeforeValidator(_parse_prefixes)]
Nodes = Annotated[tuple[str, ...] | str, BeforeValidator(_parse_nodes)]
Copies = Annotated[int | str, BeforeValidator(_parse_copies)]
Lease = Annotated[float, BeforeValidator(_parse_lease)]
Port = Annotated[int, BeforeValidator(_parse_port)]
Address = Annotated[str, BeforeValidator(_parse_address)]
Endpoints = Annotated[tuple[str, ...], BeforeValidator(_parse_endpoints)]
KeyPrefix = Annotated[str, BeforeValidator(_parse_key_prefix)]

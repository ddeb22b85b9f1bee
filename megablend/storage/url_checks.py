"""Checks of URLs, and of what becomes part of one, before a client gets them."""

from __future__ import annotations

import re

_ADDRESS = r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]\\%\"<>^`{|}]+)(:(?P<port>[0-9]{1,5}))?"
_SERVER = re.compile(rf"(?i:https?)://([^\s/@]*@)?{_ADDRESS}(/\S*)?")
_SIGNATURE = re.compile(r"(?i)(^|&)(X-(Amz|Goog)-|AWSAccessKeyId=|Signature=|sig=|sv=)")
"""How a parameter of a signed URL's query begins."""
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def check_signature(location: str) -> None:
    """Refuse a signed URL that is written with the scheme of a store.
    Raises: ValueError, without the signature."""
    plain, _, query = location.partition("?")
    if _SIGNATURE.search(query) is not None:
        raise ValueError(
            f"found {plain}?... with a signature, expected a key without one: credentials come from the environment; a signed "
            "URL begins with https://"
        )


def is_server_url(url: str) -> bool:
    """Return whether this is the URL of a server, with or without a port and a path. The client
    panics at anything else."""
    found = _SERVER.fullmatch(url)
    return found is not None and int(found["port"] or 0) < 1 << 16


def is_region(name: str) -> bool:
    """Return whether this can be the name of a region. Without an endpoint it becomes part of the
    host's name: with other characters the client panics, or connects to another host."""
    return _REGION.fullmatch(name) is not None


def split_address(text: str) -> tuple[str, int | None] | None:
    """Return the host and the port of `host` or `host:port`; None if it is neither. An IPv6 address
    is in brackets, and stays so."""
    found = re.fullmatch(_ADDRESS, text)
    port = int(found["port"]) if found and found["port"] else None
    if found is None or (port is not None and not 0 < port < 1 << 16):
        return None
    return found["host"], port

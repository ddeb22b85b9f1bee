"""Checks of URLs, and of the parts of URLs, before they are passed to a client."""

from __future__ import annotations

import re
from ipaddress import IPv4Address
from typing import NamedTuple

from megablend.errors import ConfigError

_ADDRESS = r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]\\%\"<>^`{|}]+)(:(?P<port>[0-9]{1,5}))?"
_SERVER = re.compile(rf"(?i:https?)://([^\s/@]*@)?{_ADDRESS}(/\S*)?")
_NUMBER = re.compile(r"(?i)[0-9]+|0x[0-9a-f]*")
"""Matches a last part of a host name that makes the client take the name for an IPv4 address."""
_SIGNATURE = re.compile(r"(?i)(^|&)(X-(Amz|Goog)-|AWSAccessKeyId=|Signature=|sig=|sv=)")
"""Matches the beginning of a parameter in the query of a signed URL."""
_USER = re.compile(r"(?is)(?<=\b(s3|gs|az)://)([^/?#:]*:.*|[^/?#]*)@")
"""Matches a user or a password before the bucket. Unlike the name of a bucket, a password may
contain any character."""
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def check_secrets(location: str) -> None:
    """Check that a URL of an object store is not signed, and has no user or password. Raises:
    ConfigError. The message does not show the secret."""
    plain, _, query = location.partition("?")
    if _USER.search(location) is not None:
        shown = _USER.sub("...@", location).partition("?")[0]
        raise ConfigError(
            f"found {shown} with a user or password, expected only a bucket; set the credentials in the environment"
        )
    if _SIGNATURE.search(query) is not None:
        raise ConfigError(
            f"found {plain}?... with a signature, expected a key without one; set the credentials in the environment, or use a "
            "signed URL that begins with https://"
        )


def is_server_url(url: str) -> bool:
    """Return whether a text is the URL of a server, with or without a port and a path. The client
    for object stores panics on any other text."""
    match = _SERVER.fullmatch(url)
    if match is None or int(match["port"] or 0) >= 1 << 16:
        return False
    host = match["host"]
    if _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is None:
        return True
    try:
        IPv4Address(host)
    except ValueError:
        return False
    return True


def is_region(name: str) -> bool:
    """Return whether a text can be the name of a region. Without an endpoint, the name becomes part
    of the host name: with invalid characters, the client panics or connects to another host."""
    return _REGION.fullmatch(name) is not None


class HostPort(NamedTuple):
    """The address of a server, split into host and port."""

    host: str
    """A name or an IP address. An IPv6 address keeps its brackets."""
    port: int | None
    """None if the text gives no port."""


def split_address(text: str) -> HostPort | None:
    """Split `host` or `host:port`. Returns: None if the text is neither."""
    match = re.fullmatch(_ADDRESS, text)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and not 0 < port < 1 << 16):
        return None
    return HostPort(match["host"], port)

"""The parts of a location: a bucket, a container or a server, and a key in it."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from megablend.errors import ConfigError, UnsupportedFileError
from megablend.storage.url_checks import check_secrets, is_server_url

WEB_SCHEMES = ("http", "https")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXPECTED = {"s3": "s3://bucket/key", "gs": "gs://bucket/key", "az": "az://container/key"}
"""An example of a location for each scheme, for messages."""
_REFUSED_PARTS = ("", ".", "..")
"""The parts of a key, between slashes, that clients of object stores change or refuse."""


class Address(NamedTuple):
    """A location, split into its parts."""

    scheme: str
    """The scheme, in lower case."""
    bucket: str
    """A bucket or container; for HTTP, the server (`host` or `host:port`)."""
    key: str
    """The key as the store knows it, without the percent-encoding of URLs; empty for the bucket
    itself."""

    @property
    def root(self) -> str:
        """The location of the bucket, without a trailing slash."""
        return f"{self.scheme}://{self.bucket}"


def parse_location(location: str) -> Address:
    """Parse a location of an object store or a web server.

    Raises: ConfigError if it names no bucket or server, or contains credentials.
    """
    scheme, _, rest = location.partition("://")
    scheme = scheme.lower()
    if scheme in WEB_SCHEMES:
        return _parse_url(location, scheme)
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        check_secrets(location)
        raise ConfigError(
            f"{location}: found {bucket!r} as the bucket, expected {_EXPECTED.get(scheme, 'a bucket')}"
        )
    return Address(scheme, bucket, key)


def check_key(location: str, key: str) -> None:
    """Check that the client can address a key. Raises: UnsupportedFileError."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in key):
        raise UnsupportedFileError(
            location.encode("unicode_escape").decode("ascii"),
            "its key contains a control character, such as a newline or a tab; copy the object to a key without "
            "control characters",
        )
    if any(part in _REFUSED_PARTS for part in key.split("/")):
        raise UnsupportedFileError(
            location,
            "its key has an empty part, `.` or `..` between slashes; copy the object to a key without such parts",
        )


def check_pattern(location: str, pattern: str) -> None:
    """Check that a pattern of keys can match keys that the client can address.
    Raises: UnsupportedFileError."""
    if any(part in _REFUSED_PARTS for part in pattern.split("/")[:-1]):
        raise UnsupportedFileError(
            location,
            "the pattern has an empty part, `.` or `..` between slashes; remove that part from the pattern",
        )


def _parse_url(location: str, scheme: str) -> Address:
    """Parse a URL of a web server. Raises: ConfigError. The message does not show the query, which
    may be a signature."""
    shown = re.split(r"[?#]", location, maxsplit=1)[0]  # a query may be a signature
    server, _, path = shown.partition("://")[2].partition("/")
    # A password may have slashes, or characters that begin a query
    is_cut = "@" in location and re.search(r":(?![0-9]*$)", server) and not server.startswith("[")
    if "@" in server or is_cut:
        host = f"{server.rpartition('@')[2]}/{path}" if "@" in server else "..."
        raise ConfigError(f"{scheme}://{host}: contains a user or password; remove it from the URL")
    if not server:
        raise ConfigError(f"{shown}: contains no server name, expected {scheme}://host/path")
    if not is_server_url(f"{scheme}://{server}"):
        raise ConfigError(
            f"{shown}: found {server!r} as the server, expected {scheme}://host/path or {scheme}://host:port/path"
        )
    url = urlsplit(location)
    if re.search(r"%2f", url.path, re.IGNORECASE):
        raise ConfigError(
            f"{shown}: has an encoded slash (%2F), which cannot be requested; use a URL without it"
        )
    return Address(scheme, url.netloc, unquote(url.path.removeprefix("/")))

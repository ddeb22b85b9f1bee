"""Settings of object stores by URL prefix; for each setting the longest matching prefix decides."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing.context
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megablend.errors import did_you_mean
from megablend.storage.location import lower_scheme

_SCHEMES = ("s3", "gs", "az", "http", "https")
_SERVER = re.compile(
    r"(?i:https?)://([^\s/@]*@)?(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]\\%\"<>^`{|}]+)(:(?P<port>\d{1,5}))?(/\S*)?"
)

_SIGNATURE = re.compile(r"(?i)(^|&)(X-(Amz|Goog)-|AWSAccessKeyId=|Signature=|sig=|sv=)")
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is accessed and read. No credentials: these come from the environment."""

    endpoint: str | None = None
    """URL of a server that speaks the store's protocol, without the bucket."""
    region: str | None = None
    path_style: bool | None = None
    """S3: the bucket is part of the path (True) or of the host (False); None for path style where
    there is an endpoint."""
    account: str | None = None
    """Azure: the storage account."""
    profile: str | None = None
    """S3: a profile of ~/.aws, read by botocore."""
    anonymous: bool = False
    """Requests are not signed."""
    requester_pays: bool = False
    versions: bool = False
    """Keep reading the version of an object that was seen first, in a bucket with versioning."""
    ca_file: str | None = None
    """PEM file of certificates to trust in addition to the system's."""
    proxy: str | None = None
    """URL of an HTTP proxy; None for the environment's settings."""
    connect_timeout: float = 5.0
    """Seconds."""
    read_timeout: float = 5.0
    """Seconds without a response or a byte of it; more if the source usually takes longer."""
    give_up_after: float = 600.0
    """Seconds after its first failure during which a request is retried."""
    max_requests: int = 4096
    """Limit of requests in flight for the whole job."""
    max_source_rate: int | None = None
    """Limit of bytes per second for the whole job."""
    price_per_1000_requests: float | None = None
    """For estimates of cost, in any currency."""
    price_per_gb: float | None = None
    """The same for a GB (10^9 bytes) that is read."""


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """Options of all object stores of a config. Picklable and hashable."""

    by_prefix: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    """Prefixes and their settings, the shortest prefix first."""
    urls: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    """URLs of web servers without their query, and the query (or ""), which is sent with requests
    and stored nowhere else; None if it was left out of the pickle that these options come from."""

    def __reduce__(self) -> tuple[type[ObjectOptions], tuple[Any, ...]]:
        urls = self.urls
        if not _is_starting_process():
            urls = tuple((url, None if query else query) for url, query in urls)
        return ObjectOptions, (self.by_prefix, urls)

    def __copy__(self) -> ObjectOptions:
        return self

    def __deepcopy__(self, memo: object) -> ObjectOptions:
        return self  # not by a pickle, which may lack queries

    def find(self, location: str) -> StoreOptions:
        """The options for reading a location."""
        chosen: dict[str, Any] = {}
        for prefix, settings in self.by_prefix:
            if has_prefix(location, prefix):
                chosen.update(settings)
        return StoreOptions(**chosen)


@contextlib.contextmanager
def carrying_queries() -> Iterator[None]:
    """Pickles that this thread makes have the queries of URLs: for a process of this program,
    through memory alone."""
    _pickling.carries_queries = True
    try:
        yield
    finally:
        _pickling.carries_queries = False


def _is_starting_process() -> bool:
    """Whether what is pickled now goes to a process that is being started, and nowhere else."""
    return multiprocessing.context.get_spawning_popen() is not None or getattr(
        _pickling, "carries_queries", False
    )


_pickling = threading.local()


def check_signature(location: str) -> None:
    """Refuse a signed URL that is written with the scheme of a store. Raises:
    ValueError, without the signature."""
    plain, _, query = location.partition("?")
    if _SIGNATURE.search(query) is not None:
        raise ValueError(
            f"found {plain}?... with a signature, expected a key without one: credentials come from the environment; a signed "
            "URL begins with https://"
        )


def has_prefix(location: str, prefix: str) -> bool:
    """Whether a location is in `prefix`: only complete parts between slashes match; schemes in
    capitals or not are the same."""
    location = lower_scheme(location)
    prefix = lower_scheme(prefix)
    return location == prefix or location.startswith(
        prefix if prefix.endswith("/") else f"{prefix}/"
    )


def is_server_url(url: str) -> bool:
    """Whether this is the URL of a server, with or without a port and a path.
    The client panics at what is not."""
    found = _SERVER.fullmatch(url)
    return found is not None and int(found["port"] or 0) < 1 << 16


def is_region(name: str) -> bool:
    """Whether this can be the name of a region. It is part of the host's name if no endpoint is
    set: at other characters the client panics, or connects to another host."""
    return _REGION.fullmatch(name) is not None


def parse_options(given: object) -> ObjectOptions:
    """The `storage` setting of a config: prefixes to settings. Raises:
    ValueError, which names the key."""
    if isinstance(given, ObjectOptions):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"found {given!r}, expected URL prefixes, each with its settings")
    parsed = []
    for prefix, settings in given.items():
        scheme, mark, _ = str(prefix).partition("://")
        if not mark or scheme.lower() not in _SCHEMES:
            raise ValueError(
                f"{prefix}: expected a URL prefix such as s3://bucket/ ({', '.join(_SCHEMES)})"
            )
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"{prefix}: found {settings!r}, expected settings such as `endpoint: https://...`"
            )
        parsed.append((str(prefix), tuple(sorted(_parse_settings(str(prefix), settings).items()))))
    return ObjectOptions(tuple(sorted(parsed, key=lambda item: len(item[0]))))


def make_files_absolute(options: ObjectOptions, base: Path) -> ObjectOptions:
    """The same options with the paths in them (`ca_file`) relative to `base` made absolute."""
    by_prefix = tuple(
        (
            prefix,
            tuple(
                (name, str(base / Path(value).expanduser()) if name == "ca_file" else value)
                for name, value in each
            ),
        )
        for prefix, each in options.by_prefix
    )
    return dataclasses.replace(options, by_prefix=by_prefix)


_FIELDS = {each.name: str(each.type) for each in dataclasses.fields(StoreOptions)}
_SECRETS = ("key", "secret", "token", "password", "sas")


def _parse_settings(prefix: str, settings: Mapping[Any, object]) -> dict[str, Any]:
    parsed = {}
    for name, value in settings.items():
        kind = _FIELDS.get(str(name))
        if kind is None:
            if any(word in str(name).lower() for word in _SECRETS):
                raise ValueError(
                    f"{prefix}: {name}: credentials do not belong in configs; use environment variables or a profile"
                )
            raise ValueError(
                f"{prefix}: {name}: unknown setting{did_you_mean(str(name), _FIELDS, before='; ')}"
            )
        if value is not None or "None" not in kind:
            parsed[str(name)] = _parse_value(f"{prefix}: {name}", kind, value)
    return parsed


def _parse_value(place: str, kind: str, value: object) -> object:
    if kind.startswith("bool"):
        if not isinstance(value, bool):
            raise ValueError(f"{place}: found {value!r}, expected true or false")
        return value
    if kind.startswith("str"):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{place}: found {value!r}, expected text")
        if "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError(
                f"{place}: contains a user or password; set it in the environment (HTTPS_PROXY for a proxy)"
            )
        if place.endswith((": endpoint", ": proxy")) and not is_server_url(value):
            raise ValueError(f"{place}: found {value!r}, expected a URL such as https://host:port")
        if place.endswith(": region") and not is_region(value):
            raise ValueError(
                f"{place}: found {value!r}, expected the name of a region such as us-east-1"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        unit = "bytes per second" if place.endswith(": max_source_rate") else "seconds"
        unit = "a price" if ": price_per_" in place else unit
        raise ValueError(
            f"{place}: found {value!r}, expected a number above 0{f' ({unit})' if 'int =' not in kind else ''}"
        )
    if kind.startswith("int"):
        if value != int(value):
            raise ValueError(f"{place}: found {value!r}, expected a whole number")
        return int(value)
    return float(value)

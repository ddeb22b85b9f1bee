"""The settings of a store, and the parser of a config's `storage`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from megablend.storage.location import has_prefix
from megablend.storage.mirror_options import make_mirror_absolute, parse_mirror
from megablend.storage.object_options import ObjectOptions
from megablend.storage.setting_values import parse_number, parse_whole, text_that
from megablend.storage.settings import Rate, Seconds, Settings, Text, read_settings
from megablend.storage.url_checks import is_region, is_server_url

_SCHEMES = ("s3", "gs", "az", "http", "https")
_SECRETS = ("key", "secret", "token", "password", "sas")
"""Words in names of settings that suggest credentials."""

_parse_server = text_that(is_server_url, "a URL such as https://host:port")
_parse_region = text_that(is_region, "the name of a region such as us-east-1")
_Server = Annotated[str, BeforeValidator(_parse_server)]
_Price = Annotated[float, BeforeValidator(partial(parse_number, unit="a price"))]


class StoreOptions(Settings):
    """The settings for accessing and reading a store. They include no credentials, which come from
    the environment."""

    expected: ClassVar[str] = "settings such as `endpoint: https://...`"
    endpoint: _Server | None = None
    """The URL of a server that speaks the store's protocol, without the bucket."""
    region: Annotated[str, BeforeValidator(_parse_region)] | None = None
    """S3: the region of the bucket; None for the environment's setting."""
    path_style: bool | None = None
    """S3: whether the bucket is part of the path (True) or of the host (False). None for path style
    only if there is an endpoint."""
    account: Text | None = None
    """Azure: the storage account."""
    profile: Text | None = None
    """S3: a profile of ~/.aws, read by botocore."""
    anonymous: bool = False
    """Whether requests are sent without a signature."""
    requester_pays: bool = False
    """S3: whether this account, not the bucket's owner, pays for requests."""
    versions: bool = False
    """For a bucket with versioning: whether to keep reading the version of an object that was found
    first."""
    ca_file: Text | None = None
    """The path of a PEM file with certificates to trust in addition to the system's."""
    proxy: _Server | None = None
    """URL of an HTTP proxy; None for the environment's settings."""
    connect_timeout: Seconds = 5.0
    """The maximum number of seconds for opening a connection."""
    read_timeout: Seconds = 5.0
    """The number of seconds without a byte of a response after which a request is retried; longer
    if the source usually takes longer."""
    give_up_after: Seconds = 600.0
    """The number of seconds for which a failing request is retried, counted from its first
    failure."""
    max_requests: Annotated[int, BeforeValidator(partial(parse_whole, unit="requests"))] = 4096
    """The maximum number of requests that the whole job may have in flight."""
    max_source_rate: Rate | None = None
    """The maximum number of bytes per second for the whole job."""
    max_request_rate: (
        Annotated[float, BeforeValidator(partial(parse_number, unit="requests per second"))] | None
    ) = None
    """The maximum number of requests per second for the whole job."""
    hedges: bool = True
    """Whether a few late requests are sent a second time. A node process never does this, since it
    reads each byte once."""
    price_per_1000_requests: _Price | None = None
    """The price of 1,000 requests, in any currency, for estimates of cost."""
    price_per_gb: _Price | None = None
    """The price of each GB (10^9 bytes) that is read, in the same currency."""


def find_options(objects: ObjectOptions, location: str) -> StoreOptions:
    """Return the options for reading a location: for each option, the longest matching prefix
    decides."""
    chosen: dict[str, Any] = {}
    for prefix, settings in objects.by_prefix:
        if has_prefix(location, prefix):
            chosen.update(settings)
    return StoreOptions.model_construct(**chosen)


def parse_options(given: object) -> ObjectOptions:
    """Parse the `storage` setting of a config: URL prefixes, each with its settings, and `mirror`.
    Raises: ValueError, which names the key."""
    if isinstance(given, ObjectOptions):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"found {given!r}, expected URL prefixes, each with its settings")
    mirror = given.get("mirror")
    by_prefix = [
        (str(prefix), _parse_store(str(prefix), settings))
        for prefix, settings in given.items()
        if prefix != "mirror"
    ]
    by_prefix.sort(key=lambda item: len(item[0]))
    return ObjectOptions(tuple(by_prefix), mirror=None if mirror is None else parse_mirror(mirror))


def _parse_store(prefix: str, settings: object) -> tuple[tuple[str, Any], ...]:
    """Parse the settings of a URL prefix. Raises: ValueError, which names the key. Credentials are
    also an error, since others may be able to read a config."""
    scheme, mark, _ = prefix.partition("://")
    if not mark or scheme.lower() not in _SCHEMES:
        raise ValueError(
            f"{prefix}: expected a URL prefix such as s3://bucket/ ({', '.join(_SCHEMES)}), or `mirror`"
        )
    for name in settings if isinstance(settings, Mapping) else ():
        if name not in StoreOptions.model_fields and any(
            word in str(name).lower() for word in _SECRETS
        ):
            raise ValueError(
                f"{prefix}: {name}: credentials do not belong in configs; use environment variables or a profile"
            )
    try:
        parsed = read_settings(StoreOptions, settings)
    except ValueError as error:
        raise ValueError(f"{prefix}: {error}") from None
    return tuple(sorted(parsed.model_dump(exclude_unset=True, exclude_none=True).items()))


def make_files_absolute(options: ObjectOptions, base: Path) -> ObjectOptions:
    """Return the same options with all paths in them (`ca_file`, and the mirror's) made absolute,
    relative to `base`."""

    def absolute(name: str, value: Any) -> Any:
        return str(base / Path(value).expanduser()) if name == "ca_file" else value

    by_prefix = tuple(
        (prefix, tuple((name, absolute(name, value)) for name, value in settings))
        for prefix, settings in options.by_prefix
    )
    mirror = None if options.mirror is None else make_mirror_absolute(options.mirror, base)
    return dataclasses.replace(options, by_prefix=by_prefix, mirror=mirror)

"""Create obstore's stores, which access buckets and servers, from options and the environment."""

from __future__ import annotations

import os
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

from megablend.errors import ConfigError
from megablend.storage.objects.address import WEB_SCHEMES, Address
from megablend.storage.objects.credentials import find_provider, has_control_character
from megablend.storage.store_options import StoreOptions
from megablend.storage.url_checks import is_region, is_server_url

INSTALL = "install megablend[objects] (`pip install 'megablend[objects]'`)"
_LIST_SECONDS = 30.0
"""The minimum time-out for a page of a listing."""
_LIST_SILENCE = 3
"""The multiple of `read_timeout` after which a listing that sends nothing is requested again: a
store may search for a page for a long time."""
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
"""The environment variables that set an endpoint, by scheme. The first one that is set is used."""
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
"""The environment variables that set a region."""
_KEYS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_TOKEN"),
}
"""The environment variables whose values are sent in headers, by scheme."""


def check_installed(location: str) -> None:
    """Check that obstore is installed. Raises: ConfigError."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError(f"{location}: reading object stores needs obstore: {INSTALL}") from None


def check_can_list(location: str) -> None:
    """Check that the package that obstore needs for listings is installed. Raises: ConfigError."""
    try:
        import arro3.core  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{location}: listing object stores needs arro3-core: {INSTALL}"
        ) from None


def make_store(address: Address, options: StoreOptions, query: str, *, is_for_lists: bool) -> Any:
    """Create obstore's store for a bucket or a server. Raises: ConfigError."""
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    endpoint = find_endpoint(address, options)
    common: dict[str, Any] = {
        "client_options": _client_options(address, options, endpoint, is_for_lists=is_for_lists),
        "retry_config": {
            "max_retries": 4 if is_for_lists else 0,
            "retry_timeout": timedelta(seconds=_LIST_SECONDS),
        },
    }
    try:
        if address.scheme in WEB_SCHEMES:
            return HTTPStore(
                f"{address.scheme}://{address.bucket}/{f'?{query}' if query else ''}", **common
            )
        if options.anonymous:
            common["skip_signature"] = True
        for name in _KEYS.get(address.scheme, ()):
            if has_control_character(os.environ.get(name, "")):
                raise ConfigError(
                    f"{name}: found a line break or another control character\nremove it from the value"
                )
        if address.scheme == "gs":
            return GCSStore(address.bucket, **common, **_drop_none(base_url=endpoint))
        if address.scheme == "az":
            settings = _drop_none(account_name=options.account, endpoint=endpoint)
            return AzureStore(address.bucket, **common, **settings)
        return S3Store(address.bucket, **common, **_s3_settings(address, options, endpoint))
    except ConfigError:
        raise
    except (BaseError, ValueError) as error:
        problem = type(error).__name__  # the text may contain settings of the environment
    remedies = {
        "az": "set AZURE_STORAGE_ACCOUNT_NAME (or `account` under `storage`) and its credentials",
        "gs": "correct GOOGLE_APPLICATION_CREDENTIALS; or unset it, and set `anonymous: true` under `storage` for public data",
        "s3": "check `storage`, and the environment variables that begin with AWS_",
    }
    remedy = remedies.get(address.scheme, "check `storage`")
    raise ConfigError(f"{address.root}: the client refuses its settings ({problem}); {remedy}")


def find_endpoint(address: Address, options: StoreOptions) -> str | None:
    """Return the endpoint that the config or the environment sets. Raises: ConfigError if the
    environment sets an endpoint that is not a URL: the client would panic."""
    if options.endpoint:
        return options.endpoint
    for name in _ENDPOINTS.get(address.scheme, ()):
        endpoint = os.environ.get(name)
        if not endpoint:
            continue
        if not is_server_url(endpoint):
            raise ConfigError(
                f"{name}: found {endpoint.rpartition('@')[2]!r}, expected a URL such as https://host:port"
            )
        return endpoint
    return None


def find_ca_file(address: Address, options: StoreOptions) -> str | None:
    """Return the path of a file of trusted certificates; None if only the system's certificates are
    trusted."""
    return options.ca_file or (os.environ.get("AWS_CA_BUNDLE") if address.scheme == "s3" else None)


def _s3_settings(address: Address, options: StoreOptions, endpoint: str | None) -> dict[str, Any]:
    """Return the settings that only obstore's store for S3 has."""
    settings: dict[str, Any] = {}
    if options.region:
        settings["region"] = options.region
    else:
        _check_region()
    if endpoint and options.path_style is False:
        scheme, _, host = endpoint.partition("://")
        endpoint = f"{scheme}://{address.bucket}.{host}"
        if not is_server_url(endpoint):
            raise ConfigError(
                f"{address.root}: found `path_style: false`, which puts the bucket before the host of `endpoint`, and that is "
                "an IP address\nname the server by its host name, or remove `path_style`"
            )
    if endpoint:
        settings["endpoint"] = endpoint
    if options.path_style is not None:
        settings["virtual_hosted_style_request"] = not options.path_style
    if options.requester_pays:
        settings["request_payer"] = True
    provider = None if options.anonymous else find_provider(options.profile)
    if provider is not None:
        settings["credential_provider"] = provider
    return settings


def _client_options(
    address: Address, options: StoreOptions, endpoint: str | None, *, is_for_lists: bool
) -> dict[str, Any]:
    """Return the settings of obstore's HTTP client: time-outs, certificates and the proxy. Raises:
    ConfigError."""
    target = f"{address.scheme}://" if address.scheme in WEB_SCHEMES else endpoint or ""
    settings: dict[str, Any] = {
        "allow_http": target.startswith("http://"),
        "connect_timeout": timedelta(seconds=options.connect_timeout),
        # A last resort: each request ends by itself if its response stalls
        "timeout": timedelta(seconds=options.give_up_after + 3600),
        "user_agent": "megablend",
    }
    if is_for_lists:
        silence = _LIST_SILENCE * options.read_timeout
        settings |= {
            "timeout": timedelta(seconds=max(_LIST_SECONDS, silence)),
            "read_timeout": timedelta(seconds=silence),
        }
    ca_file = find_ca_file(address, options)
    if ca_file:
        try:
            data = Path(ca_file).expanduser().read_bytes()
            settings["root_certificate"] = data
            if not data:
                raise ConfigError(
                    f"{address.root}: ca_file {ca_file} is empty; expected certificates in PEM format"
                )
            ssl.create_default_context(cadata=data.decode("ascii", "ignore"))
        except ssl.SSLError:
            raise ConfigError(
                f"{address.root}: ca_file {ca_file}: expected certificates in PEM format"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{address.root}: ca_file {ca_file} cannot be read ({error.strerror}); check the path"
            ) from None
    if options.proxy:
        settings["proxy_url"] = options.proxy
    return settings


def _drop_none(**settings: str | None) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _check_region() -> None:
    """Check that the environment does not set an invalid name of a region. Raises: ConfigError."""
    for name in _REGIONS:
        region = os.environ.get(name)
        if region and not is_region(region):
            raise ConfigError(
                f"{name}: found {region!r}, expected the name of a region such as us-east-1"
            )

"""obstore's stores, shared by the process: for each bucket with its options, one for requests and one
for listings."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megablend.errors import ConfigError
from megablend.storage.object_options import StoreOptions
from megablend.storage.objects.address import WEB_SCHEMES, Address
from megablend.storage.objects.bucket_client import BucketClient
from megablend.storage.objects.credentials import find_provider
from megablend.storage.objects.loop import check_fork
from megablend.storage.objects.rate_limiter import (
    JOB_SIZES,
    MAX_PAUSE_SECONDS,
    RateLimiter,
    count_processes,
)
from megablend.storage.objects.sockets import SIGNED_SECONDS, SocketReader
from megablend.storage.transfer import RequestCount
from megablend.storage.url_checks import is_region, is_server_url

INSTALL = "install megablend[objects] (`pip install 'megablend[objects]'`)"
_LIST_SECONDS = 30.0
"""The shortest time-out of a page of a listing."""
_LIST_SILENCE = 3
"""A listing that sends nothing for `read_timeout` multiplied by this is requested again: a store may
search for a page for a long time."""
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
"""Environment variables with an endpoint, by scheme; the first one that is set counts."""
_PLAIN = "/!$&'()*+,;=:@[]^|~"
"""Characters of keys that the client does not percent-encode in URLs."""
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
"""Environment variables with a region."""
_lock = threading.Lock()
_clients: dict[tuple[str, str, StoreOptions], BucketClient] = {}
_listers: dict[tuple[str, StoreOptions], Any] = {}
_limiters: dict[tuple[str, StoreOptions], RateLimiter] = {}
_busy_until: dict[str, float] = {}
"""The ends of pauses by root (bucket, container or server), by the monotonic clock: no requests are
sent to the root until then. Roots that this process has not yet read from may be among them."""
busy_listeners: list[Callable[[str, float], None]] = []
"""Functions that are called, in the thread of the event loop, when a root says that it is busy: with
the root, and the seconds of the pause that it asks for."""


def check_installed(location: str) -> None:
    """Check that obstore is installed. Raises: ConfigError."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError(f"{location}: reading object stores needs obstore: {INSTALL}") from None


def get_client(address: Address, options: StoreOptions, query: str) -> BucketClient:
    """Return the client for requests to a bucket, made on first use.

    Raises: ConfigError if it cannot be made, or after a fork.
    """
    check_fork()
    key = (address.root, query, options)
    with _lock:
        if key not in _clients:
            store = _make_store(address, options, query, is_for_lists=False)
            sockets = _make_sockets(address, options, query, store)
            limiter = _get_limiter(address.root, options)
            _clients[key] = BucketClient(address.root, store, options, limiter, sockets)
        return _clients[key]


def _get_limiter(root: str, options: StoreOptions) -> RateLimiter:
    """Return the limiter of a bucket with its options, which URLs with different queries share."""
    if (root, options) not in _limiters:
        limiter = RateLimiter(
            options.max_requests,
            options.max_source_rate,
            count_processes(),
            options.max_request_rate,
        )
        limiter.paused_until = _busy_until.get(root, 0.0)
        limiter.on_busy = partial(_report_busy, root)
        _limiters[root, options] = limiter
    return _limiters[root, options]


def _report_busy(root: str, seconds: float) -> None:
    """Note that a root is busy, and tell the listeners."""
    _note_busy(root, seconds)
    for listen in busy_listeners:
        listen(root, seconds)


def _note_busy(root: str, seconds: float) -> None:
    """Extend the pause of a root."""
    until = time.monotonic() + min(seconds, MAX_PAUSE_SECONDS)
    _busy_until[root] = max(until, _busy_until.get(root, until))


def slow_down(root: str, seconds: float) -> None:
    """Send fewer requests to a root, and none for some seconds, since another process has heard
    that the root is busy."""
    _note_busy(root, seconds)  # done first: a limiter that is made meanwhile takes its pause here
    with _lock:
        limiters = [
            limiter for (limited_root, _), limiter in _limiters.items() if limited_root == root
        ]
    for limiter in limiters:
        limiter.slow_down(time.monotonic(), seconds, is_told=True)


def divide_limits(processes: int) -> None:
    """Divide the limits of all sources between `processes` processes of the job from now on."""
    os.environ[JOB_SIZES[0]] = str(processes)
    with _lock:
        for limiter in _limiters.values():
            limiter.divide(processes)


def find_pauses() -> dict[str, float]:
    """Return the roots that have asked for a pause which has not ended, each with the seconds that
    are left."""
    now = time.monotonic()
    return {root: until - now for root, until in sorted(_busy_until.items()) if until > now}


def get_lister(address: Address, options: StoreOptions) -> Any:
    """Return obstore's store for listings of a bucket. A listing is many requests, each of which
    this store retries."""
    check_fork()
    key = (address.root, options)
    with _lock:
        if key not in _listers:
            _listers[key] = _make_store(address, options, "", is_for_lists=True)
        return _listers[key]


def get_web_server(endpoint: str, options: StoreOptions) -> Any:
    """Return obstore's store for an endpoint as if it were a web server, with the endpoint's
    options. Raises: ConfigError."""
    scheme, _, server = endpoint.partition("://")
    return _make_store(
        Address(scheme.lower(), server.rstrip("/"), ""), options, "", is_for_lists=False
    )


def find_endpoint(address: Address, options: StoreOptions) -> str | None:
    """Return the endpoint that is set, by the config or by the environment. Raises: ConfigError if
    it is not a URL."""
    return options.endpoint or _read_endpoint(address.scheme)


def count_requests() -> RequestCount:
    """Return the numbers of requests and bytes of this process so far."""
    with _lock:
        counts = [each.counts for each in _clients.values()]
    return RequestCount(sum(each.requests for each in counts), sum(each.bytes for each in counts))


def forget_clients() -> None:
    """Forget all clients, since the environment has changed: they are made again on their next use.
    Must not be called while requests are in flight."""
    with _lock:
        _clients.clear()
        _listers.clear()
        _limiters.clear()


def _make_sockets(
    address: Address, options: StoreOptions, query: str, store: Any
) -> SocketReader | None:
    """Create the reader of ranges that does without the client; None if the options ask for more
    than a URL, signed or plain, can express."""
    has_urls = address.scheme in ("s3", *WEB_SCHEMES)
    if not has_urls or options.versions or options.proxy or options.anonymous:
        return None
    import obstore

    async def find_url(key: str) -> str:
        if address.scheme == "s3":
            return await obstore.sign_async(store, "GET", key, timedelta(seconds=SIGNED_SECONDS))
        return f"{address.root}/{quote(key, safe=_PLAIN)}{f'?{query}' if query else ''}"

    def make_tls() -> ssl.SSLContext:
        context = ssl.create_default_context()
        ca_file = _find_ca_file(address, options)
        if ca_file is not None:
            context.load_verify_locations(Path(ca_file).expanduser())
        return context

    return SocketReader(find_url, make_tls, options.connect_timeout)


def _find_ca_file(address: Address, options: StoreOptions) -> str | None:
    """Return the file of trusted certificates; None for the system's alone."""
    return options.ca_file or (os.environ.get("AWS_CA_BUNDLE") if address.scheme == "s3" else None)


def _make_store(address: Address, options: StoreOptions, query: str, *, is_for_lists: bool) -> Any:
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
    raise ConfigError(f"{address.root}: the client refuses its settings ({problem}): {remedy}")


def _drop_none(**settings: str | None) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _read_endpoint(scheme: str) -> str | None:
    """Return the endpoint that the environment gives. Raises: ConfigError if it is not a URL, at
    which the client would panic."""
    for name in _ENDPOINTS.get(scheme, ()):
        endpoint = os.environ.get(name)
        if not endpoint:
            continue
        if not is_server_url(endpoint):
            raise ConfigError(
                f"{name}: found {endpoint.rpartition('@')[2]!r}, expected a URL such as https://host:port"
            )
        return endpoint
    return None


def _check_region() -> None:
    """Check that the region which the environment gives can be one. Raises: ConfigError."""
    for name in _REGIONS:
        region = os.environ.get(name)
        if region and not is_region(region):
            raise ConfigError(
                f"{name}: found {region!r}, expected the name of a region such as us-east-1"
            )


def _s3_settings(address: Address, options: StoreOptions, endpoint: str | None) -> dict[str, Any]:
    """Return the settings of obstore's store that only S3 has."""
    settings: dict[str, Any] = {}
    if options.region:
        settings["region"] = options.region
    else:
        _check_region()
    if endpoint:
        scheme, _, host = endpoint.partition("://")
        settings["endpoint"] = (
            endpoint if options.path_style is not False else f"{scheme}://{address.bucket}.{host}"
        )
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
        # Requests measure silence themselves: they know how long responses usually take.
        "timeout": timedelta(seconds=options.give_up_after + 3600),
        "user_agent": "megablend",
    }
    if is_for_lists:
        silence = _LIST_SILENCE * options.read_timeout
        settings |= {
            "timeout": timedelta(seconds=max(_LIST_SECONDS, silence)),
            "read_timeout": timedelta(seconds=silence),
        }
    ca_file = _find_ca_file(address, options)
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
                f"{address.root}: ca_file {ca_file} cannot be read ({error.strerror})"
            ) from None
    if options.proxy:
        settings["proxy_url"] = options.proxy
    return settings


def _unlock() -> None:
    """Replace the lock after a fork: a thread that the child does not have may hold it. Stores are
    kept, since they can neither be used nor safely dropped."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)

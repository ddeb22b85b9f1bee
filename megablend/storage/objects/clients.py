"""The clients that the storages of this process share: one client for requests and one for
listings, for each bucket and its options. The pauses that sources have asked for are kept here
too."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megablend.errors import DataError
from megablend.storage.objects.address import WEB_SCHEMES, Address
from megablend.storage.objects.bucket_client import BucketClient
from megablend.storage.objects.loop import check_fork
from megablend.storage.objects.obstore_stores import find_ca_file, make_store
from megablend.storage.objects.rate_limiter import (
    JOB_SIZES,
    MAX_PAUSE_SECONDS,
    RateLimiter,
    count_processes,
)
from megablend.storage.objects.sockets import SIGNED_SECONDS, SocketReader
from megablend.storage.store_options import StoreOptions
from megablend.storage.transfer import RequestCount
from megablend.system.after_fork import ProcessLock
from megablend.system.tls import make_tls_context

_PLAIN = "/!$&'()*+,;=:@[]^|~"
"""Characters of keys that the client does not percent-encode in URLs."""
_stores = ProcessLock()
"""The lock that is held while the variables below are changed. A forked child keeps its parent's
stores, since they can neither be used nor safely dropped."""
_clients: dict[tuple[str, str, StoreOptions], BucketClient] = {}
_listers: dict[tuple[str, StoreOptions], Any] = {}
_limiters: dict[tuple[str, StoreOptions], RateLimiter] = {}
_busy_until: dict[str, float] = {}
"""The time until which no requests are sent to a root (bucket, container or server), by root, on
the monotonic clock. This process may not have read from all of these roots yet."""
busy_listeners: list[Callable[[str, float], None]] = []
"""Functions that are called when a root says that it is busy, in the thread of the event loop.
Their arguments are the root, and the number of seconds of the pause that it asks for."""


def get_client(address: Address, options: StoreOptions, query: str) -> BucketClient:
    """Return the client for requests to a bucket, which is created on first use.

    Raises: ConfigError if the client cannot be created, or after a fork.
    """
    check_fork()
    key = (address.root, query, options)
    with _stores.lock:
        if key not in _clients:
            store = make_store(address, options, query, is_for_lists=False)
            sockets = _make_sockets(address, options, query, store)
            limiter = _get_limiter(address.root, options)
            _clients[key] = BucketClient(address.root, store, options, limiter, sockets)
        return _clients[key]


def _get_limiter(root: str, options: StoreOptions) -> RateLimiter:
    """Return the limiter for a bucket and its options. URLs that differ only in their queries share
    a limiter."""
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
    """Record that a root is busy, and notify the listeners."""
    _note_busy(root, seconds)
    for listen in busy_listeners:
        listen(root, seconds)


def _note_busy(root: str, seconds: float) -> None:
    """Extend the pause of a root."""
    until = time.monotonic() + min(seconds, MAX_PAUSE_SECONDS)
    _busy_until[root] = max(until, _busy_until.get(root, until))


def slow_down(root: str, seconds: float) -> None:
    """Send fewer requests to a root, and no requests for some seconds, since another process has
    found the root to be busy."""
    _note_busy(root, seconds)  # first, for limiters that are created meanwhile
    with _stores.lock:
        limiters = [
            limiter for (limited_root, _), limiter in _limiters.items() if limited_root == root
        ]
    for limiter in limiters:
        limiter.slow_down(time.monotonic(), seconds, is_told=True)


def divide_limits(processes: int) -> None:
    """Divide the limits of all sources between `processes` processes of the job from now on."""
    os.environ[JOB_SIZES[0]] = str(processes)
    with _stores.lock:
        for limiter in _limiters.values():
            limiter.divide(processes)


def find_pauses() -> dict[str, float]:
    """Return the remaining number of seconds of each pause that has not ended, by root."""
    now = time.monotonic()
    return {root: until - now for root, until in sorted(_busy_until.items()) if until > now}


def find_fault(location: str, seconds: float) -> DataError | None:
    """Return an error if all requests to the bucket or server of a location have failed for at
    least `seconds`; None otherwise."""
    with _stores.lock:
        failing = {
            root: limiter.failing
            for (root, _), limiter in _limiters.items()
            if limiter.failing is not None and location.startswith(f"{root}/")
        }
    for root, (since, cause) in failing.items():
        passed = time.monotonic() - since
        if passed >= seconds:
            at = datetime.fromtimestamp(time.time() - passed).isoformat(" ", "seconds")
            return DataError(
                root,
                f"no request has succeeded since {at}: {cause}\n"
                "check the source and the network; requests are being retried",
            )
    return None


def get_lister(address: Address, options: StoreOptions) -> Any:
    """Return obstore's store for listings of a bucket. A listing consists of many requests, each of
    which this store retries."""
    check_fork()
    key = (address.root, options)
    with _stores.lock:
        if key not in _listers:
            _listers[key] = make_store(address, options, "", is_for_lists=True)
        return _listers[key]


def count_requests() -> RequestCount:
    """Return the number of requests that this process has sent so far, and the number of bytes that
    they asked for."""
    with _stores.lock:
        counts = [client.counts for client in _clients.values()]
    return RequestCount(
        sum(count.requests for count in counts), sum(count.bytes for count in counts)
    )


def forget_clients() -> None:
    """Remove all clients, since the environment has changed. New clients are created on next use.
    Must not be called while requests are in flight."""
    with _stores.lock:
        _clients.clear()
        _listers.clear()
        _limiters.clear()


def _make_sockets(
    address: Address, options: StoreOptions, query: str, store: Any
) -> SocketReader | None:
    """Create a reader that reads ranges without obstore's client; None if a plain or signed URL
    cannot express all of the options."""
    has_urls = address.scheme in ("s3", *WEB_SCHEMES)
    if not has_urls or options.versions or options.proxy or options.anonymous:
        return None
    import obstore

    async def find_url(key: str) -> str:
        if address.scheme == "s3":
            return await obstore.sign_async(store, "GET", key, timedelta(seconds=SIGNED_SECONDS))
        return f"{address.root}/{quote(key, safe=_PLAIN)}{f'?{query}' if query else ''}"

    def make_tls() -> ssl.SSLContext:
        context = make_tls_context()
        ca_file = find_ca_file(address, options)
        if ca_file is not None:
            context.load_verify_locations(Path(ca_file).expanduser())
        return context

    return SocketReader(find_url, make_tls, options.connect_timeout)

"""Options of object stores by URL prefix: for each option the longest matching prefix decides. Their
pickles leave out the queries of URLs, which are secrets, unless they go to a process of this
program."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.context
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megablend.storage.location import has_prefix
from megablend.storage.mirror_options import MirrorOptions, make_mirror_absolute

_pickling = threading.local()
"""Has the attribute `carries_queries` in a thread that is within `carrying_queries`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Settings for accessing and reading a store. Credentials are not among them: they come from the
    environment."""

    endpoint: str | None = None
    """URL of a server that speaks the store's protocol, without the bucket."""
    region: str | None = None
    """S3: the region of the bucket; None for the environment's setting."""
    path_style: bool | None = None
    """S3: the bucket is part of the path (True) or of the host (False); None for path style if
    there is an endpoint."""
    account: str | None = None
    """Azure: the storage account."""
    profile: str | None = None
    """S3: a profile of ~/.aws, read by botocore."""
    anonymous: bool = False
    """Whether requests are sent without a signature."""
    requester_pays: bool = False
    """S3: whether this account, not the bucket's owner, pays for requests."""
    versions: bool = False
    """Whether to keep reading the version of an object that was seen first, in a bucket with
    versioning."""
    ca_file: str | None = None
    """PEM file of certificates to trust in addition to the system's."""
    proxy: str | None = None
    """URL of an HTTP proxy; None for the environment's settings."""
    connect_timeout: float = 5.0
    """Seconds within which a connection has to be made."""
    read_timeout: float = 5.0
    """Seconds without a byte of a response after which a request is retried; more if the source
    usually takes longer."""
    give_up_after: float = 600.0
    """Seconds after its first failure during which a request is retried."""
    max_requests: int = 4096
    """Limit of requests in flight for the whole job."""
    max_source_rate: int | None = None
    """Limit of bytes per second for the whole job."""
    max_request_rate: float | None = None
    """Limit of requests per second for the whole job."""
    hedges: bool = True
    """Whether a few requests that are late are sent a second time. A node process never does this:
    it reads each byte once."""
    price_per_1000_requests: float | None = None
    """Price for estimates of cost, in any currency."""
    price_per_gb: float | None = None
    """Price of each GB (10^9 bytes) that is read, in the same currency."""


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """Options of all object stores of a config. Picklable and hashable."""

    by_prefix: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    """Prefixes and their settings, the shortest prefix first."""
    urls: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    """URLs of web servers without their query, each with its query (or ""). A query is sent with
    requests and stored nowhere else; None if it was left out of the pickle of these options."""
    mirror: MirrorOptions | None = None
    """The folder on each node that keeps the bytes that were read; None for no mirror."""

    def __reduce__(self) -> tuple[type[ObjectOptions], tuple[Any, ...]]:
        urls = self.urls
        if not _is_starting_process():
            urls = tuple((url, None if query else query) for url, query in urls)
        return ObjectOptions, (self.by_prefix, urls, self.mirror)

    def __copy__(self) -> ObjectOptions:
        return self

    def __deepcopy__(self, memo: object) -> ObjectOptions:
        return self  # a copy through a pickle may lack queries

    def alone(self) -> ObjectOptions:
        """Return the same options with this node's mirror alone: for commands, which read little,
        and do not wait for other nodes."""
        if self.mirror is None:
            return self
        return dataclasses.replace(self, mirror=self.mirror.alone())

    def find(self, location: str) -> StoreOptions:
        """Return the options for reading a location."""
        chosen: dict[str, Any] = {}
        for prefix, settings in self.by_prefix:
            if has_prefix(location, prefix):
                chosen.update(settings)
        return StoreOptions(**chosen)


def make_files_absolute(options: ObjectOptions, base: Path) -> ObjectOptions:
    """Return the same options with all paths in them (`ca_file`, and the mirror's) made absolute,
    from `base` on."""

    def absolute(name: str, value: Any) -> Any:
        return str(base / Path(value).expanduser()) if name == "ca_file" else value

    by_prefix = tuple(
        (prefix, tuple((name, absolute(name, value)) for name, value in settings))
        for prefix, settings in options.by_prefix
    )
    mirror = None if options.mirror is None else make_mirror_absolute(options.mirror, base)
    return dataclasses.replace(options, by_prefix=by_prefix, mirror=mirror)


@contextlib.contextmanager
def carrying_queries() -> Iterator[None]:
    """Keep the queries of URLs in the pickles that this thread makes, which go to a process of this
    program through memory alone."""
    _pickling.carries_queries = True
    try:
        yield
    finally:
        _pickling.carries_queries = False


def _is_starting_process() -> bool:
    """Return whether the pickle that is being made goes to a process that is being started, and
    nowhere else, as multiprocessing or `carrying_queries` says."""
    return multiprocessing.context.get_spawning_popen() is not None or getattr(
        _pickling, "carries_queries", False
    )

"""`ObjectStorage`: a Storage of the objects of object stores and the files of web servers. The
version of an object that is found first is pinned: all reads return bytes of this version, or
fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import (
    ConfigError,
    CorruptFileError,
    MegablendError,
    MissingFileError,
)
from megablend.storage.base import (
    Allocate,
    Bytes,
    FileStat,
    KnownFiles,
    ReadLimits,
    Storage,
    read_range,
)
from megablend.storage.file_table import FileTable, list_texts
from megablend.storage.find import Found, Match
from megablend.storage.futures import fail_now
from megablend.storage.head_and_tail import HeadAndTail
from megablend.storage.location import has_wildcard
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects import bucket, loop
from megablend.storage.objects.address import (
    WEB_SCHEMES,
    Address,
    check_key,
    check_pattern,
    parse_location,
)
from megablend.storage.objects.bucket import MAX_PART_BYTES
from megablend.storage.objects.bucket_client import BucketClient
from megablend.storage.objects.bucket_lister import BucketLister
from megablend.storage.objects.clients import get_client, get_lister
from megablend.storage.objects.known_objects import KnownObjects
from megablend.storage.objects.object_table import (
    ObjectTable,
    join_tables,
    list_matching,
    list_versions,
)
from megablend.storage.objects.object_version import ObjectVersion
from megablend.storage.objects.obstore_stores import (
    check_can_list,
    check_installed,
)
from megablend.storage.objects.rate_limiter import MAX_REQUESTS
from megablend.storage.objects.urls import split_query
from megablend.storage.objects.workers import call_each
from megablend.storage.store_options import find_options
from megablend.storage.waits import wait_for

MAX_FILES = 16
"""The number of files that a process indexes at a time. Each file has some twenty requests in
flight."""


class ObjectStorage:
    """A storage that reads object stores and web servers, with any number of buckets. Thread-safe
    and picklable (only the options are pickled).

    Raises, from any call: ConfigError if the client is missing, the location names no bucket, or
    this process was forked from one that has read from an object store.

    Args:
        options: the settings for object stores and web servers.
        checking: whether to request the state of an object at each call, to see whether the object
            has changed.
    """

    def __init__(self, options: ObjectOptions, *, checking: bool = False) -> None:
        self._options = options
        self._checking = checking
        self._queries = dict(options.urls)
        self._known = KnownObjects()

    def __reduce__(self) -> tuple[Callable[..., ObjectStorage], tuple[ObjectOptions]]:
        return partial(ObjectStorage, checking=self._checking), (self._options,)

    def limits(self, path: str) -> ReadLimits:
        """See Storage.limits. Neighbouring ranges are read together; gaps between ranges are not
        read."""
        return ReadLimits(
            max_gap_bytes=0,
            max_merged_bytes=MAX_PART_BYTES,
            max_reads=MAX_REQUESTS,
            max_files=MAX_FILES,
        )

    def for_checking(self) -> Storage:
        """See Storage.for_checking."""
        return ObjectStorage(self._options, checking=True)

    def for_reading(self) -> Storage:
        """See Storage.for_reading. The view requests the versions of objects again."""
        return ObjectStorage(self._options, checking=self._checking)

    def find(self, pattern: str) -> Found:
        """See Storage.find. The sizes and etags of all listed objects are kept, even of those that
        do not match, so that `stat` sends no requests."""
        address = parse_location(pattern)
        if not _is_listed(address):
            return self._find_one(pattern, address)
        folders, objects = self._list(pattern, address)
        paths = sorted(set(list_texts(list_matching(objects)["location"])))
        client = self._client(pattern, address)
        if client.options.versions:  # listings do not contain the ids of versions
            skip = len(address.root) + 1
            loop.run(self._find_versions(client, paths, [path[skip:] for path in paths]))
        else:
            versions = list_versions(objects)
            self._known.replace(dict(zip(list_texts(objects["location"]), versions, strict=True)))
        return Found([Match(0, path, path) for path in paths], {}, tuple(folders))

    def find_table(self, pattern: str) -> FileTable | None:
        """See TableStorage.find_table. Raises: the same errors as `find`."""
        address = parse_location(pattern)
        # Listings do not contain the ids of versions
        if not _is_listed(address) or find_options(self._options, pattern).versions:
            return None
        _, objects = self._list(pattern, address)
        return list_matching(objects)

    def _list(self, pattern: str, address: Address) -> tuple[Sequence[str], ObjectTable]:
        """List the folders and objects that a pattern with wildcards matches; see
        `BucketLister.find`."""
        check_pattern(pattern, address.key)
        try:
            return loop.run(self._lister(pattern, address).find(pattern, address))
        except MissingFileError:
            return [], join_tables([])

    def glob(self, pattern: str) -> list[str]:
        """See Storage.glob. Web servers do not list their files, so a pattern of a web server
        matches nothing here; `find` raises an error."""
        address = parse_location(pattern)
        if address.scheme in WEB_SCHEMES and _is_url_pattern(pattern):
            return []
        return [match.path for match in self.find(pattern).files]

    def is_folder(self, path: str) -> bool:
        """Return whether there are objects with keys below a path. False for web servers, which do
        not list keys."""
        address = parse_location(path)
        if address.scheme in WEB_SCHEMES:
            return False
        return loop.run(self._lister(path, address).has_folder(path, address))

    def is_readable(self, path: str) -> bool:
        """See Storage.is_readable. Always True, since permissions are not known before the object
        is read."""
        return True

    def stat(self, path: str) -> FileStat:
        """Return the state of the pinned version, which all reads use."""
        return self._find_version(path).stat

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened."""
        return self._find_version(path).stat

    def known_files(self) -> KnownFiles:
        """See Storage.known_files. The values are instances of Known, by location."""
        return self._known.take_new()

    def add_known_files(self, known: KnownFiles) -> None:
        """See Storage.add_known_files. Versions that this process has found itself are not
        replaced."""
        self._known.add(known)

    def get_ends(self, path: str) -> HeadAndTail | None:
        """See HeadAndTailStorage.get_ends."""
        return self._known.get_ends(path)

    def read_ends(self, path: str) -> None:
        """See HeadAndTailStorage.read_ends. A storage for checking does not keep heads and
        tails."""
        if not self._checking and self._known.get_ends(path) is None:
            client, address = self._open(path)
            loop.run(self._read_ends(client, path, address.key, self._known.get(path)))

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        return read_range(self, path, offset, size)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges. All ranges are read at the same time."""
        return wait_for(self.fetch(path, offsets, sizes, allocate))

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch. The call returns at once."""
        try:
            client, address = self._open(path)
            self._check_ranges(path, offsets, sizes)
        except MegablendError as error:
            return fail_now(error)
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = ends - sizes
        out = allocate(int(ends[-1]) if len(ends) else 0)
        return loop.submit(self._fill(client, path, address.key, offsets, sizes, begins, out))

    @contextmanager
    def descriptor(self, path: str) -> Iterator[int]:
        """See Storage.descriptor. Objects have no descriptors, so the result is always -1."""
        yield -1

    async def _fill(
        self,
        client: BucketClient,
        path: str,
        key: str,
        offsets: Int64s,
        sizes: Int64s,
        begins: Int64s,
        out: Bytes,
    ) -> tuple[Bytes, Int64s]:
        """Read ranges of the pinned version into `out`."""
        version = self._known.get(path)
        if version is None:
            version = self._known.keep(path, await bucket.stat(client, path, key))
            self._check_ranges(path, offsets, sizes)
        await bucket.read_into(client, path, key, version, offsets, sizes, begins, out)
        return out, begins

    async def _find_versions(
        self, client: BucketClient, paths: Sequence[str], keys: Sequence[str]
    ) -> None:
        """Request the current versions of objects, and pin them."""
        for path in paths:
            self._known.forget(path)
        await call_each(
            lambda named: self._read_ends(client, *named, None),
            zip(paths, keys, strict=True),
            client.limiter,
        )

    async def _read_ends(
        self, client: BucketClient, path: str, key: str, version: ObjectVersion | None
    ) -> None:
        """Pin a version of an object, and keep its head and tail. If `version` is None, the current
        version is pinned."""
        mirror = self._options.mirror
        if mirror is not None and mirror.covers(path):
            # The mirror reads the ends, once for all processes of the node
            self._known.keep(path, version or await bucket.stat(client, path, key))
            return
        tail_bytes = 0 if self._checking else self._known.tail_bytes
        current, ends = await bucket.read_ends(client, path, key, version, tail_bytes)
        self._known.keep(path, current, ends)

    def _find_one(self, path: str, address: Address) -> Found:
        """Find the object at a location without wildcards."""
        if not address.key or address.key.endswith("/"):
            return Found([], {})
        self._known.forget(path)
        try:
            if address.scheme in WEB_SCHEMES and _is_url_pattern(path):
                raise ConfigError(
                    f"{path}: web servers do not list their files: list them with braces ({{00..12}}), or in a text "
                    "file of URLs, one per line, whose name ends in .urls; write [ and * in a file's name as %5B and "
                    "%2A"
                )
            if self._checking:
                self._find_version(path)
            else:
                self.read_ends(path)
        except MissingFileError:
            return Found([], {})
        return Found([Match(0, path, path)], {})

    def _find_version(self, path: str) -> ObjectVersion:
        """Return the pinned version of an object. If there is none, the current version is
        requested and pinned."""
        version = None if self._checking else self._known.get(path)
        if version is None:
            client, address = self._open(path)
            version = loop.run(bucket.stat(client, path, address.key))
            if self._checking:
                self._known.replace({path: version})
        return self._known.keep(path, version)

    def _check_ranges(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        """Check that ranges are within an object. Raises: CorruptFileError."""
        version = self._known.get(path)
        file_size = (1 << 62) if version is None else version.size
        for i in np.flatnonzero((offsets < 0) | (sizes < 0) | (offsets > file_size - sizes)):
            offset = int(offsets[i])
            size = int(sizes[i])
            if version is None or offset < 0 or size < 0:
                raise CorruptFileError(
                    path,
                    f"invalid range: offset {offset}, length {size}; restore the file, or index it again",
                )
            raise CorruptFileError(
                path,
                f"is truncated (expected {size} bytes here, but the file ends at byte {file_size}); restore the file",
                offset=offset,
            )

    def _open(self, path: str) -> tuple[BucketClient, Address]:
        """Return the client of an object's bucket, and the object's address. Raises: ConfigError;
        UnsupportedFileError."""
        address = parse_location(path)
        check_key(path, address.key)
        return self._client(path, address), address

    def _client(self, location: str, address: Address) -> BucketClient:
        """Return the client of the bucket or server of a location. Raises: ConfigError."""
        loop.check_fork()
        plain, query = split_query(location) if address.scheme in WEB_SCHEMES else (location, "")
        known_query = self._queries.get(plain, "")
        if not query and known_query is None:
            raise ConfigError(
                f"{plain}: its query, which may be a signature, was not pickled; open the run in this process with the config "
                "that contains the URL"
            )
        query = query or known_query or ""
        options = find_options(self._options, plain)
        check_installed(location)
        return get_client(address, options, query)

    def _lister(self, location: str, address: Address) -> BucketLister:
        """Return the lister for the bucket of a location, which must not be on a web server.
        Raises: ConfigError."""
        client = self._client(location, address)
        check_can_list(location)
        return BucketLister(client, get_lister(address, find_options(self._options, location)))


def _is_listed(address: Address) -> bool:
    """Return whether objects at an address are found by LIST requests."""
    return address.scheme not in WEB_SCHEMES and has_wildcard(address.key)


def _is_url_pattern(url: str) -> bool:
    """Return whether a URL has wildcards; encoded characters such as %5B do not count as
    wildcards."""
    return has_wildcard(urlsplit(url).path)

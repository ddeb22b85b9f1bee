"""`ObjectPrefix`: reads, writes, lists and removes whole objects below a prefix of a bucket. Failed
requests are tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megablend.errors import CacheError, DataError
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects import loop
from megablend.storage.objects.address import Address, check_key, parse_location
from megablend.storage.objects.bucket_client import BucketClient
from megablend.storage.objects.clients import get_client, get_lister
from megablend.storage.objects.failures import READ_ACCESS, Failure, Kind, read_failure
from megablend.storage.objects.object_version import normalise_etag
from megablend.storage.objects.obstore_stores import check_installed
from megablend.storage.objects.retry_policy import attempt_within
from megablend.storage.store_options import StoreOptions, find_options

S = TypeVar("S")
T = TypeVar("T")
PART_BYTES = 8 << 20
"""The size of the parts in which larger objects are read and written."""
_MAX_REQUESTS = 32
"""The maximum number of requests of one call that are in flight at a time."""
_MIN_BYTES_PER_SECOND = 100_000
"""The minimum rate of an attempt that transfers bytes; a slower attempt has failed."""
_PUT_SECONDS = 30.0
"""The time that an attempt may take in addition to the transfer."""
_WRITE_ACCESS = "grant these credentials permission to read, write, list and delete objects there"


class NoResponseError(CacheError):
    """An error for a store that did not respond, or responded only with errors of its own."""


class ObjectEntry(NamedTuple):
    """An object in a listing."""

    key: str
    """The key relative to the prefix."""
    bytes: int
    modified: float
    """The time of the last modification, in seconds since 1970, by the store's clock."""
    etag: str
    """The etag without quotes; "" if the store gives no etag, or a weak one."""


class ObjectPrefix:
    """The objects below a prefix, by their keys. Picklable and thread-safe.

    Raises, from any call: ConfigError if the client is missing or this process was forked after
        using it; CacheError if a request is refused; NoResponseError if a request has failed for
        `give_up_after` seconds.
    using it; CacheError if a request is refused; NoResponseError if it failed for `give_up_after`.

    Args:
        location: the URL of the prefix, such as s3://bucket/caches/x.
        options: the settings for accessing the bucket.
        seconds: the maximum time for a request with all its attempts; None if only the option
            `give_up_after` limits this time.
    """

    def __init__(
        self, location: str, options: ObjectOptions, *, seconds: float | None = None
    ) -> None:
        self.location = location.rstrip("/")
        self._options = options
        self._seconds = seconds
        self._address: Address = parse_location(self.location)
        check_key(self.location, self._address.key)

    def __reduce__(self) -> tuple[type[ObjectPrefix], tuple[str, ObjectOptions]]:
        return ObjectPrefix, (self.location, self._options)

    def read(self, key: str) -> bytes | None:
        """Return a whole object; None if it does not exist."""
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return several whole objects, read at the same time; None for each object that does not
        exist."""

        async def read(key: str) -> bytes | None:
            return await self._retry(key, lambda store: _read(store, self._key(key)))

        return self._map(read, keys)

    def describe_all(self, keys: Sequence[str]) -> list[ObjectEntry | None]:
        """Return the entries of several objects, including objects that listings do not show yet;
        None for each object that does not exist."""

        async def describe(key: str) -> ObjectEntry | None:
            meta = await self._retry(key, lambda store: _head(store, self._key(key)))
            return None if meta is None else _make_entry(key, meta)

        return self._map(describe, keys)

    def download(self, key: str, size: int, path: Path) -> None:
        """Copy an object of `size` bytes to a new file. Raises: FileNotFoundError if no object of
        that size exists."""

        async def read(start: int) -> bytes | None:
            stop = min(size, start + PART_BYTES)
            return await self._retry(
                key, lambda store: _read_range(store, self._key(key), start, stop), stop - start
            )

        with path.open("xb") as file:
            starts = range(0, size, PART_BYTES)
            for first in range(0, len(starts), _MAX_REQUESTS):
                for part in self._map(read, starts[first : first + _MAX_REQUESTS]):
                    if part is None:
                        raise FileNotFoundError(
                            f"{self.location}/{key}: the object is missing, or its size is not {size} bytes"
                        )
                    file.write(part)

    def write(self, key: str, data: bytes | Path) -> None:
        """Write an object, or replace an existing one."""
        self.write_all({key: data})

    def write_all(self, objects: Mapping[str, bytes | Path]) -> dict[str, str]:
        """Write several objects at the same time. Returns: the etag of each object by key; "" if
        the store gives none."""

        async def write(key: str, data: bytes | Path) -> str:
            size = data.stat().st_size if isinstance(data, Path) else len(data)
            return await self._retry(
                key, lambda store: _put(store, self._key(key), data, size), size, is_write=True
            )

        etags = self._map(lambda pair: write(*pair), list(objects.items()))
        return dict(zip(objects, etags, strict=True))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists. Returns: whether it was written.

        The result is also False if an earlier attempt of this call wrote the object and the
        response was lost. Compare the object's content to find out.
        """
        return self.create_each(key, [data]) == 1

    def create_each(self, key: str, data: Sequence[bytes]) -> int:
        """Try to create the same object by several simultaneous requests. Returns: the number of
        requests that wrote it."""

        async def create(content: bytes) -> bool:
            size = len(content)
            return await self._retry(
                key, lambda store: _create(store, self._key(key), content), size, is_write=True
            )

        return sum(self._map(create, data))

    def list_objects(self, folder: str = "") -> list[ObjectEntry]:
        """Return all objects below a folder, sorted by key, without the empty objects that
        represent folders."""
        import obstore

        check_installed(self.location)
        lister = get_lister(self._address, self._find_options())
        below = self._key(folder) if folder else self._address.key

        async def attempt(_: Any) -> Any:
            return await obstore.list(lister, below, chunk_size=1000).collect_async()

        skip = len(self._address.key) + 1
        listed = loop.run(self._retry(folder, attempt))
        # The client strips the trailing slash from objects that stand for folders.
        folders = {below, *(record["path"].rpartition("/")[0] for record in listed)}
        records = [record for record in listed if record["size"] or record["path"] not in folders]
        return sorted(_make_entry(record["path"][skip:], record) for record in records)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects. Objects that do not exist are ignored."""
        import obstore

        async def remove(key: str) -> None:
            await self._retry(
                key,
                lambda store: _or_none(obstore.delete_async(store, self._key(key))),
                is_write=True,
            )

        self._map(remove, keys)

    def _key(self, key: str) -> str:
        return f"{self._address.key}/{key}"

    def _find_options(self) -> StoreOptions:
        return find_options(self._options, self.location)

    def _client(self) -> BucketClient:
        """Return the client of the bucket. Raises: ConfigError."""
        loop.check_fork()
        check_installed(self.location)
        return get_client(self._address, self._find_options(), "")

    async def _retry(
        self,
        key: str,
        request: Callable[[Any], Awaitable[T]],
        size: int = 0,
        *,
        is_write: bool = False,
    ) -> T:
        """Send a request until it succeeds or is refused."""
        client = self._client()
        location = f"{self.location}/{key}" if key else self.location
        seconds = _PUT_SECONDS + client.options.read_timeout + size / _MIN_BYTES_PER_SECOND

        def attempt() -> Awaitable[T | Failure]:
            return attempt_within(seconds, lambda: request(client.store), is_write=is_write)

        try:
            outcome = await asyncio.wait_for(client.policy.retry(location, attempt), self._seconds)
        except asyncio.TimeoutError:
            raise NoResponseError(f"{location}: no response for {self._seconds} s") from None
        except DataError as error:
            raise NoResponseError(
                f"{location}: cannot access the cache: {error.problem.partition(': ')[2]}"
            ) from None
        if isinstance(outcome, Failure):
            remedy = _WRITE_ACCESS if outcome.remedy == READ_ACCESS else outcome.remedy
            raise CacheError(f"{location}: cannot access the cache: {outcome.cause}; {remedy}")
        return outcome

    def _map(self, call: Callable[[S], Awaitable[T]], items: Sequence[S]) -> list[T]:
        """Call a coroutine function for each item, with at most _MAX_REQUESTS calls at a time.
        Returns: the results in order."""
        self._client()

        async def run() -> list[T]:
            free = asyncio.Semaphore(_MAX_REQUESTS)

            async def limited(item: S) -> T:
                async with free:
                    return await call(item)

            tasks = [asyncio.ensure_future(limited(item)) for item in items]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        return loop.run(run())


def _make_entry(key: str, meta: Mapping[str, Any]) -> ObjectEntry:
    return ObjectEntry(
        key, meta["size"], meta["last_modified"].timestamp(), normalise_etag(meta["e_tag"])
    )


async def _or_none(request: Awaitable[T]) -> T | None:
    """Return the response to a request; None if there is no such object. Raises: FileNotFoundError
    if the bucket is missing."""
    try:
        return await request
    except FileNotFoundError as error:
        if read_failure(error).kind is not Kind.MISSING:
            raise
        return None


async def _head(store: Any, key: str) -> Mapping[str, Any] | None:
    import obstore

    return await _or_none(obstore.head_async(store, key))


async def _read(store: Any, key: str) -> bytes | None:
    import obstore

    response = await _or_none(obstore.get_async(store, key))
    return None if response is None else bytes(await response.bytes_async())


async def _read_range(store: Any, key: str, start: int, stop: int) -> bytes | None:
    """Return a range of an object; None if there is no such object, or if it ends before `stop`."""
    import obstore

    data = await _or_none(obstore.get_range_async(store, key, start=start, end=stop))
    return None if data is None or len(data) != stop - start else bytes(data)


async def _put(store: Any, key: str, data: bytes | Path, size: int) -> str:
    """Write an object. Returns: its etag."""
    import obstore

    result = await obstore.put_async(
        store, key, data, use_multipart=size > PART_BYTES, chunk_size=PART_BYTES
    )
    return normalise_etag(result["e_tag"])


async def _create(store: Any, key: str, data: bytes) -> bool:
    """Write an object unless it exists. Returns: whether it was written."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    try:
        await obstore.put_async(store, key, data, mode="create")
    except (AlreadyExistsError, PreconditionError):
        return False
    return True

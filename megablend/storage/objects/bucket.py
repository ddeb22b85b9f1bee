"""Requests to one bucket or server: for the state of an object, ranges of an object, and listings.
All methods are coroutines of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from megablend.arrays import Int64s
from megablend.errors import DataError, MissingFileError, UnsupportedFileError
from megablend.storage.base import Bytes
from megablend.storage.head_and_tail import HEAD_BYTES, HeadAndTail
from megablend.storage.objects.address import Address
from megablend.storage.objects.bucket_client import BucketClient, RangeResponse
from megablend.storage.objects.failures import Failure, Kind, find_bad_key, read_failure
from megablend.storage.objects.listing import Listed, Object, find_objects
from megablend.storage.objects.object_version import ObjectVersion, make_version
from megablend.storage.objects.workers import call_each

T = TypeVar("T")
MAX_PART_BYTES = 8 << 20
"""The longest range that one request reads; longer ranges are requested in parts, all at once."""
EMPTY_TRIES = 3
"""The number of times that a folder which exists is listed again if its listing is empty."""
HADOOP_MARKER = "_$folder$"
"""The end of the keys of the empty objects by which Hadoop marks folders."""


class PartRequest(NamedTuple):
    """A request that reads a range, or a part of one, or several neighbours."""

    start: int
    """The first byte, in the object."""
    stop: int
    """The byte after the last one."""
    begin: int
    """The begin of the bytes in the memory that is read into."""


def plan_requests(offsets: Int64s, sizes: Int64s, begins: Int64s) -> list[PartRequest]:
    """Plan the requests that read ranges.

    A range that begins where the previous one ends, in the object and in memory, is read with it,
    up to MAX_PART_BYTES; a longer one is read in parts. Empty ranges are not read.
    """
    requests = list[PartRequest]()
    for offset, size, begin in zip(offsets.tolist(), sizes.tolist(), begins.tolist(), strict=True):
        if requests and size:
            last = requests[-1]
            last_bytes = last.stop - last.start
            continues = last.stop == offset and last.begin + last_bytes == begin
            if continues and last_bytes + size <= MAX_PART_BYTES:
                requests[-1] = last._replace(stop=offset + size)
                continue
        for done in range(0, size, MAX_PART_BYTES):
            stop = min(size, done + MAX_PART_BYTES)
            requests.append(PartRequest(offset + done, offset + stop, begin + done))
    return requests


class Bucket:
    """A source of objects with its listings.

    Args:
        client: sends the requests to the source.
        lister: obstore's store for listings; None for a web server, which has none.
    """

    def __init__(self, client: BucketClient, lister: Any) -> None:
        self.client = client
        self._lister = lister

    @property
    def has_versions(self) -> bool:
        """Whether each object is read to its end in the version that was found first."""
        return self.client.options.versions

    async def stat(self, path: str, key: str) -> ObjectVersion:
        """Return the present version of an object. Raises: MissingFileError; DataError.

        It is requested by a GET of the first byte, since a HEAD that fails does not say why, and
        many signed URLs do not allow one.
        """
        return (await self._read_head(path, key, 1))[0]

    async def read_ends(
        self, path: str, key: str, version: ObjectVersion | None, tail_bytes: int
    ) -> tuple[ObjectVersion, HeadAndTail]:
        """Return the version of an object, its head and its tail, by two simultaneous requests.

        Args:
            version: the version, if it is known; otherwise it is the present one.
            tail_bytes: the number of bytes of its end that are requested; the result has none of
                them if the server does not support such requests.

        Raises: the same errors as `stat`; ChangedFileError.
        """
        tasks = (
            asyncio.ensure_future(self._read_begin(path, key, version)),
            asyncio.ensure_future(self._read_tail(path, key, version, tail_bytes)),
        )
        try:
            (found, head), tail = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if tail is None:
            return found, HeadAndTail(found.size, head, b"")
        # The object may have been replaced between the two requests
        is_same = found.find_difference(tail.version) is None
        return found, HeadAndTail(found.size, head, tail.join() if is_same else b"")

    async def _read_begin(
        self, path: str, key: str, version: ObjectVersion | None
    ) -> tuple[ObjectVersion, bytes]:
        """Return the version of an object, and its head."""
        if version is not None:
            size = min(version.size, HEAD_BYTES)
            if not size:
                return version, b""
            response = await self.client.get(path, key, 0, size, version)
            return version, response.join()
        try:
            return await self._read_head(path, key, HEAD_BYTES)
        except UnsupportedFileError:
            # A server may answer with the whole file if that is not longer
            return await self._read_head(path, key, 1)

    async def _read_tail(
        self, path: str, key: str, version: ObjectVersion | None, size: int
    ) -> RangeResponse | None:
        """Return the tail of an object; None if there is none, or the server does not send it."""
        if version is None:
            return await self.client.get_tail(key, size) if size else None
        size = min(size, version.size)
        if not size:
            return None
        return await self.client.get(path, key, version.size - size, version.size, version)

    async def _read_head(self, path: str, key: str, size: int) -> tuple[ObjectVersion, bytes]:
        """Return the present version of an object, and its first bytes."""
        try:
            response = await self.client.get(path, key, 0, size, None)
            return response.version, response.join()
        except UnsupportedFileError:  # some servers respond like this for an empty file
            version = await self._head(path, key)
            if isinstance(version, Failure) or version.size:
                raise
            return version, b""
        except DataError as error:
            # Only the error for an object that has no such bytes has an offset
            if error.offset is None:
                raise
        version = await self._head(path, key)
        # Web servers may refuse a HEAD, and those of signed URLs do
        if isinstance(version, Failure) and version.kind is Kind.REFUSED:
            return ObjectVersion(size=0, etag="", modified=0), b""
        return _unwrap(path, version), b""

    async def _head(self, path: str, key: str) -> ObjectVersion | Failure:
        """Return the version of an empty object by a HEAD: it has no byte for a ranged GET."""
        import obstore

        seconds = self.client.timing.allow(0)

        async def attempt() -> ObjectVersion | Failure:
            nonlocal seconds
            seconds *= 2  # give a slow source more time on each attempt
            try:
                meta = await asyncio.wait_for(obstore.head_async(self.client.store, key), seconds)
            except (TimeoutError, asyncio.TimeoutError):  # not the same before Python 3.11
                return Failure(Kind.AGAIN, f"no answer for {seconds:.0f} s", "")
            except Exception as error:  # raised by the client: whatever it is
                return read_failure(error)
            return make_version(meta, versions=self.client.options.versions)

        return await self.client.retry(path, attempt)

    async def read_into(
        self,
        path: str,
        key: str,
        version: ObjectVersion,
        offsets: Int64s,
        sizes: Int64s,
        begins: Int64s,
        out: Bytes,
    ) -> None:
        """Read ranges of one version into `out`, by simultaneous requests: one for neighbours,
        several for a long range.

        Args:
            offsets, sizes: int64 [n], the bytes of each range in the object.
            begins: int64 [n], the begin of each range's bytes in `out`.

        Raises: ChangedFileError, MissingFileError, DataError.
        """
        parts = plan_requests(offsets, sizes, begins)
        view = out.data
        if len(parts) == 1:
            await self._read_part(path, key, version, parts[0], view)
            return
        await call_each(
            lambda part: self._read_part(path, key, version, part, view), parts, self.client.limiter
        )

    async def _read_part(
        self,
        path: str,
        key: str,
        version: ObjectVersion,
        part: PartRequest,
        out: memoryview,
    ) -> None:
        start, stop, begin = part
        response = await self.client.get(
            path, key, start, stop, version, out[begin : begin + stop - start]
        )
        # Not copied by numpy, which would release the interpreter's lock for each part
        for data in response.parts:
            out[begin : begin + len(data)] = data
            begin += len(data)

    async def find(
        self, pattern: str, address: Address
    ) -> tuple[Listed, Mapping[str, ObjectVersion]]:
        """Find the objects and folders that a pattern matches.

        Returns: the objects, sorted by key, and folders whose own key matches; by key, the versions
            of these objects and of all others that the listings contained.
        Raises: MissingFileError, DataError.
        """
        listed: dict[str, ObjectVersion] = {}
        folders = set[str]()

        def keep(objects: Sequence[Object]) -> None:
            listed.update((each["path"], make_version(each)) for each in objects)

        async def list_folder(folder: str) -> Listed:
            found = await self._list_folder(pattern, address, folder, is_there=folder in folders)
            folders.update(found.folders)
            keep(found.objects)
            return found

        async def list_all(folder: str) -> Sequence[Object]:
            found = await self._list_all(pattern, address, folder)
            keep(found)
            return found

        return await find_objects(address.key, list_folder, list_all), listed

    async def has_folder(self, path: str, key: str) -> bool:
        """Return whether there are objects with keys below a folder's. Raises: DataError."""
        # Only messages use the address, and they begin with `path`
        address = Address("", "", "")
        try:
            listed = await self._list_folder(path, address, key)
        except MissingFileError:
            return False
        return bool(listed.folders or listed.objects)

    async def _list_folder(
        self, pattern: str, address: Address, folder: str, *, is_there: bool = False
    ) -> Listed:
        """List a folder, and leave out objects that stand for folders.

        Args:
            is_there: whether another listing contains the folder. It is then listed a few times
                more if its listing is empty: a proxy may have answered with a web page, which the
                client takes for an empty listing.
        """
        listed = await self._list_once(pattern, address, folder)
        for _ in range(EMPTY_TRIES if is_there else 0):
            if listed.folders or listed.objects:
                break
            listed = await self._list_once(pattern, address, folder)
        markers = {folder, *listed.folders}
        return listed._replace(
            objects=[each for each in listed.objects if not _is_marker(each, markers)]
        )

    async def _list_once(self, pattern: str, address: Address, folder: str) -> Listed:
        """List a folder by one request, or more for a long listing."""
        import obstore

        async def attempt() -> Listed | Failure:
            try:
                listed = await obstore.list_with_delimiter_async(self._lister, folder or None)
            except Exception as error:  # raised by the client: whatever it is
                return _read_list_failure(error, address)
            folders = list(listed["common_prefixes"])
            self.client.counts.add_listing(
                [*folders, *(each["path"] for each in listed["objects"])]
            )
            return Listed(folders, listed["objects"])

        return _unwrap(pattern, await self.client.retry(pattern, attempt), is_list=True)

    async def _list_all(self, pattern: str, address: Address, folder: str) -> Sequence[Object]:
        """List the objects anywhere below a folder."""
        import obstore

        async def attempt() -> Sequence[Object] | Failure:
            try:
                listed = await obstore.list(
                    self._lister, folder or None, chunk_size=1000
                ).collect_async()
            except Exception as error:  # raised by the client: whatever it is
                return _read_list_failure(error, address)
            self.client.counts.add_listing([each["path"] for each in listed])
            return cast("Sequence[Object]", listed)

        found = _unwrap(pattern, await self.client.retry(pattern, attempt), is_list=True)
        return await self._leave_out_markers(pattern, address, folder, found)

    async def _leave_out_markers(
        self, pattern: str, address: Address, folder: str, objects: Sequence[Object]
    ) -> Sequence[Object]:
        """Leave out the empty objects that stand for folders, whose trailing slash the client
        removes.

        The object of an empty folder looks like an empty file here; a listing of its parent folder
        tells the two apart.
        """
        folders = {folder, *(each["path"].rpartition("/")[0] for each in objects)}
        unclear = [
            each["path"] for each in objects if not each["size"] and not _is_marker(each, folders)
        ]
        for parent in sorted({key.rpartition("/")[0] for key in unclear}):
            listed = await self._list_folder(pattern, address, parent, is_there=True)
            folders.update(listed.folders)
        return [each for each in objects if not _is_marker(each, folders)]


def _is_marker(found: Object, folders: Collection[str]) -> bool:
    """Return whether an object is empty and stands for one of `folders`, or is one of Hadoop's
    markers."""
    is_named = found["path"] in folders or found["path"].endswith(HADOOP_MARKER)
    return is_named and not found["size"]


def _read_list_failure(error: Exception, address: Address) -> Failure:
    """Return the meaning of an error of a LIST; see `read_failure`."""
    key = find_bad_key(error)
    if key is not None:
        remedy = (
            "copy it to a key without such parts and remove it, or use a pattern for another folder"
        )
        return Failure(
            Kind.BAD_KEY,
            f"the object {address.root}/{key} has an empty part, `.` or `..` between slashes",
            remedy,
        )
    return read_failure(error)


def _unwrap(location: str, found: T | Failure, *, is_list: bool = False) -> T:
    """Return what was found. Raises: MissingFileError, UnsupportedFileError or DataError for a
    failure."""
    if not isinstance(found, Failure):
        return found
    if found.kind is Kind.MISSING:
        raise MissingFileError(location, "no such object")
    doing = "listed" if is_list else "read"
    kind = UnsupportedFileError if found.kind is Kind.BAD_KEY else DataError
    raise kind(location, f"cannot be {doing}: {found.cause}: {found.remedy}")

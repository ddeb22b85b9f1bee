"""Listings of one bucket, by coroutines of the event loop: without the empty objects that stand for
folders, and without the empty listings that a proxy's web page looks like."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from megablend.errors import MissingFileError
from megablend.storage.objects.address import Address
from megablend.storage.objects.bucket import unwrap
from megablend.storage.objects.bucket_client import BucketClient
from megablend.storage.objects.failures import Failure, Kind, find_bad_key, read_failure
from megablend.storage.objects.listing import Listed, Object, find_objects
from megablend.storage.objects.object_version import ObjectVersion, make_version

EMPTY_TRIES = 3
"""The number of times that a folder which exists is listed again if its listing is empty."""
HADOOP_MARKER = "_$folder$"
"""The end of the keys of the empty objects by which Hadoop marks folders."""


class BucketLister:
    """Lists the objects and folders of a bucket.

    Args:
        client: retries the requests, and counts them.
        lister: obstore's store for listings.
    """

    def __init__(self, client: BucketClient, lister: Any) -> None:
        self._client = client
        self._lister = lister

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
                more if its listing is empty: a proxy may have responded with a web page, which the
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

        listed = await self._request(
            pattern,
            address,
            lambda: obstore.list_with_delimiter_async(self._lister, folder or None),
        )
        folders = list(listed["common_prefixes"])
        self._client.counts.add_listing([*folders, *(each["path"] for each in listed["objects"])])
        return Listed(folders, listed["objects"])

    async def _list_all(self, pattern: str, address: Address, folder: str) -> Sequence[Object]:
        """List the objects anywhere below a folder."""
        import obstore

        found: Sequence[Object] = await self._request(
            pattern,
            address,
            lambda: obstore.list(self._lister, folder or None, chunk_size=1000).collect_async(),
        )
        self._client.counts.add_listing([each["path"] for each in found])
        return await self._leave_out_markers(pattern, address, folder, found)

    async def _request(
        self, pattern: str, address: Address, send: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Send a request of a LIST until it succeeds. Raises: MissingFileError, DataError."""

        async def attempt() -> Any:
            try:
                return await send()
            except Exception as error:  # the client may raise anything
                return _read_list_failure(error, address)

        return unwrap(pattern, await self._client.retry(pattern, attempt), is_list=True)

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

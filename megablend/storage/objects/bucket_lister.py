"""Coroutines that list one bucket. They leave out the empty objects that represent folders, and
repeat a listing that may be empty because a proxy responded with a web page."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from megablend.errors import MissingFileError
from megablend.storage.file_table import count_bytes, list_texts
from megablend.storage.objects.address import Address
from megablend.storage.objects.bucket import unwrap
from megablend.storage.objects.bucket_client import BucketClient
from megablend.storage.objects.failures import Failure, Kind, find_bad_key, read_failure
from megablend.storage.objects.listing import find_objects
from megablend.storage.objects.object_table import (
    ObjectTable,
    find_location,
    join_tables,
    make_table,
)

EMPTY_TRIES = 3
"""The number of times that an existing folder is listed again if its listing is empty."""
HADOOP_MARKER = "_$folder$"
"""The suffix of the keys of empty objects with which Hadoop marks folders."""
_BATCH_ROWS = 10_000


class BucketLister:
    """A lister of the objects and folders of a bucket.

    Args:
        client: retries the requests, and counts them.
        lister: obstore's store for listings.
    """

    def __init__(self, client: BucketClient, lister: Any) -> None:
        self._client = client
        self._lister = lister

    async def find(self, pattern: str, address: Address) -> tuple[Sequence[str], ObjectTable]:
        """Find the objects and folders that a pattern matches.

        Returns: the locations of the folders that match the pattern themselves, and a table of the
            listed objects in any order. Not all of these objects match. If two objects have the
            same path, the last one counts.
        Raises: MissingFileError, DataError.
        """
        parts = list[ObjectTable]()
        known = set[str]()

        async def list_folder(folder: str) -> Sequence[str]:
            folders, objects = await self._list_folder(
                pattern, address, folder, is_there=folder in known
            )
            known.update(folders)
            parts.append(objects)
            return folders

        async def list_all(folder: str) -> None:
            parts.append(await self._list_all(pattern, address, folder))

        folders = await find_objects(address.key, list_folder, list_all)
        objects = join_tables(parts)
        exact = find_location(objects, f"{address.root}/{address.key}")
        if exact is not None:
            return [], exact
        return [f"{address.root}/{folder}" for folder in folders], objects

    async def has_folder(self, path: str, address: Address) -> bool:
        """Return whether there are objects in a folder, given its location. Raises: DataError."""
        try:
            folders, objects = await self._list_folder(path, address, address.key.rstrip("/"))
        except MissingFileError:
            return False
        return bool(folders or len(objects))

    async def _list_folder(
        self, pattern: str, address: Address, folder: str, *, is_there: bool = False
    ) -> tuple[Sequence[str], ObjectTable]:
        """List a folder, and leave out objects that represent folders.

        Args:
            is_there: whether another listing contains the folder. If so, an empty listing is
                requested again a few times: a proxy may have responded with a web page, which the
                client takes for an empty listing.

        Returns: the keys of the subfolders, without a trailing slash, and the objects in the
            folder.
        """
        import obstore

        async def attempt() -> Any:
            try:
                return await obstore.list_with_delimiter_async(
                    self._lister, folder or None, return_arrow=True
                )
            except Exception as error:  # the client may raise anything
                return _read_list_failure(error, address)

        for _ in range(1 + (EMPTY_TRIES if is_there else 0)):
            listed = unwrap(
                pattern, await self._client.policy.retry(pattern, attempt), is_list=True
            )
            folders = list(listed["common_prefixes"])
            objects = make_table(listed["objects"], address.root, address.key)
            num_letters = int(count_bytes(objects["location"]).sum()) + sum(map(len, folders))
            self._client.counts.add_listing(len(folders) + len(objects), num_letters)
            if folders or len(objects):
                break
        markers = {f"{address.root}/{name}" for name in (folder, *folders)}
        return folders, _leave_out(objects, markers)

    async def _list_all(self, pattern: str, address: Address, folder: str) -> ObjectTable:
        """List the objects anywhere below a folder, and leave out the empty objects that represent
        folders."""
        import obstore

        async def attempt() -> ObjectTable | Failure:
            parts = list[ObjectTable]()
            stream = obstore.list(
                self._lister, folder or None, chunk_size=_BATCH_ROWS, return_arrow=True
            )
            while True:
                try:
                    batch = await anext(stream, None)
                except Exception as error:  # the client may raise anything
                    return _read_list_failure(error, address)
                if batch is None:
                    return join_tables(parts)
                # Outside of the `try`, since an error here would occur again in a further attempt
                parts.append(make_table(batch, address.root, address.key))

        objects = unwrap(pattern, await self._client.policy.retry(pattern, attempt), is_list=True)
        num_letters = int(count_bytes(objects["location"]).sum())
        self._client.counts.add_listing(len(objects), num_letters)
        return await self._leave_out_markers(pattern, address, folder, objects)

    async def _leave_out_markers(
        self, pattern: str, address: Address, folder: str, objects: ObjectTable
    ) -> ObjectTable:
        """Leave out the empty objects that represent folders.

        The client removes the trailing slash of their keys, so the object of an empty folder looks
        like an empty file. A listing of the parent folder tells the two apart.
        """
        if objects["size"].to_numpy().all():
            return objects
        root = f"{address.root}/"
        folders = {root + folder}
        for begin in range(0, len(objects), _BATCH_ROWS):
            paths = list_texts(objects["location"], begin, begin + _BATCH_ROWS)
            folders.update(path.rpartition("/")[0] for path in paths)
        objects = _leave_out(objects, folders)
        unclear = list_texts(objects.filter(objects["size"].to_numpy() == 0)["location"])
        for parent in sorted({path[len(root) :].rpartition("/")[0] for path in unclear}):
            listed, _ = await self._list_folder(pattern, address, parent, is_there=True)
            folders.update(root + subfolder for subfolder in listed)
        return _leave_out(objects, folders)


def _leave_out(objects: ObjectTable, folders: Container[str]) -> ObjectTable:
    """Leave out Hadoop's markers, and the empty objects that represent the given folders."""
    is_kept = objects["size"].to_numpy() > 0
    empty = np.flatnonzero(~is_kept)
    paths = list_texts(objects["location"].take(empty))
    is_kept[empty] = [path not in folders and not path.endswith(HADOOP_MARKER) for path in paths]
    return objects.filter(is_kept)


def _read_list_failure(error: Exception, address: Address) -> Failure:
    """Return the Failure for an exception of a LIST request; see `read_failure`."""
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

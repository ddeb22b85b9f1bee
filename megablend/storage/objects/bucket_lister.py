"""Coroutines that list one bucket. They leave out the empty objects that represent folders, and
repeat a listing that may be empty because a proxy responded with a web page."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from megablend.errors import MissingFileError
from megablend.storage.objects.address import Address
from megablend.storage.objects.bucket import unwrap
from megablend.storage.objects.bucket_client import BucketClient
from megablend.storage.objects.failures import Failure, Kind, find_bad_key, read_failure
from megablend.storage.objects.listing import find_objects
from megablend.storage.objects.object_table import ObjectTable, ObjectTableBuilder, join_tables

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
        objects = parts[0] if len(parts) == 1 else join_tables(parts)
        exact = objects.paths.find(f"{address.root}/{address.key}")
        if len(exact):
            matches = np.zeros(len(objects.sizes), np.bool_)
            matches[exact] = True
            return [], objects._replace(matches=matches)
        return [f"{address.root}/{each}" for each in folders], objects

    async def has_folder(self, path: str, address: Address) -> bool:
        """Return whether there are objects in a folder, given its location. Raises: DataError."""
        try:
            folders, objects = await self._list_folder(path, address, address.key.rstrip("/"))
        except MissingFileError:
            return False
        return bool(folders or len(objects.sizes))

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
            objects = _make_table(listed["objects"], address)
            num_letters = len(objects.paths.letters) + sum(map(len, folders))
            self._client.counts.add_listing(len(folders) + len(objects.sizes), num_letters)
            if folders or len(objects.sizes):
                break
        markers = {f"{address.root}/{each}" for each in (folder, *folders)}
        return folders, _leave_out(objects, markers)

    async def _list_all(self, pattern: str, address: Address, folder: str) -> ObjectTable:
        """List the objects anywhere below a folder, and leave out the empty objects that represent
        folders."""
        import obstore

        async def attempt() -> ObjectTable | Failure:
            builder = ObjectTableBuilder()
            stream = obstore.list(
                self._lister, folder or None, chunk_size=_BATCH_ROWS, return_arrow=True
            )
            while True:
                try:
                    batch = await anext(stream, None)
                except Exception as error:  # the client may raise anything
                    return _read_list_failure(error, address)
                if batch is None:
                    return builder.build()
                # Outside of the `try`, since an error here would occur again in a further attempt
                builder.extend(_make_table(batch, address))

        objects = unwrap(pattern, await self._client.policy.retry(pattern, attempt), is_list=True)
        self._client.counts.add_listing(len(objects.sizes), len(objects.paths.letters))
        return await self._leave_out_markers(pattern, address, folder, objects)

    async def _leave_out_markers(
        self, pattern: str, address: Address, folder: str, objects: ObjectTable
    ) -> ObjectTable:
        """Leave out the empty objects that represent folders.

        The client removes the trailing slash of their keys, so the object of an empty folder looks
        like an empty file. A listing of the parent folder tells the two apart.
        """
        if objects.sizes.all():
            return objects
        root = f"{address.root}/"
        folders = {root + folder}
        for begin in range(0, len(objects.sizes), _BATCH_ROWS):
            paths = objects.paths.list_all(begin, begin + _BATCH_ROWS)
            folders.update(path.rpartition("/")[0] for path in paths)
        objects = _leave_out(objects, folders)
        unclear = objects.paths.take(objects.sizes == 0).list_all()
        for parent in sorted({path[len(root) :].rpartition("/")[0] for path in unclear}):
            listed, _ = await self._list_folder(pattern, address, parent, is_there=True)
            folders.update(root + each for each in listed)
        return _leave_out(objects, folders)


def _make_table(listed: Any, address: Address) -> ObjectTable:
    """Return a table made from obstore's metadata of objects."""
    return ObjectTable.of_arrow(listed, address.root, address.key)


def _leave_out(objects: ObjectTable, folders: Container[str]) -> ObjectTable:
    """Leave out Hadoop's markers, and the empty objects that represent the given folders."""
    is_kept = np.ones(len(objects.sizes), np.bool_)
    for row in np.flatnonzero(objects.sizes == 0).tolist():
        path = objects.paths.get(row)
        is_kept[row] = path not in folders and not path.endswith(HADOOP_MARKER)
    return objects if is_kept.all() else objects.take(is_kept)


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

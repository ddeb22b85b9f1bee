"""Coroutines that request the state of an object, and ranges of it, from one bucket or server."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, TypeVar

from megablend.arrays import Int64s
from megablend.errors import DataError, MissingFileError, RefusedFileError, UnsupportedFileError
from megablend.storage.base import Bytes
from megablend.storage.head_and_tail import HEAD_BYTES, HeadAndTail
from megablend.storage.objects.bucket_client import BucketClient, RangeResponse, explain_encoding
from megablend.storage.objects.failures import Failure, Kind
from megablend.storage.objects.object_version import ObjectVersion, make_version
from megablend.storage.objects.retry_policy import attempt_within
from megablend.storage.objects.workers import call_each

T = TypeVar("T")
MAX_PART_BYTES = 8 << 20
"""The maximum size of a range that one request reads. Longer ranges are requested in parts, all at
the same time."""


class PartRequest(NamedTuple):
    """A request that reads one range, a part of a long range, or several adjacent ranges."""

    start: int
    """The offset of the first byte in the object."""
    stop: int
    """The offset after the last byte in the object."""
    begin: int
    """The offset in memory at which the bytes are stored."""


def plan_requests(offsets: Int64s, sizes: Int64s, begins: Int64s) -> list[PartRequest]:
    """Plan the requests that read a list of ranges.

    Ranges that are adjacent in the object and in memory are read by one request, up to
    MAX_PART_BYTES. A longer range is read in parts. Empty ranges are not read.
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


async def stat(client: BucketClient, path: str, key: str) -> ObjectVersion:
    """Return the current version of an object. Raises: MissingFileError; DataError.

    A GET of the first byte is sent instead of a HEAD: a failed HEAD does not say why it failed, and
    many signed URLs do not allow a HEAD.
    """
    return (await _read_head(client, path, key, 1))[0]


async def read_ends(
    client: BucketClient, path: str, key: str, version: ObjectVersion | None, tail_bytes: int
) -> tuple[ObjectVersion, HeadAndTail]:
    """Request the version of an object, its head and its tail, by two simultaneous requests.

    Args:
        version: the version to read; None for the current version.
        tail_bytes: the number of bytes to request from the end of the object. The returned tail is
            empty if the server does not support such requests.

    Raises: the same errors as `stat`; ChangedFileError.
    """
    tasks = (
        asyncio.ensure_future(_read_begin(client, path, key, version)),
        asyncio.ensure_future(_read_tail(client, path, key, version, tail_bytes)),
    )
    try:
        (current, head), tail = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    if tail is None:
        return current, HeadAndTail(current.size, head, b"")
    # The object may have been replaced between the two requests
    is_same = current.find_difference(tail.version) is None
    return current, HeadAndTail(current.size, head, tail.join() if is_same else b"")


async def _read_begin(
    client: BucketClient, path: str, key: str, version: ObjectVersion | None
) -> tuple[ObjectVersion, bytes]:
    """Return the version of an object, and its head."""
    if version is not None:
        size = min(version.size, HEAD_BYTES)
        if not size:
            return version, b""
        response = await client.get(path, key, 0, size, version)
        return version, response.join()
    try:
        return await _read_head(client, path, key, HEAD_BYTES)
    except UnsupportedFileError:
        # A server may respond with the whole file if that is not longer
        return await _read_head(client, path, key, 1)


async def _read_tail(
    client: BucketClient, path: str, key: str, version: ObjectVersion | None, size: int
) -> RangeResponse | None:
    """Return the tail of an object; None if it has none or the server does not send it."""
    if version is None:
        return await client.get_tail(key, size) if size else None
    size = min(size, version.size)
    if not size:
        return None
    return await client.get(path, key, version.size - size, version.size, version)


async def _read_head(
    client: BucketClient, path: str, key: str, size: int
) -> tuple[ObjectVersion, bytes]:
    """Return the current version of an object, and its first bytes."""
    try:
        response = await client.get(path, key, 0, size, None)
        return response.version, response.join()
    except UnsupportedFileError:  # some servers respond like this for an empty file
        version = await _head(client, path, key)
        if isinstance(version, Failure) or version.size:
            await _check_encoding(client, path, key)
            raise
        return version, b""
    except DataError as error:
        # Only the error for an object that has no such bytes has an offset
        if error.offset is None:
            raise
    version = await _head(client, path, key)
    # Web servers may refuse a HEAD, as those of signed URLs do
    if isinstance(version, Failure) and version.kind is Kind.REFUSED:
        return ObjectVersion(size=0, etag="", modified=0), b""
    return unwrap(path, version), b""


async def _check_encoding(client: BucketClient, path: str, key: str) -> None:
    """Check that a server that sends no ranges does not compress its responses. Raises:
    UnsupportedFileError if it does."""
    import obstore

    seconds = client.timing.allow(0)
    response = await attempt_within(seconds, lambda: obstore.get_async(client.store, key))
    failure = None if isinstance(response, Failure) else explain_encoding(response)
    if failure is not None:
        raise UnsupportedFileError(path, f"cannot be read: {failure.cause}; {failure.remedy}")


async def _head(client: BucketClient, path: str, key: str) -> ObjectVersion | Failure:
    """Return the version of an empty object by a HEAD request, since an empty object has no byte
    for a ranged GET."""
    import obstore

    seconds = client.timing.allow(0)

    async def attempt() -> ObjectVersion | Failure:
        nonlocal seconds
        seconds *= 2  # give a slow source more time on each attempt
        meta = await attempt_within(seconds, lambda: obstore.head_async(client.store, key))
        if isinstance(meta, Failure):
            return meta
        return make_version(meta, versions=client.options.versions)

    return await client.policy.retry(path, attempt)


async def read_into(
    client: BucketClient,
    path: str,
    key: str,
    version: ObjectVersion,
    offsets: Int64s,
    sizes: Int64s,
    begins: Int64s,
    out: Bytes,
) -> None:
    """Read ranges of one version of an object into `out`, by simultaneous requests: one request for
    adjacent ranges, several for a long range.

    Args:
        offsets, sizes: the offset and size of each range in the object, in bytes (int64 [n]).
        begins: the offset in `out` at which each range is stored (int64 [n]).

    Raises: ChangedFileError, MissingFileError, DataError.
    """
    parts = plan_requests(offsets, sizes, begins)
    view = out.data
    if len(parts) == 1:
        await _read_part(client, path, key, version, parts[0], view)
        return
    await call_each(
        lambda part: _read_part(client, path, key, version, part, view), parts, client.limiter
    )


async def _read_part(
    client: BucketClient,
    path: str,
    key: str,
    version: ObjectVersion,
    part: PartRequest,
    out: memoryview,
) -> None:
    start, stop, begin = part
    response = await client.get(path, key, start, stop, version, out[begin : begin + stop - start])
    # Not copied by numpy, which would release the interpreter's lock for each part
    for data in response.parts:
        out[begin : begin + len(data)] = data
        begin += len(data)


def unwrap(location: str, found: T | Failure, *, is_list: bool = False) -> T:
    """Return the result of a request, or raise the error for its failure: MissingFileError,
    UnsupportedFileError or RefusedFileError."""
    if not isinstance(found, Failure):
        return found
    if found.kind is Kind.MISSING:
        raise MissingFileError(location, "no such object")
    doing = "listed" if is_list else "read"
    error_class = UnsupportedFileError if found.kind is Kind.BAD_KEY else RefusedFileError
    raise error_class(location, f"cannot be {doing}: {found.cause}; {found.remedy}")

"""Serves the files of datasets over HTTP:

    GET, HEAD /v1/data/{dataset}/{revision or latest}/{path}[?block=n]

Pages that are not held are fetched, as for a reader on this machine. So a revision can be read even
if it is incomplete on this node, or not wanted. The response for a path that ends with a slash is a
list of the files in that folder. Each line is a URL with a signature, by which the file can be read
without the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote_to_bytes
from weakref import WeakValueDictionary

import numpy as np
from aiohttp import ETag, web

from megablend.errors import (
    ChangedFileError,
    ConfigError,
    MegablendError,
    MissingFileError,
    ResourceError,
)
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import (
    BLOCK_BYTES,
    PAGE_BYTES,
    PORTION_BLOCKS,
    count_pages,
    pages_of_ranges,
)
from megablend.mirror.node.engine import AwayError, Engine, Origins, Want

if TYPE_CHECKING:
    from megablend.mirror.catalog.datasets import Datasets
    from megablend.mirror.catalog.manifest import DataFile

ROOT = "/v1/data/"
_PORTION_BYTES = PORTION_BLOCKS * BLOCK_BYTES
_NUM_AHEAD = 8
"""The maximum number of portions of a response that are in progress: one is sent while the next
ones are fetched."""
_MOST_SENDING = 64
"""The maximum number of portions in memory, for all responses together."""
_MOST_OF_ONE = 48
"""The maximum number of portions in memory for the clients of one machine, since they may stop
reading."""
_SLOW_SECONDS = 60.0
"""Seconds that a client gets to read a portion. A response also waits this long for an unreachable
node."""
_BUSY_SECONDS = 5.0
"""Seconds that a client gets to read a portion while other responses wait for memory."""
_RETRY_SECONDS = 1.0
_LINES_AT_A_TIME = 1000
"""The number of lines of a list of files that are formatted and sent at a time."""
_NUMBER = re.compile(r"[0-9]{1,12}")
_RANGE = re.compile(r"(?i:bytes)=([0-9]{0,18})-([0-9]{0,18})")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f/]")


class Place(NamedTuple):
    """The file or folder of a dataset that a URL names."""

    dataset: str
    revision: str
    path: str
    """The path in the dataset. The path of a folder is empty or ends with a slash."""

    @classmethod
    def of_url(cls, raw_path: str) -> Place:
        """Parse the percent-encoded path of a URL. Raises: ValueError if it is not valid."""
        encoded = raw_path.partition("?")[0].removeprefix(ROOT).split("/")
        parts = [unquote_to_bytes(part).decode("utf-8", "surrogateescape") for part in encoded]
        is_folder = len(parts) > 2 and parts[-1] == ""
        for part in parts[:-1] if is_folder else parts:
            if part in ("", ".", "..") or _FORBIDDEN.search(part):
                raise ValueError(f"found {part!r} between slashes, expected a name")
        if len(parts) < 2:
            raise ValueError("expected a dataset, a revision and a path")
        return cls(parts[0], parts[1], "/".join(parts[2:]))

    def sign(self, token: bytes) -> str:
        """Return the signature of this file's URL, by which it can be read without the token."""
        text = json.dumps(self).encode()
        return hmac.new(token, text, hashlib.sha256).hexdigest()

    def __str__(self) -> str:
        parts = (self.dataset, self.revision, self.path)
        return ROOT + "/".join(quote(part.encode("utf-8", "surrogateescape")) for part in parts)


class Files:
    """Responds to requests for files of datasets.

    Args:
        engine: fetches and reads pages.
        find_datasets: returns the datasets of the mirror; None if there are none.
        token: the secret that is used to sign URLs.
        warn: logs a warning about a refused request, given the client's address and a text.
    """

    def __init__(
        self,
        engine: Engine,
        find_datasets: Callable[[], Awaitable[Datasets | None]],
        token: bytes,
        warn: Callable[[str | None, str], None],
    ) -> None:
        self._warn = warn
        self._engine = engine
        self._find_datasets = find_datasets
        self._token = token
        self._turns = asyncio.Semaphore(_MOST_SENDING)
        self._turns_of = WeakValueDictionary[str | None, asyncio.Semaphore]()
        self.num_bytes = 0
        """The number of bytes of files that were sent."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Respond to a request for a file, a block of a file, or a list of files."""
        block = request.query.get("block")
        try:
            place = Place.of_url(request.raw_path)
            if block is not None and not _NUMBER.fullmatch(block):
                raise ValueError(f"block: found {block!r}, expected a number")
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from None
        datasets = await self._find_datasets()
        if datasets is None:
            raise web.HTTPNotFound(text="no dataset has been added to this mirror\n")
        try:
            revision, files = await datasets.find_files(f"{place.dataset}@{place.revision}")
        except MegablendError as error:
            raise _refuse(error) from None
        place = place._replace(revision=revision.digest)
        if not place.path or place.path.endswith("/"):
            return await self._list(request, place, files)
        index = bisect_left(files, (place.path,))  # files are sorted by path
        if index == len(files) or files[index].path != place.path:
            raise web.HTTPNotFound(
                text=f"{revision} has no file {place.path!r}\nto list a folder, end its path with a slash\n"
            )
        key = files[index].key
        tag = ETag(key.digest if block is None else f"{key.digest}-{block}")
        part = range(key.size)
        if block is not None:
            part = part[int(block) * BLOCK_BYTES :][:BLOCK_BYTES]
            if not part:
                raise web.HTTPNotFound(text=f"the file has {-(-key.size // BLOCK_BYTES)} blocks\n")
        return await self._answer_file(request, key, tag, part)

    async def _list(
        self, request: web.Request, place: Place, files: Sequence[DataFile]
    ) -> web.StreamResponse:
        """Respond with the signed URLs of all files below a folder."""
        first = bisect_left(files, (place.path,))
        # "0" is the character after the slash at the end of the folder's path
        stop = bisect_left(files, (f"{place.path[:-1]}0",)) if place.path else len(files)
        if first == stop:
            raise web.HTTPNotFound(text=f"there are no files below {place.path!r}\n")
        response = web.StreamResponse()
        response.content_type = "text/uri-list"
        if request.method == "HEAD":
            return response
        await response.prepare(request)
        for begin in range(first, stop, _LINES_AT_A_TIME):
            lines = list[str]()
            for file in files[begin : min(stop, begin + _LINES_AT_A_TIME)]:
                target = place._replace(path=file.path)
                signature = target.sign(self._token)
                lines.append(f"{request.scheme}://{request.host}{target}?signature={signature}\n")
            await response.write("".join(lines).encode())
        return response

    async def _answer_file(
        self, request: web.Request, key: FileKey, tag: ETag, part: range
    ) -> web.StreamResponse:
        """Respond with a part of a file. If there is a Range header, respond with this range of the
        part."""
        response = web.StreamResponse()
        response.etag = tag
        response.headers["Accept-Ranges"] = "bytes"
        response.content_type = "application/octet-stream"
        if not _contains(request.if_match, tag, when_absent=True):
            raise web.HTTPPreconditionFailed
        if _contains(request.if_none_match, tag, when_absent=False):
            response.set_status(304)
            return response
        requested = _find_range(request, len(part), f'"{tag.value}"')
        if requested is not None:
            if not requested:
                headers = {"Content-Range": f"bytes */{len(part)}"}
                raise web.HTTPRequestRangeNotSatisfiable(headers=headers)
            headers = {"Content-Range": f"bytes {requested[0]}-{requested[-1]}/{len(part)}"}
            response.headers.update(headers)
            response.set_status(206)
            part = part[requested.start : requested.stop]
        response.content_length = len(part)
        if request.method == "GET":
            await self._send(request, response, key, part)
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, key: FileKey, part: range
    ) -> None:
        """Send a part of a file portion by portion, while the next portions are fetched."""
        begins = range(part.start - part.start % _PORTION_BYTES, part.stop, _PORTION_BYTES)

        def cut(begin: int) -> range:
            return range(max(begin, part.start), min(begin + _PORTION_BYTES, part.stop))

        ahead = set[asyncio.Task[Origins]]()
        num_started = 1  # the first portion is fetched as it is sent
        try:
            for i, begin in enumerate(begins):
                for later_begin in begins[num_started : i + _NUM_AHEAD]:
                    task = asyncio.ensure_future(self._engine.serve(_want(key, cut(later_begin))))
                    ahead.add(task)
                    task.add_done_callback(ahead.discard)
                    # A failure is ignored here: the portion is fetched again when it is sent
                    task.add_done_callback(lambda task: task.cancelled() or task.exception())
                num_started = i + _NUM_AHEAD
                await self._send_portion(request, response, key, cut(begin))
        except (MegablendError, AwayError, asyncio.TimeoutError) as error:
            if not response.prepared:
                raise _refuse(error) from None
            reason = str(error) or "the client did not read the data"
            self._warn(request.remote, f"stopped sending {key.location}: {reason}")
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client is gone
        finally:
            for task in list(ahead):
                task.cancel()

    async def _send_portion(
        self, request: web.Request, response: web.StreamResponse, key: FileKey, part: range
    ) -> None:
        """Fetch and send one portion. Raises: the same errors as Engine.obtain; TimeoutError if the
        client does not read the portion in time."""
        want = _want(key, part)
        turns = self._turns_of.setdefault(request.remote, asyncio.Semaphore(_MOST_OF_ONE))
        deadline = time.monotonic() + _SLOW_SECONDS
        while True:
            try:
                await self._engine.serve(want)
                async with turns, self._turns:
                    held, data = await self._engine.read_held(want)
                    if count_pages(held) == count_pages(want.pages):
                        await response.prepare(request)
                        begin = part.start % PAGE_BYTES
                        portion = memoryview(data)[begin : begin + len(part)]
                        await self._write(turns, response, portion)
                        self.num_bytes += len(portion)
                        return
                problem: Exception = ResourceError(
                    "the data was damaged or evicted on every attempt to read it"
                )
            except AwayError as error:
                problem = error
            if time.monotonic() > deadline:
                raise problem
            await asyncio.sleep(_RETRY_SECONDS)

    async def _write(
        self, own_turns: asyncio.Semaphore, response: web.StreamResponse, data: memoryview
    ) -> None:
        """Send bytes, which count against the limit of the client's machine. Raises: TimeoutError
        if the client does not read them in time."""
        begin = time.monotonic()
        writing = asyncio.ensure_future(response.write(data))
        try:
            while not writing.done():
                await asyncio.wait([writing], timeout=_BUSY_SECONDS)
                is_busy = self._turns.locked() or own_turns.locked()
                limit = _BUSY_SECONDS if is_busy else _SLOW_SECONDS
                if not writing.done() and time.monotonic() - begin >= limit:
                    raise asyncio.TimeoutError(
                        f"the client did not read the data within {limit:.0f} s"
                    )
            writing.result()
        finally:
            writing.cancel()


def _want(key: FileKey, part: range) -> Want:
    return Want(key, pages_of_ranges(np.array([part.start]), np.array([len(part)])))


def _contains(tags: Sequence[ETag] | None, own: ETag, *, when_absent: bool) -> bool:
    """Return whether the etags of a header contain `own`. Without the header, return
    `when_absent`."""
    if tags is None:
        return when_absent
    return any(tag.value in ("*", own.value) and not tag.is_weak for tag in tags)


def _find_range(request: web.Request, size: int, tag: str) -> range | None:
    """Return the range of bytes that a request asks for, which is empty if it is beyond the end of
    the file. Return None if the whole file should be sent, because the request has no Range header,
    or one with several ranges."""
    match = _RANGE.fullmatch(request.headers.get("Range", ""))
    if request.method != "GET" or match is None or request.headers.get("If-Range", tag) != tag:
        return None
    first, last = match.groups()
    if not first:
        return range(max(0, size - int(last)), size) if last else None
    if last and int(last) < int(first):
        return None
    return range(int(first), min(size, int(last) + 1) if last else size)


def _refuse(error: Exception) -> web.HTTPException:
    """Return the HTTP error response for an exception."""
    text = f"{error}\n"
    if isinstance(error, ConfigError):
        return web.HTTPNotFound(text=text)
    if isinstance(error, MissingFileError | ChangedFileError):
        happened = "was deleted or replaced at the source after it was listed"
        remedy = (
            "make a revision of the files that exist now: `megablend datasets add NAME SOURCE...`"
        )
        return web.HTTPGone(text=f"{error.path}: {happened}\n{remedy}\n")
    if isinstance(error, AwayError | ResourceError | asyncio.TimeoutError):
        return web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "5"})
    return web.HTTPBadGateway(text=text)

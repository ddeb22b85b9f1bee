"""A source of files over HTTP (and S3 as far as reading goes) that fails on request: a real server, seeded and counting.

Paths are `/bucket/key`, as S3's path style has them; signatures are not looked at. `?list-type=2` lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from megablend.system.close_server import close_server

T = TypeVar("T")
CHUNK = 1 << 14
PAGE = b"<!doctype html><title>Log in</title>"


@lru_cache(maxsize=4096)
def _md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Shares of the answers (0 to 1) that go wrong, each in its way; times in seconds."""

    latency: float = 0.0
    tail: float = 0.0
    """Answers that take 100 times as long."""
    status: Mapping[int, float] = field(default_factory=dict)
    """Answers of a status in place of the file, such as {503: 0.2}."""
    retry_after: int | None = None
    """The header of answers of such a status."""
    page: float = 0.0
    """Web pages in place of the file or the listing, as if all were well."""
    silent: float = 0.0
    """Requests that are never answered."""
    reset: float = 0.0
    """Connections closed without an answer."""
    truncated: float = 0.0
    """Connections closed in the middle of the body."""
    stall: float = 0.0
    """Bodies that never end."""
    flip: float = 0.0
    """Bodies with one bit flipped."""
    rate: float | None = None
    """Bytes a second of all answers together."""
    round: float | None = None
    """Requests of a file are answered together, when none has come for so many seconds: a round, which is counted."""
    together: int = 0
    """Answers wait until so many requests have been in flight at once: this does not depend on the machine's speed."""
    seed: int = 0


FAULTS = {
    "latency": Faults(latency=0.002, tail=0.2),
    "503": Faults(status={503: 0.2}),
    "429": Faults(status={429: 0.2}),
    "500": Faults(status={500: 0.2}),
    "reset": Faults(reset=0.2),
    "truncated": Faults(truncated=0.2),
    "stall": Faults(stall=0.2),
    "silent": Faults(silent=0.2),
}
"""Each fault alone, by name."""


@dataclass
class _Round:
    """Requests of a file that are answered together."""

    last: float = 0.0
    is_over: bool = False


class FaultySource:
    """Serves `files` (`bucket/key` to bytes) on loopback while it is entered.

    Set `faults`, `is_down`, `ignores_conditions`, `is_expired` (of an access key), `has_tails` (answers requests for the end of a
    file), `listed_bytes` (sizes in listings), `damages` (by file, a byte that is wrong in the first answer with it) and `pages`
    (by a part of their URLs, how many requests are answered with a web page) at any time.
    Counts: `requests` and `faulty` (by kind), `bytes` sent, `most_in_flight`, `rounds` by file.
    """

    def __init__(self, files: dict[str, bytes], faults: Faults | None = None) -> None:
        self.files = files
        self.faults = faults or Faults()
        self.is_down = self.ignores_conditions = False
        self.weak_etags = self.no_etags = False
        self.denied = ""
        """A part of the path of files that must not be read; they are listed."""
        self.has_tails = True
        self.is_expired: Callable[[str], bool] | None = None
        self.listed_bytes: int | None = None
        self.body = b""
        self.damages: dict[str, int] = {}
        self.pages: Counter[str] = Counter()
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.requests = self.bytes = self.in_flight = self.most_in_flight = 0
        self.faulty: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        self._rounds: dict[str, _Round] = {}
        self._random = random.Random(self.faults.seed)
        self._sent_until = 0.0
        self._loop = asyncio.new_event_loop()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FaultySource:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=500)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=500)

    async def _stop(self) -> None:
        await close_server(self._server)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)
        for writer in self._writers:  # also those whose task had not begun
            writer.transport.abort()
        await asyncio.sleep(0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            while not self.is_down:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = {
                    name.lower(): value
                    for name, _, value in (line.partition(": ") for line in head[1:] if line)
                }
                target, mark, signature = target.partition("?X-Amz-Algorithm=")
                if mark:  # in the URL instead of a header
                    signed = parse_qs(signature)
                    headers["authorization"] = f"Credential={signed['X-Amz-Credential'][0]}"
                    headers["x-amz-date"] = signed["X-Amz-Date"][0]
                self.requests += 1
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                self.paths.append(target)
                self.headers.append(headers)
                try:
                    if self.is_down or not await self._answer(writer, method, target, headers):
                        break
                finally:
                    self.in_flight -= 1
        writer.close()

    def _draw(self, kind: str, share: float) -> bool:
        drawn = share > 0 and self._random.random() < share
        self.faulty[kind] += drawn
        return drawn

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]
    ) -> bool:
        """Returns: whether the connection stays open."""
        faults = self.faults
        while self.most_in_flight < faults.together:
            await asyncio.sleep(0.001)
        await asyncio.sleep(faults.latency * (100 if self._draw("tail", faults.tail) else 1))
        if faults.round is not None:
            await self._await_round(urlsplit(target).path, faults.round)
        if self._draw("silent", faults.silent):
            await asyncio.sleep(3600)
        if self._draw("reset", faults.reset):
            return False
        paged = [each for each, count in self.pages.items() if count and each in target]
        self.pages.subtract(paged)
        if paged or self._draw("page", faults.page):
            return await self._send(writer, method, 200, {"Content-Type": "text/html"}, PAGE)
        if self.denied and self.denied in target:
            return await self._send(writer, method, 403, {}, self.body)
        for status, share in faults.status.items():
            if self._draw(str(status), share):
                after = faults.retry_after
                more = {} if after is None else {"Retry-After": str(after)}
                return await self._send(writer, method, status, more, self.body)
        key = headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
        if self.is_expired is not None and self.is_expired(key):
            self.faulty["expired"] += 1
            return await self._send(
                writer, method, 400, {}, b"<Error><Code>ExpiredToken</Code></Error>"
            )
        url = urlsplit(target)
        path = unquote(url.path).removeprefix("/")
        query = parse_qs(url.query, keep_blank_values=True)
        if "list-type" in query:
            body = self._list(
                path.strip("/"), query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
            )
            return await self._send(writer, method, 200, {"Content-Type": "application/xml"}, body)
        data = self.files.get(path)
        if data is None:
            is_bucket = any(name.split("/")[0] == path.split("/")[0] for name in self.files)
            code = "NoSuchKey" if is_bucket else "NoSuchBucket"
            return await self._send(
                writer, method, 404, {}, f"<Error><Code>{code}</Code></Error>".encode()
            )
        etag = f'"{_md5(data)}"'
        if not self.ignores_conditions and headers.get("if-match", etag) != etag:
            return await self._send(writer, method, 412, {}, b"")
        return await self._send_file(
            writer, method, headers, path, f"W/{etag}" if self.weak_etags else etag
        )

    async def _await_round(self, path: str, seconds: float) -> None:
        current = self._rounds.get(path)
        if current is None or current.is_over:
            current = self._rounds[path] = _Round()
            self.rounds[unquote(path).strip("/")] += 1
        current.last = self._loop.time()
        while (left := current.last + seconds - self._loop.time()) > 0:
            await asyncio.sleep(left)
        current.is_over = True

    async def _send_file(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        headers: dict[str, str],
        path: str,
        etag: str,
    ) -> bool:
        data = self.files[path]
        start = 0
        stop = len(data)
        status = 200
        more = {}
        if (wanted := headers.get("range", "")).startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            if not first and not self.has_tails:
                return await self._send(writer, method, 400, {}, b"")
            start = int(first) if first else max(0, len(data) - int(last))
            stop = min(len(data), int(last) + 1 if first and last else len(data))
            status = 206
            if start >= len(data):
                return await self._send(
                    writer, method, 416, {"Content-Range": f"bytes */{len(data)}"}, b""
                )
            more = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        body = data[start:stop]
        if len(body) > 1 and self._draw("flip", self.faults.flip):
            changed = bytearray(body)
            changed[self._random.randrange(len(body))] ^= 1 << self._random.randrange(8)
            body = bytes(changed)
        if method == "GET" and start <= self.damages.get(path, -1) < stop:
            place = self.damages.pop(path) - start
            body = body[:place] + bytes([body[place] ^ 0x55]) + body[place + 1 :]
            self.faulty["damage"] += 1
        if not self.no_etags:
            more["ETag"] = etag
        return await self._send(
            writer, method, status, more | {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, body
        )

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        status: int,
        headers: dict[str, str],
        body: bytes,
    ) -> bool:
        lines = [
            f"HTTP/1.1 {status} x",
            *(f"{k}: {v}" for k, v in headers.items()),
            f"Content-Length: {len(body)}",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if method == "HEAD":
            body = b""
        is_file = status in (200, 206) and len(body) > 1
        ends = is_file and self._draw("truncated", self.faults.truncated)
        stalls = is_file and not ends and self._draw("stall", self.faults.stall)
        for begin in range(0, len(body), CHUNK):
            part = body[begin : begin + CHUNK]
            if (ends or stalls) and begin + CHUNK >= len(body):
                part = part[: len(part) // 2]
            await self._wait_for_rate(len(part))
            writer.write(part)
            self.bytes += len(part)
            await writer.drain()
        if stalls:
            await asyncio.sleep(3600)
        return not ends

    async def _wait_for_rate(self, size: int) -> None:
        if self.faults.rate is not None:
            now = self._loop.time()
            self._sent_until = max(self._sent_until, now) + size / self.faults.rate
            await asyncio.sleep(self._sent_until - now)

    def _list(self, bucket: str, prefix: str, delimiter: str) -> bytes:
        keys = [name.partition("/")[2] for name in self.files if name.startswith(f"{bucket}/")]
        folders = set()
        objects = []
        for key in sorted(keys):
            rest = key[len(prefix) :]
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                data = self.files[f"{bucket}/{key}"]
                objects.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
                    f"<ETag>&quot;{_md5(data)}&quot;</ETag><Size>{self.listed_bytes or len(data)}</Size></Contents>"
                )
        prefixes = [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
            for each in sorted(folders)
        ]
        return (
            f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{''.join(objects + prefixes)}"
            "</ListBucketResult>"
        ).encode()

"""A client of etcd 3.4 and later, which uses the JSON gateway over aiohttp. It has only the calls
that mirrors need.

Keys are strings, and values are bytes. Requests are sent to one endpoint, and to the next one if
that endpoint does not respond.
"""

from __future__ import annotations

import asyncio
import base64
import math
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import aiohttp

from megablend.errors import ConfigError, ResourceError
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG

_PATIENCE_SECONDS = 5.0
_SILENT_SECONDS = 30.0
"""Seconds without events after which a watch is started again, since the connection may be dead."""
_FAILED_PRECONDITION = 9
"""gRPC's status code FAILED_PRECONDITION: the present state of etcd does not permit the request."""
_UNAVAILABLE = (2, 4, 8, 13, 14)
"""gRPC's status codes of temporary failures: UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED,
INTERNAL and UNAVAILABLE."""


class EtcdAwayError(ResourceError):
    """Raised if no endpoint responds. A change that was requested may or may not have been made."""


class StartOverError(Exception):
    """Raised if etcd no longer knows the changes since a revision, so that all keys have to be read
    again."""


class Value(NamedTuple):
    """The value of a key in etcd."""

    data: bytes
    revision: int
    """The revision of etcd in which the key was last written."""


class Etcd:
    """A client of etcd. It must be used from only one event loop.

    A request raises EtcdAwayError if no endpoint responds, and ConfigError if an endpoint is not
    etcd or refuses the user.

    Args:
        endpoints: URLs, such as http://host:2379.
        tls: the TLS context for https; None to trust the system's certificate authorities.
        user, password: the credentials; None if etcd requires none.
        patience: the number of seconds to wait for a response of an endpoint.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._tls = tls
        self._user = user
        self._password = password
        self._patience = patience
        self._token = ""
        self._http: aiohttp.ClientSession | None = None
        self.away_since: float | None = None
        """The time at which etcd became unreachable, in seconds since 1970; None while it
        responds."""
        self.away_at = -math.inf
        """The monotonic time at which etcd last became unreachable, or responded again."""
        self.trouble = ""
        """Why etcd does not respond; "" while it does."""
        self._has_responded = False

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()

    async def get(self, prefix: str) -> tuple[dict[str, Value], int]:
        """Read all keys with a prefix. Returns: the values by key; the present revision of etcd."""
        answer = await self._ask("kv/range", _range_of(prefix))
        values = {_text(pair["key"]): _value_of(pair) for pair in answer.get("kvs", ())}
        return values, _revision_of(answer)

    async def list_keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix."""
        answer = await self._ask("kv/range", _range_of(prefix) | {"keys_only": True})
        return [_text(pair["key"]) for pair in answer.get("kvs", ())]

    async def change(
        self,
        expected: Mapping[str, int],
        puts: Mapping[str, bytes],
        deletes: Collection[str] = (),
        lease: int = 0,
    ) -> int | None:
        """Change keys in one transaction, provided that some keys have their expected revisions.

        Args:
            expected: the expected revisions by key; 0 for a key that must not exist.
            puts: the new values by key.
            deletes: the keys to delete.
            lease: the id of the lease with which the new values expire; 0 for none.

        Returns: the revision of etcd after the changes; None if nothing was changed, since a key
            did not have its expected revision.
        """
        request = {
            "compare": [
                {"key": _code(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(known)}
                for key, known in expected.items()
            ],
            "success": [
                *[
                    {"request_put": {"key": _code(key), "value": _code(data), "lease": str(lease)}}
                    for key, data in puts.items()
                ],
                *[{"request_delete_range": {"key": _code(key)}} for key in deletes],
            ],
        }
        answer = await self._ask("kv/txn", request, is_change=True)
        return _revision_of(answer) if answer.get("succeeded") else None

    async def grant(self, seconds: float) -> int:
        """Request a lease, which expires after `seconds` unless renewed. Returns: its id."""
        answer = await self._ask("lease/grant", {"TTL": str(max(1, round(seconds)))})
        return int(answer["ID"])

    async def keep(self, lease: int) -> bool:
        """Renew a lease for its full duration. Returns: False if the lease has expired."""
        answer = await self._ask("lease/keepalive", {"ID": str(lease)})
        return int(answer["result"].get("TTL", 0)) > 0

    async def watch(
        self, prefix: str, from_revision: int
    ) -> AsyncIterator[list[tuple[str, Value | None, int]]]:
        """Yield the changes of keys that begin with a prefix, from the revision `from_revision` on.
        Each list that is yielded contains triples of a key, its value (None if it was deleted) and
        its revision. The iterator ends only with an error. Raises: StartOverError if etcd no longer
        knows these changes, has lost its data, or requires the password again."""
        while True:
            request = _range_of(prefix) | {"start_revision": str(from_revision)}
            async with aclosing(self._stream({"create_request": request})) as results:
                async for result in results:
                    is_refused = result.get("canceled") and "compact_revision" not in result
                    if is_refused and not self._token:
                        raise self._refusal(self._endpoints[0], result.get("cancel_reason", ""))
                    # True if etcd's data were restored from an older copy
                    is_older = result.get("created") and _revision_of(result) < from_revision - 1
                    if result.get("canceled") or is_older:
                        raise StartOverError
                    events = result.get("events")
                    if events:
                        changes = [_change_of(event) for event in events]
                        from_revision = max(revision for _, _, revision in changes) + 1
                        yield changes

    async def _stream(self, request: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the results of a watch at the first endpoint, until the endpoint is silent for too
        long. Raises: the errors of all requests; StartOverError if the token is no longer valid."""
        endpoint = self._endpoints[0]
        try:
            async with self._post(endpoint, "watch", request, total=None) as answer:
                if answer.status != 200:
                    self._read(endpoint, answer.status, await answer.read())
                async for line in _read_lines(answer.content):
                    yield self._read(endpoint, 200, line)["result"]
        except _InvalidTokenError:
            raise StartOverError from None
        except (aiohttp.ClientError, OSError) as error:
            self._turn_away(endpoint)
            raise self._note_away(f"{endpoint}: {error}") from None

    async def _ask(self, path: str, request: Any, *, is_change: bool = False) -> dict[str, Any]:
        """Send a request to one endpoint after another, until one responds, and return the
        response."""
        problems = []
        for endpoint in list(self._endpoints):
            try:
                answer = await self._ask_as_user(endpoint, path, request)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                trouble = str(error) or f"no response for {self._patience:g} s"
                problems.append(f"{endpoint}: {trouble}")
                self._turn_away(endpoint)
                if is_change and not isinstance(error, aiohttp.ClientConnectorError):
                    break  # the change may have been made: it must not be requested twice
                continue
            self._has_responded = True
            if self.away_since is not None:
                self.away_at = time.monotonic()
                LOG.warning(
                    "mirror: etcd responds again after %.0f s", time.time() - self.away_since
                )
                self.away_since = None
                self.trouble = ""
            return answer
        raise self._note_away("; ".join(problems))

    def _turn_away(self, endpoint: str) -> None:
        """Move an endpoint that does not respond to the end of the list."""
        self._endpoints.sort(key=lambda candidate: candidate == endpoint)

    def _note_away(self, trouble: str) -> EtcdAwayError:
        self.trouble = trouble
        self.away_at = time.monotonic()
        if self.away_since is None:
            self.away_since = time.time()
            # Before the first response, the caller reports the error
            if self._has_responded:
                LOG.warning("mirror: etcd is unreachable: %s", trouble)
        return EtcdAwayError(
            f"etcd is unreachable: {trouble}\nstart it, or correct `mirror.etcd.endpoints`"
        )

    async def _ask_as_user(self, endpoint: str, path: str, request: Any) -> dict[str, Any]:
        """Send a request with the user's token, which is renewed if it is no longer valid."""
        if self._token:
            try:
                return await self._ask_one(endpoint, path, request)
            except _InvalidTokenError:
                self._token = ""
        if self._user is not None:
            credentials = {"name": self._user, "password": self._password or ""}
            answer = await self._ask_one(endpoint, "auth/authenticate", credentials)
            self._token = answer.get("token", "")
        return await self._ask_one(endpoint, path, request)

    async def _ask_one(self, endpoint: str, path: str, request: Any) -> dict[str, Any]:
        async with self._post(endpoint, path, request, total=self._patience) as answer:
            return self._read(endpoint, answer.status, await answer.read())

    def _post(self, endpoint: str, path: str, request: Any, *, total: float | None) -> Any:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    # No keep-alive: if etcd has exited since, it is unknown whether a change was made
                    force_close=True,
                    ssl=self._tls or True,
                )
            )
        return self._http.post(
            f"{endpoint}/v3/{path}",
            json=request,
            headers={"Authorization": self._token} if self._token else {},
            timeout=aiohttp.ClientTimeout(
                total=total, sock_connect=self._patience, sock_read=_SILENT_SECONDS
            ),
            allow_redirects=False,
        )

    def _read(self, endpoint: str, status: int, body: bytes) -> dict[str, Any]:
        """Parse the body of a response. Raises: _InvalidTokenError; ClientError if the endpoint is
        unavailable; ConfigError if the endpoint refuses the request, or is not etcd."""
        try:
            result = parse_json(body)
            error = result.get("error")
        except (ValueError, AttributeError):
            if b"CommonName" in body:
                raise ConfigError(
                    f"etcd: the gateway of {endpoint} refuses certificates with a common name if users have passwords\n"
                    "set `mirror.etcd.tls` to a certificate whose subject is empty"
                ) from None
            raise ConfigError(
                f"etcd: {endpoint} did not respond as etcd 3.4 or later does: status {status}, {body[:80]!r}\n"
                "correct `mirror.etcd.endpoints`, and enable etcd's gRPC gateway if it is disabled"
            ) from None
        if error is None and status == 200:
            return dict(result)
        # Errors of streams are objects, those of other requests are texts next to the details
        details = error if isinstance(error, dict) else result
        code = details.get("grpc_code", details.get("code"))
        message = str(details.get("message", error))
        if code in _UNAVAILABLE:
            raise aiohttp.ClientError(message)
        if code == _FAILED_PRECONDITION and "authentication" in message:
            return {}  # authentication is disabled, so that no token is needed
        raise self._refusal(endpoint, message)

    def _refusal(self, endpoint: str, message: str) -> ConfigError:
        """Return the error to raise for a request that an endpoint refused."""
        if "too large" in message:
            return ConfigError(
                f"etcd: {endpoint}: {message}\nstart etcd with a higher --max-request-bytes"
            )
        error_class = _InvalidTokenError if self._token else ConfigError
        who = "without a user" if self._user is None else f"as user {self._user!r}"
        return error_class(
            f"etcd: {endpoint} refused a request {who}: {message}\n"
            "set `user` and `password_file` of `mirror.etcd` to a user who may read and write below its `prefix`"
        )


class _InvalidTokenError(ConfigError):
    """Raised if the token is no longer valid, or the user lacks the permission for a request."""


async def _read_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length, until nothing is received for _SILENT_SECONDS. Raises:
    aiohttp.ClientError if the connection ends."""
    rest = b""
    while True:
        try:
            data = await content.readany()
        except asyncio.TimeoutError:
            return
        if not data:
            raise aiohttp.ClientPayloadError("the connection was closed")
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line:
                yield line


def _code(text: str | bytes) -> str:
    """Encode a key or a value in base64."""
    data = text.encode() if isinstance(text, str) else text
    return base64.b64encode(data).decode()


def _text(code: str) -> str:
    """Decode a key from base64."""
    return base64.b64decode(code).decode(errors="replace")


def _range_of(prefix: str) -> dict[str, Any]:
    """Return the fields of a request that select all keys with a prefix. The last byte of the
    prefix must be less than 255."""
    last = prefix.encode()
    end = last[:-1] + bytes([last[-1] + 1])
    return {"key": _code(prefix), "range_end": _code(end)}


def _revision_of(answer: Mapping[str, Any]) -> int:
    return int(answer["header"]["revision"])


def _value_of(pair: Mapping[str, str]) -> Value:
    return Value(base64.b64decode(pair.get("value", "")), int(pair["mod_revision"]))


def _change_of(event: Mapping[str, Any]) -> tuple[str, Value | None, int]:
    pair = event["kv"]
    value = None if event.get("type") == "DELETE" else _value_of(pair)
    return _text(pair["key"]), value, int(pair["mod_revision"])

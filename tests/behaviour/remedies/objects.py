"""The bench of object stores and web servers: one object, which settings and the environment make readable or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.clients import forget_clients
from megablend.storage.store_options import parse_options
from tests.behaviour.remedies.driver import Bench, Step
from tests.storage.faulty import Faults, FaultySource

DATA = b"0123456789"
Headers = dict[str, str]


class OddSource(FaultySource):
    """A source whose answers can be changed; it may refuse or redirect requests by what is in their headers."""

    redirect: str | None = None
    """Where all requests without a query are sent."""
    change: Callable[[Headers, bytes], tuple[Headers, bytes]] | None = None
    """Of the headers and the body of answers with a file."""
    refuses: Callable[[Headers], tuple[int, str] | None] | None = None
    """The status and the code of the answer to a request with these headers."""

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: Headers
    ) -> bool:
        if self.redirect is not None and "?" not in target:
            return await self._send(writer, method, 302, {"Location": self.redirect}, b"")
        if self.refuses is not None and (refused := self.refuses(headers)):
            status, code = refused
            return await self._send(
                writer, method, status, {}, f"<Error><Code>{code}</Code></Error>".encode()
            )
        return await super()._answer(writer, method, target, headers)

    async def _send(
        self, writer: asyncio.StreamWriter, method: str, status: int, headers: Headers, body: bytes
    ) -> bool:
        if self.change is not None and status in (200, 206):
            headers, body = self.change(headers, body)
        return await super()._send(writer, method, status, headers, body)


class Case(Bench):
    """An object that is read; the settings that change are those of its location's prefix."""

    def __init__(self, source: FaultySource, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.source = source
        self.folder = folder
        self.patch = patch
        self.location = "s3://b/x"
        self.url = source.url
        self.port = source.port
        self.settings: dict[str, Any] = {"endpoint": source.url, "give_up_after": 1.0}
        self.env(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y", AWS_REGION="us-east-1")

    def env(self, **values: str | None) -> None:
        """Change the environment, as for a new process."""
        forget_clients()
        for name, value in values.items():
            if value is None:
                self.patch.delenv(name, raising=False)
            else:
                self.patch.setenv(name, value)

    def change(self, settings: Mapping[str, Any]) -> None:
        changed = {**self.settings, **settings}
        self.settings = {name: value for name, value in changed.items() if value is not None}

    def use(self) -> None:
        scheme = self.location.partition("//")[0]
        storage = make_storage(
            objects=parse_options({f"{scheme}//": self.settings} if ":" in scheme else {})
        )
        (match,) = storage.find(self.location).files
        assert storage.read(match.path, 0, len(DATA)) == DATA


def env(**values: str | None) -> Step:
    return lambda case: case.env(
        **{name: value and case.fill(value) for name, value in values.items()}
    )


def at(location: str) -> Step:
    """Read from another location."""
    return lambda case: setattr(case, "location", case.fill(location))


def has(path: str, location: str) -> Step:
    """The store has the object by another key, too, and it is read there."""

    def copy(case: Case) -> None:
        case.source.files[path] = DATA
        case.location = case.fill(location)

    return copy


def answers(status: int, code: str = "") -> Step:
    """The server answers with an error, until status 0."""

    def change(case: Case) -> None:
        case.source.body = f"<Error><Code>{code}</Code></Error>".encode()
        case.source.faults = Faults(status={status: 1.0}) if status else Faults()

    return change


def source(**attributes: Any) -> Step:
    """Change the server."""

    def change(case: Case) -> None:
        for name, value in attributes.items():
            setattr(case.source, name, case.fill(value))

    return change

"""Writes that lose against others, and what is missing, as the client says it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megablend.storage.objects.prefix import _create, _read

MISSING = "Object at location a not found: Error performing GET http://h/b/a: status code: 404, body: <Code>{}</Code>"


@pytest.mark.parametrize("name", ["AlreadyExistsError", "PreconditionError"])
def test_an_object_that_exists_is_not_created(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Stores say so in two ways."""
    obstore = pytest.importorskip("obstore")

    async def refuse(*_: Any, **options: Any) -> None:
        assert options == {"mode": "create"}
        raise getattr(obstore.exceptions, name)("it exists")

    monkeypatch.setattr(obstore, "put_async", refuse)
    assert not asyncio.run(_create(None, "a", b""))


def test_a_missing_bucket_is_no_missing_object(monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    codes = ["NoSuchKey", "NoSuchBucket"]

    async def find_nothing(*_: Any) -> None:
        raise FileNotFoundError(MISSING.format(codes[0]))

    monkeypatch.setattr(obstore, "get_async", find_nothing)
    assert asyncio.run(_read(None, "a")) is None
    codes.pop(0)
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        asyncio.run(_read(None, "a"))

"""Keeps a copy of the values of keys in etcd."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress

from megablend.mirror.members.etcd import Etcd, EtcdAwayError, StartOverError, Value

_RETRY_SECONDS = 1.0


class Followed:
    """A copy of all keys in etcd that begin with a prefix, which is updated when they change.

    Args:
        etcd: the client.
        prefix: the prefix of the keys.
    """

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self.values: dict[str, Value] = {}
        """The last known values by key. At each change, the dict is replaced by a new one."""
        self.revision = 0
        """The revision of etcd to which `values` belongs; 0 before the keys are first read."""
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Follow all changes until cancelled, even while etcd is unreachable. Raises:
        ConfigError."""
        while True:
            with suppress(StartOverError, EtcdAwayError):
                await self._follow()
            # At random, so that not all nodes send requests at once
            await asyncio.sleep(random.uniform(0, 2 * _RETRY_SECONDS))

    async def _follow(self) -> None:
        """Read the keys, and follow their changes until an error occurs."""
        values, revision = await self._etcd.get(self._prefix)
        await self._update(values, revision)
        async for changes in self._etcd.watch(self._prefix, revision + 1):
            values = dict(self.values)
            for key, value, changed in changes:
                revision = max(revision, changed)
                values.pop(key, None)
                if value is not None:
                    values[key] = value
            await self._update(values, revision)

    async def _update(self, values: dict[str, Value], revision: int) -> None:
        async with self._news:
            self.values = values
            self.revision = revision
            self._news.notify_all()

    async def wait_for(self, is_met: Callable[[], bool]) -> None:
        """Wait until `is_met`, which is called after each change, returns True."""
        async with self._news:
            await self._news.wait_for(is_met)

    async def wait_for_change(self, values: Mapping[str, Value]) -> None:
        """Wait until there are newer values than `values`."""
        await self.wait_for(lambda: self.values is not values)

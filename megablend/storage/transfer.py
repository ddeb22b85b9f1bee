"""What reading from object stores takes: requests, bytes, and their price where the config gives prices."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from megablend.storage.base import Allocate, Bytes, Int64s, Storage
from megablend.storage.ends import Ends
from megablend.storage.object_options import StoreOptions
from megablend.storage.wrapper import WrapperStorage

REQUEST_BYTES = 8 << 20
"""Longer ranges are requested in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """An estimate of requests to object stores."""

    requests: int = 0
    bytes: int = 0
    cost: float | None = None
    """By the prices of the config, in their currency; None where it gives none."""

    def __add__(self, other: Transfer) -> Transfer:
        costs = [each.cost for each in (self, other) if each.cost is not None]
        cost = sum(costs) if costs else None
        return Transfer(requests=self.requests + other.requests, bytes=self.bytes + other.bytes, cost=cost)


def price_transfer(requests: int, size: int, options: StoreOptions) -> Transfer:
    """The transfer of `size` bytes by so many requests, with its cost."""
    per_request, per_gb = options.price_per_1000_requests, options.price_per_gb
    cost = None
    if per_request is not None or per_gb is not None:
        cost = requests / 1000 * (per_request or 0.0) + size / 1e9 * (per_gb or 0.0)
    return Transfer(requests=requests, bytes=size, cost=cost)


class MeteredStorage(WrapperStorage):
    """Counts the requests and bytes that reads take of an object store, as if nothing had been read before."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.requests = self.bytes = 0

    def get_ends(self, path: str) -> Ends | None:
        """See EndsStorage.get_ends: what was read before is counted, too."""
        return None

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        self._count(np.array([size]))
        return self.inner.read(path, offset, size)

    def read_ranges(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        self._count(sizes)
        return self.inner.read_ranges(path, offsets, sizes, allocate)

    def fetch(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch."""
        self._count(sizes)
        return self.inner.fetch(path, offsets, sizes, allocate)

    def _count(self, sizes: Int64s) -> None:
        self.requests += int(np.maximum(1, -(-sizes // REQUEST_BYTES)).sum())
        self.bytes += int(sizes.sum())

"""The cost of reading from object stores: requests, bytes, and their price if the config gives
prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megablend.arrays import Float64s
from megablend.storage.store_options import StoreOptions

_DEVIATIONS = 4
"""The distance between an extrapolated total and its bounds, in standard errors."""


class RequestCount(NamedTuple):
    """The number of requests, and the number of bytes that they return."""

    requests: float
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Lower and upper bounds of the number of requests to object stores, and of their bytes and
    cost. The bounds are equal if the number is known exactly."""

    requests: int = 0
    bytes: int = 0
    cost: float | None = None
    """The cost at the config's prices, in their currency; None if the config gives no prices."""
    most_requests: int = 0
    most_bytes: int = 0
    most_cost: float | None = None

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(
            requests=self.requests + other.requests,
            bytes=self.bytes + other.bytes,
            cost=_add_costs(self.cost, other.cost),
            most_requests=self.most_requests + other.most_requests,
            most_bytes=self.most_bytes + other.most_bytes,
            most_cost=_add_costs(self.most_cost, other.most_cost),
        )


def price_transfer(least: RequestCount, most: RequestCount, options: StoreOptions) -> Transfer:
    """Return a Transfer with the bounds `least` and `most`, and their cost."""
    return Transfer(
        requests=round(least.requests),
        bytes=round(least.bytes),
        cost=_price(least, options),
        most_requests=round(most.requests),
        most_bytes=round(most.bytes),
        most_cost=_price(most, options),
    )


def extrapolate(counted: Float64s, num_all: int) -> tuple[Float64s, Float64s]:
    """Return lower and upper bounds of the totals over `num_all` items, given the counts of only
    some of the items.

    The counted items must be evenly spaced among all items. The bounds are further apart if the
    counts of neighbouring items differ more.

    Args:
        counted: k counts for each of the n counted items (float64 [n, k]).

    Returns: the lower and the upper bound of each total (float64 [k]).
    """
    if len(counted) == num_all:
        return counted.sum(axis=0), counted.sum(axis=0)
    differences = np.diff(counted, axis=0)
    variance = (differences**2).sum(axis=0) / (2 * len(differences)) * (1 - len(counted) / num_all)
    total = num_all * counted.mean(axis=0)
    margin = _DEVIATIONS * num_all * np.sqrt(variance / len(counted))
    return np.maximum(total - margin, counted.sum(axis=0)), total + margin


def _price(counted: RequestCount, options: StoreOptions) -> float | None:
    """Return the price of requests and bytes; None if the options give no prices."""
    per_1000_requests = options.price_per_1000_requests
    per_gb = options.price_per_gb
    if per_1000_requests is None and per_gb is None:
        return None
    requests_price = round(counted.requests) / 1000 * (per_1000_requests or 0.0)
    bytes_price = round(counted.bytes) / 1e9 * (per_gb or 0.0)
    return requests_price + bytes_price


def _add_costs(first: float | None, second: float | None) -> float | None:
    """Return the sum of the known costs; None if neither cost is known."""
    costs = [cost for cost in (first, second) if cost is not None]
    return sum(costs) if costs else None

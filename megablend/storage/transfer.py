"""What reading from object stores takes: requests, bytes,
and their price if the config gives prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megablend.arrays import Float64s
from megablend.storage.object_options import StoreOptions


class Counted(NamedTuple):
    """A number of requests, and of the bytes that they return."""

    requests: float
    bytes: float


_DEVIATIONS = 4
"""Standard errors from an extrapolated total to its bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What will be requested from object stores: at least and at most;
    the same if it is known exactly."""

    requests: int = 0
    bytes: int = 0
    cost: float | None = None
    """At the prices of the config, in their currency; None if it gives none."""
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


def price_transfer(least: Counted, most: Counted, options: StoreOptions) -> Transfer:
    """Return the transfer between `least` and `most`, with its cost."""
    return Transfer(
        requests=round(least.requests),
        bytes=round(least.bytes),
        cost=_price(least, options),
        most_requests=round(most.requests),
        most_bytes=round(most.bytes),
        most_cost=_price(most, options),
    )


def extrapolate(counted: Float64s, num_all: int) -> tuple[Float64s, Float64s]:
    """Bounds of the totals of `num_all` items, float64 [k] each, from what was counted for evenly
    spaced ones, float64 [n, k].

    How far apart the bounds are follows from how much neighbours differ.
    """
    if len(counted) == num_all:
        return counted.sum(axis=0), counted.sum(axis=0)
    differences = np.diff(counted, axis=0)
    variance = (differences**2).sum(axis=0) / (2 * len(differences)) * (1 - len(counted) / num_all)
    total = num_all * counted.mean(axis=0)
    margin = _DEVIATIONS * num_all * np.sqrt(variance / len(counted))
    return np.maximum(total - margin, counted.sum(axis=0)), total + margin


def _price(counted: Counted, options: StoreOptions) -> float | None:
    per_request = options.price_per_1000_requests
    per_gb = options.price_per_gb
    if per_request is None and per_gb is None:
        return None
    return round(counted.requests) / 1000 * (per_request or 0.0) + round(counted.bytes) / 1e9 * (
        per_gb or 0.0
    )


def _add_costs(first: float | None, second: float | None) -> float | None:
    costs = [each for each in (first, second) if each is not None]
    return sum(costs) if costs else None

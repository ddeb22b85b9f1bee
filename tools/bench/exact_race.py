"""What the benchmarks of exact results share: contenders take turns in one process, and must agree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Times(NamedTuple):
    """Medians of the rounds, in seconds."""

    processor: float
    """Of all threads."""
    wall: float


def race(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """Run all contenders in turn, once to warm up and `rounds` times measured; the results must be equal."""
    taken: dict[str, list[Times]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        first: Any = None
        for name, contender in contenders.items():
            processor = time.process_time()
            wall = time.perf_counter()
            result = contender()
            spent = Times(time.process_time() - processor, time.perf_counter() - wall)
            if first is None:
                first = result
            elif turn == 0:
                for one, other in zip(_arrays(first), _arrays(result), strict=True):
                    np.testing.assert_array_equal(one, other, err_msg=name, strict=True)
            if turn > 0:
                taken[name].append(spent)
    return {
        name: Times(*(statistics.median(column) for column in zip(*times, strict=True)))
        for name, times in taken.items()
    }


def report(title: str, found: Mapping[str, Times], units: int, unit: str) -> None:
    """Print the times, per unit, and how many times faster than the first contender each is."""
    print(
        f"\n{title}\n{'':16}{f'CPU ns/{unit}':>18}{'ratio':>8}{f'wall ns/{unit}':>20}{'ratio':>8}"
    )
    peer = next(iter(found.values()))
    for name, times in found.items():
        processor, wall = (1e9 * seconds / units for seconds in times)
        ratios = peer.processor / times.processor, peer.wall / times.wall
        print(
            f"{name:16}{processor:18.1f}{ratios[0]:7.2f}x{wall:20.1f}{ratios[1]:7.2f}x", flush=True
        )


def _arrays(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)

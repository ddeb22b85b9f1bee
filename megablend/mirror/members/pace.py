"""How long nodes wait for one another."""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """Seconds after which something is done, or believed."""

    ping: float = 2.0
    """Without an answer: the node is asked whether it is there."""
    silent: float = 10.0
    """Without an answer to that: it is away."""
    gone: float = 60.0
    """Away for so long: nobody waits for it any more."""
    complete: float = 120.0
    """After the start: what is missing of the list is not waited for any more."""

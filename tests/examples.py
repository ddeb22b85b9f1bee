"""How many random examples a property is tried with."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, settings

IN_QUICK_PART = 10
"""No property takes more in the quick part, which is run again and again: a fault that shows rarely is for the whole suite."""
_most: int | None = None

settings.register_profile("tests", derandomize=True, deadline=None)
settings.load_profile("tests")  # for properties without `examples`


def limit_examples(most: int) -> None:
    """No property that is defined from now on takes more examples than this."""
    global _most
    _most = most


def examples(count: int, suppress_health_check: Collection[HealthCheck] = ()) -> settings:
    """`count` examples, the same ones in every run, each of which may take as long as it likes."""
    most = count if _most is None else min(count, _most)
    return settings(
        max_examples=most, derandomize=True, deadline=None, suppress_health_check=tuple(suppress_health_check)
    )

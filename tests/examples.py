"""How many random examples a property is tried with."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, settings

IN_QUICK_PART = 10
"""No property takes more in the quick part, which is run again and again: a fault that shows rarely is for the whole suite."""
_most: int | None = None
_with_slow = True

settings.register_profile("tests", derandomize=True, deadline=None)
settings.load_profile("tests")  # for properties without `examples`


def limit_examples(most: int) -> None:
    """No property that is defined from now on takes more examples than this."""
    global _most
    _most = most


def leave_out_slow() -> None:
    """Properties that are defined from now on take as many examples as where slow tests are not run."""
    global _with_slow
    _with_slow = False


def examples(
    count: int, suppress_health_check: Collection[HealthCheck] = (), *, soak: int = 0
) -> settings:
    """`count` examples, the same ones in every run, each of which may take as long as it likes.

    Args:
        soak: how many they are where slow tests are run, if more.
    """
    count = max(count, soak) if _with_slow else count
    most = count if _most is None else min(count, _most)
    return settings(
        max_examples=most,
        derandomize=True,
        deadline=None,
        suppress_health_check=tuple(suppress_health_check),
    )

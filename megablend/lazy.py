"""`cached_property` without a lock, as Python 3.12 has it.

That of Python 3.10 and 3.11 holds a lock while it computes, one for all objects of a class: a process that is forked while
another thread computes would wait for that lock forever.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:  # noqa: N801  # the name that it has in functools
        """An attribute that is computed when it is first read; two threads may both compute it."""

        def __init__(self, compute):
            self.compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self.name] = self.compute(instance)
            return value


__all__ = ["cached_property"]

"""What a storage knows of objects without asking again: the version of each that was met, and the ends of some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megablend.storage.ends import Ends, KeptEnds
from megablend.storage.objects.pins import Pin


class Known(NamedTuple):
    """What is known of an object."""

    pin: Pin
    ends: Ends | None = None


class KnownObjects:
    """The version of each object that a storage has met, by its location. Safe between threads."""

    def __init__(self) -> None:
        self._pins = dict[str, Pin]()
        self._ends = KeptEnds()
        self._new = set[str]()

    @property
    def tail_bytes(self) -> int:
        """Bytes of an object's end that it is worth reading; see KeptEnds."""
        return self._ends.tail_bytes

    def get(self, path: str) -> Pin | None:
        """The version of an object, if it is known."""
        return self._pins.get(path)

    def get_ends(self, path: str) -> Ends | None:
        """The ends of this version, if they are known."""
        return self._ends.get(path)

    def forget(self, path: str) -> None:
        """Forget an object, whose present version is to be met."""
        self._pins.pop(path, None)
        self._ends.remove(path)

    def replace(self, pins: Mapping[str, Pin]) -> None:
        """Versions that were found now, in place of those that were known."""
        for path, pin in pins.items():
            if self._pins.get(path) != pin:
                self._ends.remove(path)
        self._pins.update(pins)
        self._new.update(pins)

    def keep(self, path: str, pin: Pin, ends: Ends | None = None) -> Pin:
        """Returns: the version that all readers of an object have: the one that was met first."""
        kept = self._pins.setdefault(path, pin)
        if kept is pin:
            self._new.add(path)
        if ends is not None and kept == pin:
            self._new.add(path)
            self._ends.put(path, ends)
        return kept

    def take_new(self) -> dict[str, Known]:
        """What was found out since the last call, other than by `add`."""
        new, self._new = self._new, set()
        return {
            path: Known(pin, self._ends.get(path)) for path in tuple(new) if (pin := self._pins.get(path)) is not None
        }

    def add(self, known: Mapping[str, Known]) -> None:
        """Take over what another process has found out; what this one has met first stays."""
        for path, (pin, ends) in known.items():
            if self._pins.setdefault(path, pin) == pin and ends is not None:
                self._ends.put(path, ends)


def split_known(known: Any) -> tuple[Any, Ends | None]:
    """What a storage knows of a file, without its ends; and these."""
    return (Known(known.pin), known.ends) if isinstance(known, Known) else (known, None)

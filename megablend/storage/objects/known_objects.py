"""What a storage knows about objects without asking again:
the version of each that it has met, and the ends of some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megablend.storage.head_and_tail import HeadAndTail, KeptHeadsAndTails
from megablend.storage.objects.object_version import ObjectVersion


class Known(NamedTuple):
    """What is known of an object."""

    version: ObjectVersion
    ends: HeadAndTail | None = None


class KnownObjects:
    """The version of each object that a storage has met, by its location. Safe between threads."""

    def __init__(self) -> None:
        self._versions = dict[str, ObjectVersion]()
        self._ends = KeptHeadsAndTails()
        self._new = set[str]()
        """Locations of what `take_new` returns next."""

    @property
    def tail_bytes(self) -> int:
        """Bytes of an object's end that it is worth reading; see KeptHeadsAndTails."""
        return self._ends.tail_bytes

    def get(self, path: str) -> ObjectVersion | None:
        """Return the version of an object, if it is known."""
        return self._versions.get(path)

    def get_ends(self, path: str) -> HeadAndTail | None:
        """Return the ends of this version, if they are known."""
        return self._ends.get(path)

    def forget(self, path: str) -> None:
        """Forget an object, so that its present version is looked up."""
        self._versions.pop(path, None)
        self._ends.remove(path)

    def replace(self, versions: Mapping[str, ObjectVersion]) -> None:
        """Replace known versions by those that were found now."""
        for path, version in versions.items():
            if self._versions.get(path) != version:
                self._ends.remove(path)
        self._versions.update(versions)
        self._new.update(versions)

    def keep(
        self, path: str, version: ObjectVersion, ends: HeadAndTail | None = None
    ) -> ObjectVersion:
        """Keep a version unless one is known.
        Returns: the version that all readers of the object have, the one that was met first."""
        kept = self._versions.setdefault(path, version)
        if kept is version:
            self._new.add(path)
        if ends is not None and kept == version:
            self._new.add(path)
            self._ends.put(path, ends)
        return kept

    def take_new(self) -> dict[str, Known]:
        """What was found out since the last call, other than by `add`."""
        new = self._new
        self._new = set()
        return {
            path: Known(version, self._ends.get(path))
            for path in tuple(new)
            if (version := self._versions.get(path)) is not None
        }

    def add(self, known: Mapping[str, Known]) -> None:
        """Take over what another process has found out; what this one has met first stays."""
        for path, (version, ends) in known.items():
            if self._versions.setdefault(path, version) == version and ends is not None:
                self._ends.put(path, ends)


def split_known(known: Any) -> tuple[Any, HeadAndTail | None]:
    """Split what a storage knows of a file into all but its ends, and its ends."""
    return (Known(known.version), known.ends) if isinstance(known, Known) else (known, None)

"""What a storage knows of objects without asking again:
the version of each that was met, and the ends of some."""

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

    @property
    def tail_bytes(self) -> int:
        """Bytes of an object's end that it is worth reading; see KeptHeadsAndTails."""
        return self._ends.tail_bytes

    def get(self, path: str) -> ObjectVersion | None:
        """The version of an object, if it is known."""
        return self._versions.get(path)

    def get_ends(self, path: str) -> HeadAndTail | None:
        """The ends of this version, if they are known."""
        return self._ends.get(path)

    def forget(self, path: str) -> None:
        """Forget an object, whose present version is to be met."""
        self._versions.pop(path, None)
        self._ends.remove(path)

    def replace(self, versions: Mapping[str, ObjectVersion]) -> None:
        """Versions that were found now, in place of those that were known."""
        for path, version in versions.items():
            if self._versions.get(path) != version:
                self._ends.remove(path)
        self._versions.update(versions)
        self._new.update(versions)

    def keep(
        self, path: str, version: ObjectVersion, ends: HeadAndTail | None = None
    ) -> ObjectVersion:
        """Returns: the version that all readers of an object have: the one that was met first."""
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
    """What a storage knows of a file, without its ends; and these."""
    return (Known(known.version), known.ends) if isinstance(known, Known) else (known, None)

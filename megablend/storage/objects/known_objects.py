"""The known versions of the objects that a storage reads, and the heads and tails of some of these
objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megablend.storage.head_and_tail import HeadAndTail, KeptHeadsAndTails
from megablend.storage.objects.object_version import ObjectVersion


class Known(NamedTuple):
    """The version of an object, and its head and tail if they are known."""

    version: ObjectVersion
    ends: HeadAndTail | None = None


class KnownObjects:
    """The known versions of objects, by location, and the heads and tails of some of these objects.
    Thread-safe."""

    def __init__(self) -> None:
        self._versions = dict[str, ObjectVersion]()
        self._ends = KeptHeadsAndTails()
        self._new = set[str]()
        """The locations of objects that `take_new` returns next."""

    @property
    def tail_bytes(self) -> int:
        """The number of bytes of a tail that are worth reading; see KeptHeadsAndTails."""
        return self._ends.tail_bytes

    def get(self, path: str) -> ObjectVersion | None:
        """Return the version of an object; None if it is not known."""
        return self._versions.get(path)

    def get_ends(self, path: str) -> HeadAndTail | None:
        """Return the head and tail of the known version of an object; None if they are not
        known."""
        return self._ends.get(path)

    def forget(self, path: str) -> None:
        """Forget an object, so that its current version is looked up."""
        self._versions.pop(path, None)
        self._ends.remove(path)

    def replace(self, versions: Mapping[str, ObjectVersion]) -> None:
        """Replace known versions with current ones."""
        for path, version in versions.items():
            if self._versions.get(path) != version:
                self._ends.remove(path)
        self._versions.update(versions)
        self._new.update(versions)

    def keep(
        self, path: str, version: ObjectVersion, ends: HeadAndTail | None = None
    ) -> ObjectVersion:
        """Keep the version of an object, unless another version is kept already. Returns: the
        version that is kept, which all readers of the object use."""
        kept = self._versions.setdefault(path, version)
        if kept is version:
            self._new.add(path)
        if ends is not None and kept == version:
            self._new.add(path)
            self._ends.put(path, ends)
        return kept

    def take_new(self) -> dict[str, Known]:
        """Return the versions, heads and tails that were found since the last call. Those that were
        passed to `add` are left out."""
        new = self._new
        self._new = set()  # first: other threads add to it meanwhile
        known = dict[str, Known]()
        for path in tuple(new):
            version = self._versions.get(path)
            if version is not None:
                known[path] = Known(version, self._ends.get(path))
        return known

    def add(self, known: Mapping[str, Known]) -> None:
        """Add what another process has found, without replacing versions that this process has
        kept."""
        for path, (version, ends) in known.items():
            if self._versions.setdefault(path, version) == version and ends is not None:
                self._ends.put(path, ends)


def split_known(known: Any) -> tuple[Any, HeadAndTail | None]:
    """Separate the head and tail of a file from the other information about it. Returns: the other
    information, and the head and tail, which are None if they are not known."""
    return (Known(known.version), known.ends) if isinstance(known, Known) else (known, None)

"""The known versions of the objects that a storage reads."""

from __future__ import annotations

from collections.abc import Mapping

from megablend.storage.objects.object_version import ObjectVersion


class KnownObjects:
    """The known versions of objects, by location. Thread-safe."""

    def __init__(self) -> None:
        self._versions = dict[str, ObjectVersion]()
        self._new = set[str]()
        """The locations of objects that `take_new` returns next."""

    def get(self, path: str) -> ObjectVersion | None:
        """Return the version of an object; None if it is not known."""
        return self._versions.get(path)

    def forget(self, path: str) -> None:
        """Forget an object, so that its current version is looked up."""
        self._versions.pop(path, None)

    def replace(self, versions: Mapping[str, ObjectVersion]) -> None:
        """Replace known versions with current ones."""
        self._versions.update(versions)
        self._new.update(versions)

    def keep(self, path: str, version: ObjectVersion) -> ObjectVersion:
        """Keep the version of an object, unless another version is kept already. Returns: the
        version that is kept, which all readers of the object use."""
        kept = self._versions.setdefault(path, version)
        if kept is version:
            self._new.add(path)
        return kept

    def take_new(self) -> dict[str, ObjectVersion]:
        """Return the versions that were found since the last call. Those that were passed to `add`
        are left out."""
        new = self._new
        self._new = set()  # first: other threads add to it meanwhile
        versions = {path: self._versions.get(path) for path in tuple(new)}
        return {path: version for path, version in versions.items() if version is not None}

    def add(self, known: Mapping[str, ObjectVersion]) -> None:
        """Add what another process has found, without replacing versions that this process has
        kept."""
        for path, version in known.items():
            self._versions.setdefault(path, version)

"""The version of an object that is read: its size and etag. They are sent along with every request
and compared with every response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from megablend.storage.base import FileStat


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """A version of an object."""

    size: int
    """The size in bytes."""
    etag: str
    """The etag without quotes; empty if the store gives no etag, or a weak one, which two versions
    may share."""
    modified: int
    """The time of the last modification, in seconds since 1970; 0 if it is not known."""
    version_id: str | None = None
    """The version id that the store has assigned. It can be used to read the version even after the
    object has been replaced. None unless the option `versions` of the store is set."""
    quote: str = field(default='"', compare=False)
    """What encloses the etag in conditions; "" for a server that sends etags without quotes, and
    compares them so."""

    @property
    def stat(self) -> FileStat:
        """The size and identity of the version for readers of files. They are the same whether the
        version comes from a LIST, a HEAD or a GET."""
        return FileStat(size=self.size, etag=self.etag or f"modified-{self.modified}")

    @property
    def conditions(self) -> dict[str, Any]:
        """Options for a GET request that make the store send only this version."""
        if self.version_id is not None:
            return {"version": self.version_id}
        if self.etag:
            return {"if_match": f"{self.quote}{self.etag}{self.quote}"}
        if self.modified:
            return {"if_unmodified_since": datetime.fromtimestamp(self.modified, timezone.utc)}
        return {}

    def find_difference(self, other: ObjectVersion) -> str | None:
        """Return a description of how the version in a response differs from this version; None if
        it is the same."""
        if other.size != self.size:
            return f"it has {other.size} bytes, but had {self.size}"
        if self.etag and other.etag:
            if other.etag != self.etag:
                return f"its etag is {other.etag}, but was {self.etag}"
        elif self.modified and other.modified and other.modified != self.modified:
            return f"it was last modified at {_show(other.modified)}, but previously at {_show(self.modified)}"
        return None


def version_of_response(
    meta: Mapping[str, Any], expected: ObjectVersion | None, *, versions: bool
) -> ObjectVersion:
    """Return the version that a response belongs to. If the response has the same etag and size as
    `expected`, this is the object `expected` itself."""
    etag = normalise_etag(meta["e_tag"])
    if etag and expected is not None and (etag, meta["size"]) == (expected.etag, expected.size):
        return expected
    return make_version(meta, versions=versions)


def make_version(meta: Mapping[str, Any], *, versions: bool = False) -> ObjectVersion:
    """Convert obstore's metadata of an object to an ObjectVersion.

    Args:
        versions: whether to include the version id that the store assigned.
    """
    return ObjectVersion(
        size=int(meta["size"]),
        etag=normalise_etag(meta["e_tag"]),
        modified=max(0, int(meta["last_modified"].timestamp())),
        version_id=meta["version"] if versions else None,
        quote='"' if '"' in (meta["e_tag"] or '"') else "",
    )


def normalise_etag(etag: str | None) -> str:
    """Return an etag without the quotes that only some responses contain; "" for a weak etag."""
    if not etag or etag.startswith("W/"):
        return ""
    return etag.strip().strip('"')


def _show(seconds: int) -> str:
    """Return a time as text for messages."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")

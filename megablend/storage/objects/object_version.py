"""Which version of an object is read: its size and etag, sent along with every request and compared
with every answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from megablend.storage.base import FileStat


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """A version of an object."""

    size: int
    """Bytes."""
    etag: str
    """Without quotes; empty if the store gives none, or a weak one, which two versions may
    share."""
    modified: int
    """Seconds since 1970; 0 if it is not known."""
    version_id: str | None = None
    """The store's id of the version, by which it can still be read after it was replaced; None
    unless the store's option `versions` is set."""

    @property
    def stat(self) -> FileStat:
        """What the readers of files know about a version: the same from a LIST, a HEAD and a
        GET."""
        return FileStat(size=self.size, etag=self.etag or f"modified-{self.modified}")

    @property
    def conditions(self) -> dict[str, Any]:
        """obstore's options of a GET that is answered for this version only."""
        if self.version_id is not None:
            return {"version": self.version_id}
        if self.etag:
            return {"if_match": f'"{self.etag}"'}
        if self.modified:
            return {"if_unmodified_since": datetime.fromtimestamp(self.modified, timezone.utc)}
        return {}

    def find_difference(self, other: ObjectVersion) -> str | None:
        """How the version in a response differs from this one; None if it is the same."""
        if other.size != self.size:
            return f"it has {other.size} bytes, but had {self.size}"
        if self.etag and other.etag:
            if other.etag != self.etag:
                return f"its etag is {other.etag}, but was {self.etag}"
        elif self.modified and other.modified and other.modified != self.modified:
            return f"it was last modified at {_show(other.modified)}, but before at {_show(self.modified)}"
        return None


def version_of_answer(
    meta: Mapping[str, Any], expected: ObjectVersion | None, *, versions: bool
) -> ObjectVersion:
    """Return the version that an answer belongs to: `expected` itself, if the answer has its etag
    and size."""
    etag = normalise_etag(meta["e_tag"])
    if etag and expected is not None and (etag, meta["size"]) == (expected.etag, expected.size):
        return expected
    return make_version(meta, versions=versions)


def make_version(meta: Mapping[str, Any], *, versions: bool = False) -> ObjectVersion:
    """Return the version that obstore's metadata of an object describes, with the store's id of it
    if `versions` is True."""
    return ObjectVersion(
        size=int(meta["size"]),
        etag=normalise_etag(meta["e_tag"]),
        modified=max(0, int(meta["last_modified"].timestamp())),
        version_id=meta["version"] if versions else None,
    )


def normalise_etag(etag: str | None) -> str:
    """Return an etag without quotes, since stores set them in some answers only; empty for a weak
    one."""
    if not etag or etag.startswith("W/"):
        return ""
    return etag.strip().strip('"')


def _show(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")

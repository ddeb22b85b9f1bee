"""The catalog of a mirror: its datasets, their revisions, and wants, which are requests to hold a
dataset. The catalog consists of a database and manifests in the mirror's folder. In a cluster with
etcd, it is a copy of the catalog in etcd (see the module `shared`).

datasets.db                  revisions and wants, by name
manifests/<32 hex>.zlib      the files of a revision
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megablend.errors import ConfigError, DataError, MissingFileError, did_you_mean
from megablend.mirror.catalog.manifest import NO_FILES, DataFile, Manifest
from megablend.mirror.disk.database import Database, SourceState
from megablend.mirror.disk.disk_calls import disk_error
from megablend.mirror.disk.folder import MirrorFolder
from megablend.storage.location import find_root, find_scheme, has_prefix
from megablend.system.atomic_write import flush_folder, write_flushed
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG

LATEST = "latest"
EVERY = 3600.0
"""The default number of seconds after which a source is listed again."""
_SHOWN_DIGITS = 12
_LEAST_DIGITS = 4
_MAX_MANIFEST_BYTES = 256 << 20
"""The maximum size of all manifests in memory together. A single larger manifest is also kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A revision of a dataset: the files that its sources had when they were listed."""

    dataset: str
    digest: str
    num_files: int
    num_bytes: int
    added: float
    """The time at which the revision was added, in seconds of the machine's clock."""
    sources: tuple[str, ...]
    by: str = ""
    """In a cluster with etcd, the node that listed the source."""
    every: float = EVERY
    """Seconds until the source is listed again; 0 if it is never listed again."""
    is_plain: bool = False
    """Whether `sources` contains the patterns that were listed. If not, it contains the user's
    names for them, such as the path of a file of URLs. Listing the source again then requests the
    files one by one."""
    is_found: bool = False
    """Whether the revision was found by listing the source again, not by `add`."""

    @property
    def name(self) -> str:
        """The name of the revision in the catalog: `dataset@digest`."""
        return f"{self.dataset}@{self.digest}"

    def may_have(self, location: str) -> bool:
        """Return whether the revision may contain a file with this location, according to its
        sources."""
        roots = (find_root([source]) for source in self.sources)
        return not self.is_plain or any(has_prefix(location, root) for root in roots)

    def __str__(self) -> str:
        return f"{self.dataset}@{self.digest[:_SHOWN_DIGITS]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A request that nodes hold one revision of a dataset, or always its latest one."""

    dataset: str
    revision: str
    """The digest of a revision, or LATEST."""
    is_whole: bool = False
    """Whether each node holds the whole revision, not only its share."""
    is_pinned: bool = False
    """Whether the revision is never evicted."""
    until: float | None = None
    """The time at which the want expires, in seconds of the machine's clock; None if never."""
    since: float
    """The time at which the want was first requested, in seconds of the machine's clock."""
    nodes: tuple[str, ...] = ()
    """In a cluster with etcd, the nodes that must hold the revision; empty for all nodes."""
    copies: int = 0
    """The number of these nodes that must hold each page. It is 0 if `mirror.copies` applies, or if
    `is_whole` is set."""
    by: str = ""
    """In a cluster with etcd, the node on which the want was requested."""

    @property
    def name(self) -> str:
        """The name of the want in the catalog: `dataset@digest` or `dataset@latest`."""
        return f"{self.dataset}@{self.revision}"

    @property
    def target(self) -> str:
        """The dataset and the revision, as users write them."""
        is_latest = self.revision == LATEST
        return f"{self.dataset}@{LATEST if is_latest else self.revision[:_SHOWN_DIGITS]}"

    @property
    def is_past(self) -> bool:
        """Whether the want has expired."""
        return self.until is not None and self.until <= time.time()


Entry = TypeVar("Entry", Revision, Want)


class Listed(NamedTuple):
    """The result of this node's last listing of a dataset's source."""

    at: float
    """The time of the listing, in seconds of the machine's clock."""
    trouble: str
    """Why the listing failed and the catalog was not changed; empty if the listing succeeded."""


def pack_entry(entry: Revision | Want) -> bytes:
    """Serialize a revision or a want as JSON. Fields with default values are left out."""
    defaults = {field.name: field.default for field in fields(entry)}
    values = {name: value for name, value in asdict(entry).items() if value != defaults[name]}
    return json.dumps(values).encode()


def unpack_entry(kind: type[Entry], data: bytes) -> Entry:
    """Parse an entry that `pack_entry` serialized. Unknown fields, which a later version may have
    added, are ignored. Raises: ValueError or TypeError if the entry is not valid."""
    names = {field.name for field in fields(kind)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in dict(parse_json(data)).items()
        if name in names
    }
    return kind(**values)


class Catalog:
    """The catalog of a mirror. Only one thread may change it. Other threads may read `revisions`
    and `wants`, since these dicts are replaced, never changed in place. Methods raise DataError if
    the disk fails.

    Args:
        folder: the mirror's folder.
        own: the name of this node in a cluster with etcd; otherwise empty.
    """

    def __init__(self, folder: MirrorFolder, own: str = "") -> None:
        self.own = own
        self._database = Database(folder.datasets_path, is_lasting=True)
        self._manifests = folder.path / "manifests"
        self.revisions = {
            name: unpack_entry(Revision, value)
            for name, value in self._database.get_all("revision").items()
        }
        self.wants = {
            name: unpack_entry(Want, value)
            for name, value in self._database.get_all("want").items()
        }
        self.listed = {
            name: Listed(*parse_json(value))
            for name, value in self._database.get_all("listed").items()
        }
        self._recent = OrderedDict[str, Manifest]()
        self._recent_lock = threading.Lock()

    def date(self, revision: Revision) -> Revision:
        """Return a copy of a new revision with the right date. The date is later than the dates of
        the dataset's other revisions, even if the clock was set back."""
        others = [other.added for other in self.list_revisions(revision.dataset)]
        return replace(revision, added=max([revision.added, *(added + 1e-3 for added in others)]))

    def date_want(self, want: Want) -> Want:
        """Return a copy of a want with the right date. If the same revision is already wanted, this
        is the date of the earlier want. Otherwise it is later than the dates of all other wants,
        even if the clocks of nodes differ."""
        earlier = self.wants.get(want.name)
        if earlier is not None:
            return replace(want, since=earlier.since)
        others = [other.since for other in self.wants.values()]
        return replace(want, since=max([want.since, *(since + 1e-3 for since in others)]))

    def put_manifest(self, digest: str, manifest: bytes) -> None:
        """Store a manifest that was packed by `Manifest.pack`."""
        path = self._path(digest)
        new = Path(f"{path}.new")
        try:
            self._manifests.mkdir(mode=0o700, exist_ok=True)
            new.unlink(missing_ok=True)
            write_flushed(new, [manifest])
            new.rename(path)
            flush_folder(self._manifests)
        except OSError as error:
            raise disk_error(path, error) from error

    def put_revision(self, revision: Revision) -> None:
        """Store a revision. Its manifest may be stored before or after it."""
        self._database.put("revision", {revision.name: pack_entry(revision)})
        self.revisions = {**self.revisions, revision.name: revision}

    def put_want(self, want: Want) -> None:
        """Store a want. It replaces an earlier want of the same revision."""
        self._database.put("want", {want.name: pack_entry(want)})
        self.wants = {**self.wants, want.name: want}

    def remove_want(self, want: Want) -> None:
        """Delete a want."""
        self._database.delete("want", [want.name])
        self.wants = {name: other for name, other in self.wants.items() if name != want.name}

    def put_listed(self, dataset: str, listed: Listed) -> None:
        """Store the result of listing a dataset's source. Also delete the results of datasets that
        were removed."""
        datasets = {revision.dataset for revision in self.revisions.values()}
        removed = self.listed.keys() - datasets
        # Before the database is changed, so that memory has it even if the disk fails
        kept = {name: result for name, result in self.listed.items() if name in datasets}
        self.listed = kept | {dataset: listed}
        self._database.delete("listed", removed)
        self._database.put("listed", {dataset: json.dumps(listed).encode()})

    def remove_revision(self, revision: Revision) -> None:
        """Delete a revision, and its manifest if no other dataset has the same files."""
        self._database.delete("revision", [revision.name])
        self.revisions = {
            name: recorded for name, recorded in self.revisions.items() if name != revision.name
        }
        if all(recorded.digest != revision.digest for recorded in self.revisions.values()):
            self._path(revision.digest).unlink(missing_ok=True)

    @property
    def own_wants(self) -> list[Want]:
        """The wants that this node must help to hold."""
        return [want for want in self.wants.values() if not want.nodes or self.own in want.nodes]

    def list_lacking(self) -> list[Revision]:
        """Return the revisions whose manifests are missing on this node."""
        return [
            revision
            for revision in self.revisions.values()
            if not self._path(revision.digest).exists()
        ]

    def read_manifest(self, digest: str) -> bytes:
        """Return the compressed manifest of a revision; b"" if it is missing on this node."""
        path = self._path(digest)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise disk_error(path, error) from error

    def get_seen(self) -> tuple[str, int]:
        """Return the name of the catalog in etcd that was last copied to this node, and its number
        of changes at that time."""
        name, number = parse_json(self._database.get("shared", "seen") or b'["", 0]')
        return str(name), int(number)

    def set_seen(self, name: str, number: int) -> None:
        """Store the values that `get_seen` returns."""
        self._database.put("shared", {"seen": json.dumps([name, number]).encode()})

    def list_revisions(self, dataset: str) -> list[Revision]:
        """List the revisions of a dataset, the latest last."""
        revisions = [
            revision for revision in self.revisions.values() if revision.dataset == dataset
        ]
        return sorted(revisions, key=lambda revision: (revision.added, revision.digest))

    def find_dataset(self, dataset: str) -> list[Revision]:
        """Return the revisions of a dataset, the latest last. Raises: ConfigError if there are
        none."""
        revisions = self.list_revisions(dataset)
        if revisions:
            return revisions
        datasets = {revision.dataset for revision in self.revisions.values()}
        near = did_you_mean(dataset, datasets, before=": ")
        raise ConfigError(
            f"{dataset!r}: no such dataset{near}\n"
            "list the datasets with `megablend datasets list`, or add one with `megablend datasets add NAME SOURCE...`"
        )

    def find(self, target: str) -> tuple[str, Revision | None]:
        """Find the dataset and the revision that a user names as NAME, NAME@latest or
        NAME@REVISION. Returns: the name of the dataset; its revision, or None for the latest one.
        Raises: ConfigError if no revision, or more than one, begins with REVISION."""
        dataset, _, digits = target.partition("@")
        known = self.find_dataset(dataset)
        if digits in ("", LATEST):
            return dataset, None
        matching = [candidate for candidate in known if candidate.digest.startswith(digits)]
        if len(matching) == 1 and len(digits) >= _LEAST_DIGITS:
            return dataset, matching[0]
        names = [candidate.digest[:_SHOWN_DIGITS] for candidate in known]
        near = did_you_mean(digits, [LATEST, *names], before=": ")
        problem = (
            "several revisions begin with these digits" if len(matching) > 1 else "no such revision"
        )
        raise ConfigError(
            f"{target!r}: {problem}{near}\n"
            f"give at least {_LEAST_DIGITS} digits of one of these: {', '.join(names[-5:])}"
        )

    def read_files(self, digest: str) -> Manifest:
        """Return the files of a revision. May be called in any thread. Raises: DataError if the
        manifest is damaged or missing."""
        with self._recent_lock:
            manifest = self._recent.pop(digest, None)
            if manifest is None:
                manifest = self._read_files(digest)
            self._recent[digest] = manifest
            while len(self._recent) > 1 and (
                sum(recent.num_text_bytes for recent in self._recent.values()) > _MAX_MANIFEST_BYTES
            ):
                self._recent.popitem(last=False)
        return manifest

    def read_known_files(self, digest: str) -> Manifest:
        """Return the files of a revision. If its manifest cannot be read, log a warning and return
        an empty manifest."""
        try:
            return self.read_files(digest)
        except DataError as error:
            LOG.warning("mirror: %s", error)
            return NO_FILES

    def find_state(self, location: str) -> SourceState | None:
        """Return the last known state of a file, according to the manifests; None if it is unknown.

        The state comes from a dataset's latest revision that contains the file. The time of the
        check is the time at which that revision's manifest was stored on this node. If only an
        earlier, wanted revision contains the file, the time is 0, since the source may have a newer
        version by now. May be called in any thread.
        """
        if not find_scheme(location):
            return None  # etags of opened files of a file system are longer than those of a listing
        latest: dict[str, Revision] = {}
        for revision in self.revisions.values():
            if revision.may_have(location):
                last = latest.get(revision.dataset, revision)
                latest[revision.dataset] = max(
                    last, revision, key=lambda candidate: candidate.added
                )
        states = list[SourceState]()
        for revision in latest.values():
            file = self._find_file(revision, location)
            if file is not None:
                with contextlib.suppress(OSError):
                    came_at = self._path(revision.digest).stat().st_mtime
                    states.append(SourceState(file.key.size, file.key.etag, came_at))
        if states:
            return max(states, key=lambda state: state.checked_at)
        wanted = [candidate for name, candidate in self.revisions.items() if name in self.wants]
        for revision in sorted(wanted, key=lambda candidate: candidate.added, reverse=True):
            file = self._find_file(revision, location) if revision.may_have(location) else None
            if file is not None:
                return SourceState(file.key.size, file.key.etag, 0.0)
        return None

    def _find_file(self, revision: Revision, location: str) -> DataFile | None:
        """Return the file of a revision that has this location. Return None if there is no such
        file, or if the manifest is damaged or missing, which is reported elsewhere."""
        try:
            return self.read_files(revision.digest).find_location(location)
        except (DataError, OSError):
            return None

    def remove(self) -> None:
        """Delete the catalog with all manifests."""
        self._database.remove()
        for path in self._manifests.glob("*.zlib*"):
            path.unlink()
        if self._manifests.exists():
            self._manifests.rmdir()

    def _path(self, digest: str) -> Path:
        return self._manifests / f"{digest}.zlib"

    def _read_files(self, digest: str) -> Manifest:
        path = str(self._path(digest))
        # In a cluster with etcd other nodes have it
        remedy = (
            "wait until another node has sent it"
            if self.own
            else "add the dataset again with `megablend datasets add`"
        )
        data = self.read_manifest(digest)
        if not data:
            problem = "has not been received yet" if self.own else "is missing"
            raise MissingFileError(path, f"{problem}; {remedy}")
        try:
            return Manifest.unpack(digest, data)
        except ValueError as error:
            if self.own:
                self._path(digest).unlink(missing_ok=True)
            raise DataError(path, f"{error}; {remedy}") from None

"""Which datasets, revisions and wants there are: a database and manifests in the mirror's folder.

datasets.db                  revisions and wants, by their names
manifests/<32 hex>.zlib      the files of a revision
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from megablend.errors import ConfigError, DataError, did_you_mean
from megablend.mirror.catalog.manifest import DataFile, unpack_manifest
from megablend.mirror.disk.database import Database
from megablend.mirror.disk.disk_calls import disk_error
from megablend.mirror.disk.folder import MirrorFolder
from megablend.system.atomic_write import flush_folder, write_flushed
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG

LATEST = "latest"
_SHOWN_DIGITS = 12
_LEAST_DIGITS = 4
_MOST_MANIFESTS = 4
"""In memory: one of a million files takes a gigabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A revision of a dataset."""

    dataset: str
    digest: str
    num_files: int
    num_bytes: int
    added: float
    """Seconds of the machine's clock."""
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        """In the catalog."""
        return f"{self.dataset}@{self.digest}"

    def __str__(self) -> str:
        return f"{self.dataset}@{self.digest[:_SHOWN_DIGITS]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A dataset is wanted on this node."""

    dataset: str
    revision: str
    """A digest, or LATEST."""
    is_whole: bool = False
    """This node holds all of it, not only its share."""
    is_pinned: bool = False
    until: float | None = None
    """Seconds of the machine's clock."""
    since: float

    @property
    def name(self) -> str:
        """In the catalog."""
        return f"{self.dataset}@{self.revision}"

    @property
    def target(self) -> str:
        """As users write it."""
        is_latest = self.revision == LATEST
        return f"{self.dataset}@{LATEST if is_latest else self.revision[:_SHOWN_DIGITS]}"


class Catalog:
    """Revisions and wants, changed by one thread: others may read `revisions` and `wants`, which are
    replaced. Raises: DataError if the disk fails.

    Args:
        folder: the mirror's.
    """

    def __init__(self, folder: MirrorFolder) -> None:
        self._database = Database(folder.datasets_path, is_lasting=True)
        self._manifests = folder.path / "manifests"
        self.revisions = {
            name: Revision(**parse_json(value))
            for name, value in self._database.get_all("revision").items()
        }
        self.wants = {
            name: Want(**parse_json(value))
            for name, value in self._database.get_all("want").items()
        }
        self.read_files = lru_cache(_MOST_MANIFESTS)(self._read_files)

    def add(self, revision: Revision, manifest: bytes) -> bool:
        """A revision is its dataset's latest now. Returns: whether it is a new one."""
        is_new = revision.name not in self.revisions
        others = [each.added for each in self.list_revisions(revision.dataset)]
        # Whatever becomes of the clock
        added = max([revision.added, *(each + 1e-3 for each in others)])
        revision = replace(revision, added=added)
        path = self._path(revision.digest)
        new = Path(f"{path}.new")
        try:
            self._manifests.mkdir(mode=0o700, exist_ok=True)
            new.unlink(missing_ok=True)
            write_flushed(new, [manifest])
            new.rename(path)
            flush_folder(self._manifests)
        except OSError as error:
            raise disk_error(path, error) from error
        self._database.put("revision", {revision.name: json.dumps(asdict(revision)).encode()})
        self.revisions = {**self.revisions, revision.name: revision}
        return is_new

    def put_want(self, want: Want) -> None:
        """Remember a want, in place of an earlier one of the same revision."""
        self._database.put("want", {want.name: json.dumps(asdict(want)).encode()})
        self.wants = {**self.wants, want.name: want}

    def remove_want(self, want: Want) -> None:
        """Forget a want."""
        self._database.delete("want", [want.name])
        self.wants = {name: each for name, each in self.wants.items() if name != want.name}

    def remove_revision(self, revision: Revision) -> None:
        """Forget a revision, and its manifest if no other dataset has the same files."""
        self._database.delete("revision", [revision.name])
        self.revisions = {
            name: each for name, each in self.revisions.items() if name != revision.name
        }
        if all(each.digest != revision.digest for each in self.revisions.values()):
            self._path(revision.digest).unlink(missing_ok=True)

    def list_revisions(self, dataset: str) -> list[Revision]:
        """Those of a dataset, the latest last."""
        found = [each for each in self.revisions.values() if each.dataset == dataset]
        return sorted(found, key=lambda each: each.added)

    def find_dataset(self, dataset: str) -> list[Revision]:
        """As `list_revisions`. Raises: ConfigError if there is no such dataset."""
        if found := self.list_revisions(dataset):
            return found
        known = {each.dataset for each in self.revisions.values()}
        near = did_you_mean(dataset, known, before=": ")
        raise ConfigError(
            f"{dataset!r}: no such dataset here{near}\n"
            "`megablend datasets list` shows those that there are, `megablend datasets add NAME SOURCE...` adds one"
        )

    def find(self, target: str) -> tuple[str, Revision | None]:
        """The dataset, and the revision, None for the latest, of NAME, NAME@latest or
        NAME@REVISION. Raises: ConfigError if there is none, or several."""
        dataset, _, digits = target.partition("@")
        known = self.find_dataset(dataset)
        if digits in ("", LATEST):
            return dataset, None
        found = [each for each in known if each.digest.startswith(digits)]
        if len(found) == 1 and len(digits) >= _LEAST_DIGITS:
            return dataset, found[0]
        names = [each.digest[:_SHOWN_DIGITS] for each in known]
        near = did_you_mean(digits, [LATEST, *names], before=": ")
        problem = "several revisions" if len(found) > 1 else "no such revision here"
        raise ConfigError(
            f"{target!r}: {problem}{near}\n"
            f"give {_LEAST_DIGITS} digits or more of one: {', '.join(names[-5:])}"
        )

    def read_known_files(self, digest: str) -> list[DataFile]:
        """As `read_files`; none of a damaged manifest, until its dataset is added again."""
        try:
            return self.read_files(digest)
        except DataError as error:
            LOG.warning("mirror: %s", error)
            return []

    def remove(self) -> None:
        """Delete all of it."""
        self._database.remove()
        for path in self._manifests.glob("*.zlib*"):
            path.unlink()
        if self._manifests.exists():
            self._manifests.rmdir()

    def _path(self, digest: str) -> Path:
        return self._manifests / f"{digest}.zlib"

    def _read_files(self, digest: str) -> list[DataFile]:
        """The files of a revision. Raises: DataError if its manifest is damaged."""
        path = self._path(digest)
        try:
            return unpack_manifest(digest, path.read_bytes())
        except FileNotFoundError:
            problem = "is gone"
        except OSError as error:
            raise disk_error(path, error) from error
        except ValueError as error:
            problem = str(error)
        remedy = "add the dataset again, with `megablend datasets add`"
        raise DataError(str(path), f"{problem}; {remedy}")

"""What a build has to do for each file: take its fragment, or index the file and leave one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megablend.errors import CacheError, ChangedFileError, ConfigError
from megablend.formats import FORMATS
from megablend.index.body import body_digest
from megablend.index.disk import finished
from megablend.index.fragments import Fragment, FragmentName, fragment_name, read_fragment, write_fragment
from megablend.index.sources import SourceFile, SourceListing, stat_file
from megablend.storage import storage_for

_FILE_COST = 1 << 20
"""Opening a file costs about as much as reading this many of its bytes."""
_FRAGMENT_COST = 1 << 14
_SEEN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One file of a build."""

    source: int
    """Index into the listings."""
    file: SourceFile
    documents: bool
    """Whether the fragment counts documents; one that does serves those who do not ask for it."""
    fragment: FragmentName
    known: bool
    """There is such a fragment (whole or not)."""
    changed: bool
    """There is none, but one of another version of the file."""

    @property
    def cost(self) -> int:
        """Estimated work, in bytes read."""
        return _FRAGMENT_COST if self.known else _FILE_COST + self.file.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What became of one file."""

    read: bool
    """The file was indexed now; its fragment served otherwise."""
    scanned_bytes: int
    note: str | None
    """What was wrong with the fragment that should have served."""


def plan_work(listings: Sequence[SourceListing], folder: Path) -> list[Work]:
    """The work of all files, in source and file order, given the fragments in `folder`."""
    present = [
        FragmentName(place=place, answer=answer) for place, _, answer in (n.partition("-") for n in finished(folder))
    ]
    answers, places = {name.answer: name for name in present}, {name.place for name in present}
    work = []
    for source, listing in enumerate(listings):
        for file in listing.files:
            names = {documents: fragment_name(listing, file, documents=documents) for documents in (True, False)}
            serving = [True] if listing.spec.documents else [True, False]
            known = [documents for documents in serving if names[documents].answer in answers]
            documents = known[0] if known else listing.spec.documents
            name = names[documents]
            work.append(
                Work(
                    source=source,
                    file=file,
                    documents=documents,
                    fragment=answers.get(name.answer, name),
                    known=bool(known),
                    changed=not known and name.place in places,
                )
            )
    return work


def ensure_fragment(work: Work, listing: SourceListing, folder: Path) -> Done:
    """Make sure that a whole fragment of the file lies in `folder`.

    Raises: DataError, ConfigError of its format; ChangedFileError where the file changes meanwhile; CacheError.
    """
    path = folder / str(work.fragment)
    note = None
    if work.known:
        try:
            read_fragment(path)
        except FileNotFoundError:
            note = f"{path}: vanished"
        except CacheError as error:
            note = str(error)
        else:
            return Done(read=False, scanned_bytes=0, note=None)
    fragment = _index(work, listing)
    write_fragment(path, fragment)
    return Done(read=True, scanned_bytes=fragment.index.scanned_bytes, note=note)


def await_fragment(path: Path) -> Fragment:
    """A fragment that another rank has written; network file systems may show it some seconds late.

    Raises: CacheError where it does not appear, or is damaged.
    """
    deadline = time.monotonic() + _SEEN_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            raise CacheError(
                f"{path}: another rank wrote this fragment, but rank 0 does not see it: the cache must lie on a file "
                "system that all ranks share; choose such a directory, or build with the ranks of one node"
            )
        time.sleep(0.1)
    return read_fragment(path)


def _index(work: Work, listing: SourceListing) -> Fragment:
    spec, file = listing.spec, work.file
    kind, storage = FORMATS[listing.format], storage_for(file.path)
    try:
        index = kind.index(
            file.path, spec.column, storage=storage, documents=work.documents, block_bytes=spec.block_bytes
        )
    except ConfigError as error:
        raise spec.complaint(error) from error
    body = body_digest(file.path, file.size, storage)
    if stat_file(kind.files(file.path), listing.root).etag != file.etag:
        raise ChangedFileError(file.path, "changed while it was being indexed; let its writer finish, then build again")
    return Fragment(index=index, body=body)

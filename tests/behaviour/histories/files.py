"""Data files that come, go and are renamed during a run, and which tokens a source has in each snapshot of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from megablend.testing.documents import Documents
from tests.formats.writers import KINDS

SPLITS = ("train", "valid", "test")
_KINDS = ("parquet", "parquet-v2-unindexed", "arrow-lz4", "megatron")


@dataclass
class DataFile:
    """A file of a source."""

    source: int
    path: Path
    documents: Documents
    arrived: int
    """The snapshot with which it came."""
    first: int = 0
    """Documents before it, among those of its source that came with the same snapshot."""
    is_gone: bool = False


class Files:
    """Files whose tokens are all different. The sources of a snapshot are numbered; each has files of one format.

    Args:
        shares: of train, valid and test.
        appends_eod: whether the run adds a token after each document: the twin calls that of the document that ends with token t
            -t.
    """

    def __init__(
        self, folder: Path, rng: random.Random, shares: Sequence[Fraction], *, appends_eod: bool
    ) -> None:
        self.folder = folder
        self.rng = rng
        self.shares = shares
        self.appends_eod = appends_eod
        self.kinds = list[str]()
        self.files = list[DataFile]()
        self.snapshots = list[list[DataFile]]()
        self.lost_by: int | None = None
        """The source that lost a file with the last change."""
        self._next_token = 1
        for _ in range(2):
            self.add_source()
        self.take_snapshot()

    @property
    def num_sources(self) -> int:
        """How many sources there are so far."""
        return len(self.kinds)

    def add_source(self) -> None:
        """A new source of two files."""
        self.kinds.append(self.rng.choice(_KINDS))
        for _ in range(2):
            self.add_file(self.num_sources - 1)

    def add_file(self, source: int) -> None:
        """A new file of a source, which may come before others by its name."""
        kind = KINDS[self.kinds[source]]
        listed = list[list[int] | None]()
        for _ in range(self.rng.randrange(20, 50)):
            size = self.rng.choice([0, 1, self.rng.randrange(30), self.rng.randrange(30)])
            listed.append(list(range(self._next_token, self._next_token + size)) if size else None)
            self._next_token += size
        path = self._new_path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind.write(path, listed)
        self.files.append(DataFile(source, path, listed, len(self.snapshots)))

    def change(self) -> int | None:
        """A file or a source is new; perhaps a file is gone, and perhaps one is renamed. Returns: whose."""
        living = [source for source in range(self.num_sources) if self.list_files(source)]
        source = self.rng.choice([*living, *([self.num_sources] if self.num_sources < 4 else [])])
        if source == self.num_sources:
            self.add_source()
        else:
            self.add_file(source)
        renamed = None
        self.lost_by = None
        for chance, act in ((0.3, self._remove), (0.3, self._rename)):
            if self.rng.random() < chance:
                file = self.rng.choice([each for each in self.files if not each.is_gone])
                act(file)
                renamed = file.source if act == self._rename else None
        self.take_snapshot()
        return renamed

    def withdraw(self, source: int) -> None:
        """All files of a source go."""
        for file in self.list_files(source):
            file.is_gone = True
        self.take_snapshot()

    def list_files(self, source: int) -> list[DataFile]:
        """The files that a source has now, by path."""
        return sorted(
            (f for f in self.files if f.source == source and not f.is_gone),
            key=lambda file: file.path,
        )

    def take_snapshot(self) -> None:
        """Remember the files as they are now."""
        for source in range(self.num_sources):
            before = 0
            for file in self.list_files(source):
                if file.arrived == len(self.snapshots):
                    file.first = before
                    before += len(file.documents)
        self.snapshots.append([file for file in self.files if not file.is_gone])

    def list_tokens(self) -> dict[int, tuple[int, int, int]]:
        """Of each token that there ever was: its source, its document, and how many tokens are left in that."""
        documents = [
            (file.source, document)
            for file in self.files
            for document in file.documents
            if document
        ]
        return {
            token: (source, number, len(document) - i - 1)
            for number, (source, document) in enumerate(documents)
            for i, token in enumerate(document)
        }

    @contextlib.contextmanager
    def hide_gone(self) -> Iterator[None]:
        """Files that are gone are not found meanwhile; afterwards what the run read of them can be compared."""
        hidden = [
            (path, path.with_name(f"{path.name}.gone"))
            for f in self.files
            if f.is_gone
            for path in _paths(f)
        ]
        for path, other in hidden:
            path.rename(other)
        try:
            yield
        finally:
            for path, other in hidden:
                other.rename(path)

    def tokens(self, snapshot: int, source: int, split: str = "train") -> frozenset[int]:
        """The tokens of a source in a snapshot, in a split."""
        found = set[int]()
        i = SPLITS.index(split)
        low = sum(self.shares[:i], Fraction(0))
        high = sum(self.shares[: i + 1], Fraction(0))
        for file in self.snapshots[snapshot]:
            if file.source != source:
                continue
            size = sum(
                len(f.documents)
                for f in self.snapshots[file.arrived]
                if (f.source, f.arrived) == (source, file.arrived)
            )
            for number, document in enumerate(file.documents, file.first):
                if round(low * size) <= number < round(high * size):
                    found |= set(document or ())
                    found |= {-document[-1]} if document and self.appends_eod else set()
        return frozenset(found)

    def _remove(self, file: DataFile) -> None:
        others = [
            f
            for f in self.list_files(file.source)
            if f is not file and f.arrived < len(self.snapshots)
        ]
        if file.arrived < len(self.snapshots) and others:
            file.is_gone = True
            self.lost_by = file.source

    def _rename(self, file: DataFile) -> None:
        if file.is_gone or file.arrived == len(self.snapshots):
            return
        new = self._new_path(file.source)
        for path in _paths(file):
            path.rename(new.with_suffix(path.suffix))
        file.path = new

    def _new_path(self, source: int) -> Path:
        return (
            self.folder
            / f"source{source}"
            / f"{self.rng.randrange(10**9)}{KINDS[self.kinds[source]].suffix}"
        )


def _paths(file: DataFile) -> list[Path]:
    """The path of a file, and of the .idx next to it."""
    return [each for each in (file.path, file.path.with_suffix(".idx")) if each.exists()]

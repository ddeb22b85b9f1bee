"""Files of a storage under test."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from megablend.storage.base import Storage
from megablend.storage.location import join

CONTENT = random.Random(3).randbytes(5 * 4096 + 1234)
"""The content of every file but the empty one; the file's name is appended to it."""
NAMES = (
    "t/a.bin",
    "t/b.bin",
    "t/sub/c.bin",
    "t/sub/deep/d.bin",
    "t/ sp ace.bin",
    "t/%20.bin",
    "t/[1].bin",
    "t/é.bin",
    "t/q?.bin",
    "t/+&#=;.bin",
    "t/'\"<>.bin",
    "t/.hidden.bin",
    "t/empty.bin",
    "tt/x.bin",
)
"""The names of the files that each storage must find and read."""
A_FILE = "t/a.bin"
"""The file that most tests read."""


def make_content(name: str) -> bytes:
    """Return the content of one of the files."""
    return b"" if name.endswith("empty.bin") else CONTENT + name.encode()


class StorageFiles:
    """The attributes and methods that a subclass of the contract provides."""

    lists_files = True
    """Whether the storage finds files by patterns; a web server knows only complete names."""
    works_after_fork = True
    """Whether a forked process can use the storage of its parent."""
    missing = "no such file"
    """A regular expression for the message about a file that does not exist."""
    names = NAMES
    """The names of the test files. Leave out those that the storage's locations cannot have."""

    def write_files(self, folder: Path, files: Mapping[str, bytes]) -> str:
        """Store files. Files of an earlier call are replaced.

        Args:
            folder: a temporary folder of the test, the same in all calls of the test.
            files: contents by name, with `/` between folders.

        Returns: the location that the names are relative to, the same in all calls of the test.
        """
        raise NotImplementedError

    def make_storage(self) -> Storage:
        """Return a new storage that finds the files of the last call of `write_files`."""
        raise NotImplementedError

    def locate(self, root: str, name: str) -> str:
        """Return the location of a file; override this method if names are encoded."""
        return join(root, name)

    def write_all(self, folder: Path) -> str:
        """Store the files of `names`."""
        return self.write_files(folder, {name: make_content(name) for name in self.names})

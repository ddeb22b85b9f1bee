"""Which text this machine has: the files of four sources, in an order that depends on their names and a seed alone.

`stdlib`: the standard library's sources. `packages`: sources (Python, C, C++) of installed packages. `docs`:
descriptions, manuals, and the docstrings of all Python files. `licences`: licences, notices, lists of authors. Python
code, C code, prose and law differ enough for a blend of them to be worth looking at.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import os
import re
import site
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = ("licences", "docs", "stdlib", "packages")
"""From the one with the least text on an ordinary machine to the one with the most."""

MIN_BYTES = 64
MAX_BYTES = 1 << 20
"""Sizes of the files that are taken: larger ones are mostly generated tables."""

_LICENCE = re.compile(r"(licen[cs]e|copying|copyright|notice|authors|thirdparty)", re.IGNORECASE)
_CODE = {".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".cc", ".cpp", ".hpp", ".cuh"}
_PROSE = {".md", ".rst", ".txt"}
_MANUAL = re.compile(r"\.[1-8](\.gz)?$")
_DOCSTRING = re.compile(r'^[ \t]*[rR]?"""(.*?)"""[ \t]*$', re.DOTALL | re.MULTILINE)
_SYSTEM_ROOTS = (
    "/usr/share/common-licenses",
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/include",
    "/usr/lib/python3/dist-packages",
)
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", ".git", "node_modules"}


class Candidate(NamedTuple):
    """A file whose text may become a document."""

    path: str
    docstrings: bool
    """Take the docstrings of a Python file in place of its code."""


class Text(NamedTuple):
    """A document-to-be and where it is from."""

    path: str
    text: str


def roots() -> list[Path]:
    """Folders to search: the standard library first, then what is installed beside it and on the system."""
    paths = sysconfig.get_paths()
    found = [
        paths["stdlib"],
        paths["purelib"],
        paths["platlib"],
        *site.getsitepackages(),
        paths["include"],
        *_SYSTEM_ROOTS,
    ]
    folders = (Path(folder).resolve() for folder in found)
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def candidates(folders: Iterable[Path], seed: int) -> dict[str, list[Candidate]]:
    """The files of each source, shuffled by a hash of name and `seed`: the first part of a list is a fair sample.

    A name counts from its folder on, so that the order is the same wherever the folder lies.
    """
    found: dict[str, dict[Candidate, bytes]] = {name: {} for name in SOURCES}
    stdlib = Path(sysconfig.get_paths()["stdlib"]).resolve()
    key = str(seed).encode()
    for folder in folders:
        for path in _walk(folder):
            place = hashlib.blake2b(
                os.fsencode(path.relative_to(folder)), key=key, digest_size=16
            ).digest()
            name = source_of(path, in_stdlib=folder == stdlib)
            if name is not None:
                found[name].setdefault(Candidate(str(path), docstrings=False), place)
            if path.suffix == ".py":
                found["docs"].setdefault(Candidate(str(path), docstrings=True), place)
    return {
        name: sorted(files, key=lambda file: (files[file], file)) for name, files in found.items()
    }


def source_of(path: Path, *, in_stdlib: bool) -> str | None:
    """The source that a file belongs to by its name; None where it is no text we want."""
    suffix = path.suffix.lower()
    if suffix in _CODE:
        return "stdlib" if in_stdlib else "packages"
    if _LICENCE.search(path.name) or path.parent.name in ("licenses", "common-licenses"):
        return "licences"
    if suffix in _PROSE or path.name == "METADATA" or path.name.lower().startswith("readme"):
        return "docs"
    if "/share/man/" in str(path) and _MANUAL.search(path.name):
        return "docs"
    return (
        "docs" if path.name.endswith((".md.gz", ".txt.gz", "changelog.gz", "README.gz")) else None
    )


def texts(files: Iterable[Candidate], seen: set[bytes]) -> Iterator[Text]:
    """Texts of the files that are readable, in UTF-8, and not in `seen` (hashes of texts; it grows)."""
    for file in files:
        text = _read(file.path)
        if text is not None and file.docstrings:
            text = docstrings(text)
        if text is None or len(text) < MIN_BYTES:
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield Text(file.path, text)


def docstrings(code: str) -> str:
    """The docstrings of a Python file, blank lines between them."""
    return "\n\n".join(inspect.cleandoc(found) for found in _DOCSTRING.findall(code))


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            yield Path(parent, name)


def _read(path: str) -> str | None:
    """The file's text; None where it is no regular file of a usual size, or not UTF-8."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or not MIN_BYTES <= status.st_size <= MAX_BYTES:
            return None
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            content = file.read(4 * MAX_BYTES)
        text = content.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text

"""The rooms of the package, as the table in docs/architecture.md: python tools/rooms.py

A room is a folder or a file directly inside the package, and a folder inside some of them. Of each: what it is for (the
first sentence of its docstring), its size, and which rooms it imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import megablend

PACKAGE = Path(megablend.__file__).parent
LAYERS = [
    "arrays",
    "errors",
    "lazy",
    "lru",
    "system",
    "jit_cache",
    "jit",
    "intrinsics",
    "kernels",
    "order",
    "storage",
    "caches",
    "mirror",
    "config",
    "distributed",
    "formats",
    "index",
    "text",
    "blend",
    "run",
    "testing",
    "prefetch",
    "reader",
    "operations",
    "inspect",
    "api",
    "megatron",
    "cli",
]
"""From the lowest to the highest: none imports a later one."""
BASE = frozenset({"arrays", "errors", "lazy", "lru", "system", "jit", "intrinsics"})
"""What every room may use, and the table leaves out."""
DIVIDED = ("index", "megatron", "mirror")
"""Rooms whose folders stand in the table, too."""


def list_rooms() -> list[Path]:
    """Folders and files of rooms, from the highest layer to the lowest."""
    rooms = []
    for layer in reversed(LAYERS):
        folder = PACKAGE / layer
        rooms.append(folder if folder.is_dir() else folder.with_suffix(".py"))
        if layer in DIVIDED:
            rooms += sorted(path.parent for path in folder.glob("*/__init__.py"))
    return rooms


def name_of(room: Path) -> str:
    """A room's path within the package."""
    path = room.relative_to(PACKAGE).with_suffix("").as_posix()
    return f"{path}/" if room.is_dir() else path


def list_files(room: Path) -> list[Path]:
    """The files of a room."""
    return sorted(room.rglob("*.py")) if room.is_dir() else [room]


def describe(room: Path) -> str:
    """The first sentence of a room's docstring."""
    text = ast.get_docstring(
        ast.parse((room / "__init__.py" if room.is_dir() else room).read_text())
    )
    assert text is not None, f"{room} has no docstring"
    return " ".join(text.split("\n\n")[0].split()).removesuffix(":")


def list_imports(room: Path) -> list[str]:
    """The layers that a room imports, without itself and what all may use."""
    layers = set()
    for path in list_files(room):
        layers |= {name.split(".")[1] for name in _imports(path) if name.startswith("megablend.")}
    layers -= BASE | {room.relative_to(PACKAGE).parts[0].removesuffix(".py")}
    return sorted(layers & set(LAYERS), key=LAYERS.index, reverse=True)


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "megablend":
            yield from (f"megablend.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def count_lines(room: Path) -> int:
    """Lines of a room's files, with docstrings."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in list_files(room))


def list_rows() -> list[list[str]]:
    """The rows of the table: name, purpose, files, thousands of lines, imports."""
    return [
        [
            f"`{name_of(room)}`",
            describe(room),
            str(len(list_files(room))),
            f"{count_lines(room) / 1000:.1f}",
            ", ".join(list_imports(room)),
        ]
        for room in list_rooms()
    ]


def make_table() -> str:
    """The table in Markdown."""
    head = ["room", "what it is for", "files", "lines, k", "imports"]
    rows = [head, ["---"] * len(head), *list_rows()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(make_table())

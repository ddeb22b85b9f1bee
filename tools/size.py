"""How large the package is, in a measure that formatting cannot change: python tools/size.py [FOLDER]

Counted are the nodes of the syntax trees without imports, docstrings and annotations; beside them, for orientation, files, lines,
classes that are records (dataclasses and named tuples), and statements that assign several values to several names at once.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_RECORDS = ("dataclass", "NamedTuple", "TypedDict")


def count_nodes(tree: ast.AST) -> int:
    """Nodes of a tree without imports, docstrings and annotations, and without contexts (Load, Store), which say nothing."""
    return sum(1 for _ in _walk(tree))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.expr_context):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_text(child):
                yield from _walk(child)


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or one under an attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_record(node: ast.ClassDef) -> bool:
    marks = [*node.decorator_list, *node.bases]
    return any(name in ast.unparse(mark) for mark in marks for name in _RECORDS)


def _is_parallel(node: ast.AST) -> bool:
    """Whether several values are assigned to several names, other than to swap them."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    if not isinstance(node.targets[0], ast.Tuple):
        return False
    names = {ast.unparse(name) for name in node.targets[0].elts}
    return names != {ast.unparse(value) for value in node.value.elts}


def measure(path: Path) -> Counter[str]:
    """The counts of one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    return Counter(
        files=1,
        lines=text.count("\n"),
        nodes=count_nodes(tree),
        records=sum(isinstance(node, ast.ClassDef) and _is_record(node) for node in nodes),
        parallel=sum(map(_is_parallel, nodes)),
    )


def main() -> None:
    """Print a line for each room, and their sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("megablend"))
    folder = parser.parse_args().folder
    rooms: dict[str, Counter[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        rooms.setdefault(parts[0] if len(parts) > 1 else ".", Counter()).update(measure(path))
    columns = ("files", "lines", "nodes", "records", "parallel")
    print(f"{'room':14}" + "".join(f"{column:>10}" for column in columns))
    for room, counts in [*rooms.items(), ("all", sum(rooms.values(), Counter[str]()))]:
        print(f"{room:14}" + "".join(f"{counts[column]:10,}" for column in columns))


if __name__ == "__main__":
    main()

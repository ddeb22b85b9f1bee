"""Small faults put into a copy of the package, to see whether a test fails: python tools/mutants.py run [NUMBER...] [--whole]

tools/mutants.json has the faults (mutants): each is a piece of source text in which « » mark what is replaced, what is put `into`
its place, and `tests` that fail then; where there are none, `why` none has to. A mutant is applied by its text, in whatever file
has it, whatever its line breaks. `run` tells whether each dies, survives its tests, or its text is gone; with `--whole`, those
that survive go through all tests of FOLDERS. Tests that fail are noted. `draw SEED COUNT FILE...` adds others to the table.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import pytest

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tools" / "mutants.json"
FOLDERS = ("tests/blend", "tests/run", "tests/operations", "tests/inspect", "tests/releases")
Mutant: TypeAlias = dict[str, Any]
# Function, what is replaced, by what, nodes around it
Change: TypeAlias = tuple[str, Any, ast.AST, list[Any]]
_PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, And Or, min max, any all"
_OPPOSITE = {
    a: b for one, two in map(str.split, _PAIRS.split(",")) for a, b in ((one, two), (two, one))
}


def list_faults(node: Any) -> Iterator[tuple[Any, ast.AST]]:
    """Small faults of one node: what to replace, and by what."""
    other = copy.deepcopy(node)
    if isinstance(node, ast.Compare):
        other.ops[0] = getattr(ast, _OPPOSITE[type(node.ops[0]).__name__])()
        yield node, other
    elif (name := type(getattr(node, "op", None)).__name__) in _OPPOSITE:
        other.op = getattr(ast, _OPPOSITE[name])()
        yield node, other
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        others = (
            [not node.value] if isinstance(node.value, bool) else [node.value + 1, node.value - 1]
        )
        yield from ((node, ast.Constant(other)) for other in others)
    elif isinstance(node, ast.Name) and node.id in _OPPOSITE:
        yield node, ast.Name(_OPPOSITE[node.id])
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield node.ifs[0], ast.UnaryOp(ast.Not(), node.ifs[0])
    elif isinstance(node, ast.Call) and len(node.args) > 1 and "*" not in ast.unparse(node):
        other.args[:2] = other.args[1::-1]
        yield node, other
    elif isinstance(node, ast.Raise | ast.AugAssign) or ast.dump(node).startswith(
        "Expr(value=Call("
    ):
        yield node, ast.Pass()


def list_changes(
    node: ast.AST, around: Sequence[ast.AST] = (), function: str = ""
) -> Iterator[Change]:
    """All faults of a tree's functions, except in f-strings, of whose parts Python 3.11 does not know the places."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    if function:
        yield from ((function, target, into, [node, *around]) for target, into in list_faults(node))
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.JoinedStr) or name in (
            "annotation",
            "returns",
            "decorator_list",
            "type_params",
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from list_changes(child, [node, *around], function)


def describe(change: Change, path: Path, package: str) -> Mutant | None:
    """A change as the table has it; None where its text, or that of what surrounds it, is nowhere unique."""
    text = path.read_text(encoding="utf-8")
    function, target, other, around = change
    begin, end = find_place(target, text)
    into = (
        ast.unparse(other)
        if isinstance(other, ast.stmt | ast.Constant | ast.Name)
        else f"({ast.unparse(other)})"
    )
    for node in (target, *around):
        if not hasattr(node, "lineno") or isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        start, stop = find_place(node, text)
        if isinstance(node, ast.If | ast.While | ast.For | ast.With | ast.Try):
            stop = min(stop, text.index("\n", end))
        marked = f"{text[start:begin]}«{text[begin:end]}»{text[end:stop]}"
        if stop - start in range(24, 700) and len(make_pattern(marked).findall(package)) == 1:
            file = str(path.relative_to(ROOT))
            return {"file": file, "function": function, "text": marked, "into": into, "tests": []}
    return None


def find_place(node: Any, text: str) -> tuple[int, ...]:
    """Where a node's text begins and ends. (Columns of a tree are bytes.)"""
    lines = text.encode().splitlines(keepends=True)
    ends = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
    return tuple(
        len(b"".join([*lines[: row - 1], lines[row - 1][:byte]]).decode()) for row, byte in ends
    )


def make_pattern(marked: str) -> re.Pattern[str]:
    """Finds a text whatever its line breaks; its groups are what stands before, between and after the marks."""
    groups = []
    for part in re.split("[«»]", marked):
        words = re.findall(r"\w+|[^\w\s]", re.sub(r",\s*([)\]}])", r"\1", part))
        groups.append(
            r"\s*".join((r",?\s*" if word in ")]}" else "") + re.escape(word) for word in words)
        )
    return re.compile(r"(?<!\w)({}\s*)({})(\s*{})(?!\w)".format(*groups))


def apply(mutant: Mutant, root: Path) -> tuple[Path, str] | None:
    """The file that has a mutant's text, and its text with the fault; that in the function of its name where several have it."""
    found = []
    for path in sorted(root.glob("megablend/**/*.py")):
        text = path.read_text(encoding="utf-8")
        for match in make_pattern(mutant["text"]).finditer(text):
            names = re.findall(r"^ *(?:def|class) (\w+)", text[: match.start()], re.MULTILINE)
            changed = text[: match.end(1)] + mutant["into"] + text[match.start(3) :]
            found.append((mutant["function"].endswith(names[-1]), path, changed))
    return max(found, key=lambda each: each[0])[1:] if found else None


def find_tests(names: Sequence[str], root: Path) -> list[str]:
    """Arguments of pytest for tests of these names, in whatever files they are now."""
    functions = "|".join(name.rpartition("::")[2].partition("[")[0] for name in names)
    paths = sorted(root.glob("tests/**/test_*.py"))
    files = [
        str(path)
        for path in paths
        if re.search(rf"\b({functions})(\(| = )", path.read_text(encoding="utf-8"))
    ]
    return [*files, "-k", functions.replace("|", " or ")] if names and files else []


def run_tests(arguments: Sequence[str], root: Path) -> list[str]:
    """The names of tests that fail, a few at most; what happened instead where none has a name; none where all pass."""
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--maxfail=3",
        "--timeout=120",
        "-rfE",
        "-m",
        "not slow",
        *arguments,
    ]
    command = ["timeout", "900", "nice", "-n", "19", sys.executable, "-m", "pytest", *options]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return []
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE) or [
        "(all: none can be run, or time is over)"
    ]


def draw(seed: int, count: int, files: Sequence[Path], table: Sequence[Mutant]) -> list[Mutant]:
    """Other mutants than those of `table`, of all kinds equally many, at most one with the same text around it."""
    package = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("megablend/**/*.py"))
    kinds: dict[str, list[tuple[Path, Change]]] = {}
    for path in files:
        for change in list_changes(ast.parse(path.read_text(encoding="utf-8"))):
            kinds.setdefault(f"{type(change[1])} {type(change[2])}", []).append((path, change))
    orders = [random.Random(seed).sample(changes, len(changes)) for changes in kinds.values()]
    drawn: list[Mutant] = []
    texts = {re.sub("[«»]", "", mutant["text"]) for mutant in table}
    for path, change in filter(None, chain.from_iterable(zip_longest(*orders))):
        mutant = describe(change, path, package) if len(drawn) < count else None
        if mutant and (text := re.sub("[«»]", "", mutant["text"])) not in texts:
            texts.add(text)
            drawn.append(mutant)
    return drawn


def run(numbers: Sequence[int], table: Sequence[Mutant], *, whole: bool) -> None:
    """Apply mutants one after the other to a copy of the project; print what becomes of each, and note which tests fail."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        subprocess.run(
            f"git ls-files -z | xargs -0 cp --parents -t {folder}", shell=True, cwd=ROOT, check=True
        )
        for number in numbers:
            mutant = table[number]
            outcome = "its text is gone"
            if place := apply(mutant, root):
                path, changed = place
                original = path.read_text(encoding="utf-8")
                path.write_text(changed, encoding="utf-8")
                # Else Python takes what it compiled of another mutant
                os.utime(path, (number + 1, number + 1))
                tests = find_tests(mutant["tests"], root)
                failed = (run_tests(tests, root) if tests else []) or (
                    run_tests(FOLDERS, root) if whole else []
                )
                mutant["tests"] = failed or mutant["tests"]
                outcome = f"dies by {failed[0]}" if failed else "SURVIVES"
                path.write_text(original, encoding="utf-8")
            print(f"{number:4} {mutant['file']}: {mutant['function']}: {outcome}", flush=True)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("action", choices=("run", "draw"))
    parser.add_argument("values", nargs="*")
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    table: list[Mutant] = json.loads(TABLE.read_text(encoding="utf-8"))
    if given.action == "run":
        run([int(value) for value in given.values] or range(len(table)), table, whole=given.whole)
    else:
        seed, count, *files = given.values
        table += draw(int(seed), int(count), [ROOT / file for file in files], table)
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

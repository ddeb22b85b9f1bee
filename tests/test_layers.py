"""Imports point downwards only, without circles, and each heavy dependency has one home."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from rooms import LAYERS, list_rows

import megablend

ROOT = Path(megablend.__file__).parent
HOMES = {
    "numba": {"jit", "jit_cache", "intrinsics"},
    "llvmlite": {"jit", "intrinsics"},
    "pyarrow": {"formats", "index", "inspect", "text", "storage"},
    "arro3": {"storage"},
    "mpi4py": {"distributed"},
    "torch": {"distributed", "reader", "megatron"},
    "megatron": {"megatron"},
    "pydantic": {"config", "storage"},
    "yaml": {"config"},
    "click": {"cli"},
    "rich": {"cli"},
    "tokenizers": {"cli", "text"},
    "gigatoken": {"text"},
    "msgspec": {"text"},
    "prometheus_client": {"reader"},
    "obstore": {"storage"},
    "aiohttp": {"mirror"},
    "matplotlib": {"inspect"},
}
MAX_LINES = 500


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


MODULES = [p for p in sorted(ROOT.rglob("*.py")) if layer(p) not in ("__init__", "__main__")]


def test_imports_point_downwards() -> None:
    wrong = list[str]()
    for path in MODULES:
        assert layer(path) in LAYERS, f"{path} belongs to no layer"
        for name in imports(path):
            package, _, rest = name.partition(".")
            if package == "megablend" and rest:
                target = rest.split(".")[0]
                if LAYERS.index(target) > LAYERS.index(layer(path)):
                    wrong.append(f"{path} imports upwards: {name}")
            if layer(path) not in HOMES.get(package, {layer(path)}):
                wrong.append(f"{path} imports {package}, whose home is {HOMES[package]}")
    assert not wrong


def module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_modules() -> dict[str, set[str]]:
    """For each module of the package, those that it imports, wherever the import stands."""
    names = {module(path): path for path in ROOT.rglob("*.py")}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= (inner & names.keys()) or {node.module}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & names.keys()
    return found


def circle(edges: dict[str, set[str]]) -> list[str] | None:
    """Some nodes that lead back to the first of them, or None."""
    done: set[str] = set()

    def search(node: str, way: list[str]) -> list[str] | None:
        if node in way:
            return way[way.index(node) :]
        if node in done:
            return None
        for other in sorted(edges.get(node, ())):
            if other != node and (way_back := search(other, [*way, node])):
                return way_back
        done.add(node)
        return None

    return next((found for node in sorted(edges) if (found := search(node, []))), None)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(imported_modules()) is None


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


PACKAGES = sorted(module(path) for path in ROOT.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_rooms_of_a_package_import_each_other_in_a_circle(package: str) -> None:
    """What is directly inside a package, each file or folder as one."""
    inside = f"{package}."
    if package == "megablend":
        return  # the layers say it, and `megablend` itself is what users import
    edges: dict[str, set[str]] = {}
    for name, targets in imported_modules().items():
        if name.startswith(inside):
            room = name.removeprefix(inside).split(".")[0]
            others = {
                each.removeprefix(inside).split(".")[0]
                for each in targets
                if each.startswith(inside)
            }
            edges.setdefault(room, set()).update(others - {room})
    assert circle(edges) is None


def test_no_file_is_longer_than_500_lines() -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in ROOT.rglob("*.py")}
    assert not {str(path): count for path, count in lines.items() if count > MAX_LINES}


def test_class_variables_name_their_types() -> None:
    """Python before 3.10.5 has no bare ClassVar in annotations that are strings, as pydantic reads."""
    bare = re.compile(r":\s*ClassVar\s*(=|$)", re.MULTILINE)
    assert not [path for path in MODULES if bare.search(path.read_text(encoding="utf-8"))]


def test_storage_is_handed_down() -> None:
    """Whoever reads takes the `Storage` it is given; only storage itself knows which there are."""
    for path in MODULES:
        if layer(path) == "storage":
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(storage_for|(Local|Direct)Storage)\b", text), (
            f"{path} chooses a storage"
        )
        made = "make_storage" in text
        assert not made or layer(path) in ("operations", "megatron", "mirror", "cli", "testing"), (
            f"{path} makes a storage; take one as an argument"
        )


def test_the_table_of_rooms_in_the_docs_is_true() -> None:
    """Names, purposes and imports as they are; sizes roughly, since each commit changes them."""
    text = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    rows = list_rows()
    told = told[: len(rows)]
    for column in (0, 1, 4):
        assert [row[column] for row in told] == [row[column] for row in rows], (
            "python tools/rooms.py prints the table for docs/architecture.md"
        )
    for row, other in zip(told, rows, strict=True):
        assert abs(int(row[2]) - int(other[2])) <= 3 + int(other[2]) // 5
        assert abs(float(row[3]) - float(other[3])) <= 0.1 + float(other[3]) / 5


MENTION = re.compile(r"`(?:megablend\.)?([a-z_]+(?:\.[a-z_]+)+)`")
SETTINGS = re.compile(r"mirror\.(etcd\.)?[a-z_]+")
"""Settings of a config that messages name by their path, as in `mirror.size`."""


def _is_setting(name: str) -> bool:
    """Whether a name is that of a mirror's setting, which is a field of its options."""
    from megablend.storage.mirror_options import EtcdOptions, MirrorOptions

    owner = EtcdOptions if name.startswith("mirror.etcd.") else MirrorOptions
    return name.rpartition(".")[2] in owner.model_fields


def test_modules_that_comments_mention_are_there() -> None:
    """What begins with the name of a room is a module, or something in one."""
    wrong = list[str]()
    for path in MODULES:
        for name in MENTION.findall(path.read_text(encoding="utf-8")):
            parts = name.split(".")
            if parts[0] not in LAYERS or layer(path) == "api" or name == "config.path_to_cache":
                continue  # others' names: old ones, and a field of Megatron's config
            if SETTINGS.fullmatch(name) and _is_setting(name):
                continue
            places = [ROOT.joinpath(*parts[: n + 1]) for n in range(len(parts))]
            if not places[-1].is_dir() and not any(
                each.with_suffix(".py").exists() for each in places
            ):
                wrong.append(f"{path} mentions {name}")
    assert not wrong

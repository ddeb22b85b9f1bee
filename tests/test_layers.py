"""Imports point downwards only, and each heavy dependency has one home."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "megablend"
LAYERS = [
    "errors",
    "system",
    "config",
    "jit",
    "kernels",
    "storage",
    "formats",
    "index",
    "order",
    "plan",
    "exact",
    "reader",
    "api",
    "megatron",
    "cli",
]
HOMES = {
    "numba": {"jit"},
    "llvmlite": {"jit"},
    "pyarrow": {"formats", "index"},
    "mpi4py": {"index"},
    "torch": {"reader", "megatron"},
    "megatron": {"megatron"},
    "pydantic": {"config"},
    "yaml": {"config"},
    "click": {"cli"},
    "rich": {"cli"},
    "tokenizers": {"cli"},
}


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


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    assert layer(path) in LAYERS, f"{path} belongs to no layer"
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "megablend" and rest:
            target = rest.split(".")[0]
            assert LAYERS.index(target) <= LAYERS.index(layer(path)), f"{path} imports upwards: {name}"
        assert layer(path) in HOMES.get(package, {layer(path)}), (
            f"{path} imports {package}, whose home is {HOMES[package]}"
        )

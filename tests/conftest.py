"""Scripts that tests start find the project and the package of its tests. Without torch, the tests that need it are skipped.
Quick tests are marked by where they are."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

pytest.register_assert_rewrite("megablend.testing")  # so that failed assertions of the contracts show their values

ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))


class SkipWithoutTorch(MetaPathFinder):
    """Skips the test, or the module of tests, that is the first to import torch."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] in ("torch", "megatron"):
            pytest.skip(f"{name} is not installed", allow_module_level=True)


if importlib.util.find_spec("torch") is None:
    sys.meta_path.append(SkipWithoutTorch())


QUICK = ("blocks", "config", "exact", "formats", "fs", "index", "kernels", "order", "plan", "storage", "distributed")
"""Folders whose tests need neither MPI nor training, except for those marked `long`."""
NOT_QUICK = {"long", "slow"}


TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m quick` does not import the other tests, which takes as long as many quick tests do."""
    if config.option.markexpr == "quick" and collection_path.is_relative_to(TESTS) and collection_path != TESTS:
        return collection_path.relative_to(TESTS).parts[0] not in (*QUICK, "__init__.py")
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        room, *deeper = item.path.relative_to(TESTS).parts
        is_plain = room in QUICK and len(deeper) == 1  # the folders in these need servers
        if is_plain and not NOT_QUICK.intersection(mark.name for mark in item.iter_markers()):
            item.add_marker(pytest.mark.quick)

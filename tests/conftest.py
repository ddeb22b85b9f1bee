"""Scripts that tests start find the project and the package of its tests. Without torch, the tests that need it are skipped."""

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

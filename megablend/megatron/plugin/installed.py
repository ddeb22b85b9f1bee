"""The installed megatron-core: its version, and whether the plugin fits it, which is checked once per node and stored.

<kernel cache>/megatron-<digest>.json     what the probe found of this code of Megatron's, with this code of ours
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megablend.errors import CacheError
from megablend.fs.atomic_write import replace_file
from megablend.jit import cache_dir
from megablend.megatron.core import GPTDataset, installed_version
from megablend.megatron.plugin.probe import find_misfit


@cache
def misfit(builder: type[Any]) -> str | None:
    """Why the plugin does not fit the installed megatron-core; None where it does. See find_misfit."""
    path = cache_dir() / f"megatron-{_digest()}.json"
    try:
        kept: str | None = json.loads(path.read_text(encoding="utf-8"))["misfit"]
        return kept
    except (OSError, ValueError, KeyError, TypeError):
        found = find_misfit(builder)
    text = json.dumps({"version": installed_version(), "misfit": found}, indent=1)
    with contextlib.suppress(CacheError, OSError):  # a full disk: the next process checks again
        replace_file(path, text.encode())
    return found


def _digest() -> str:
    """Digest of everything that the result depends on."""
    digest = hashlib.blake2b(f"{installed_version()} {np.__version__} {sys.version}".encode(), digest_size=16)
    for path in _files():
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _files() -> list[Path]:
    """Megatron's datasets and their compiled helpers, and megablend's code outside the kernels."""
    theirs, ours = Path(sys.modules[GPTDataset.__module__].__file__ or ""), Path(__file__).parents[2]
    files = [*theirs.parent.glob("*.py"), *theirs.parent.glob("helpers*.so")]
    for room in ("megatron", "exact"):
        files += (ours / room).rglob("*.py")
    return sorted(files)

"""Check whether the plugin is compatible with the installed megatron-core, by inspecting
megatron-core's code, and by building tiny datasets with both.

    waiting    no step of opening datasets waits for other ranks, except those that we override
    builds     Megatron finds all files that it needs in a cache of ours, and builds the same arrays and samples by itself

A version that differs in any of these, or on which the builds fail, is refused with a message that
says how; the version number does not matter. The first check is in `megatron_code`, the other in
`tiny_datasets`. They run once per node, or, where something has replaced functions of Megatron, in
every process. If the version is compatible, this is recorded in a file:

<kernel cache>/megatron-<digest>.json     these versions of Megatron's code and ours are compatible
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
from megablend.jit import cache_dir
from megablend.megatron.core import GPTDataset, installed_version
from megablend.megatron.plugin.megatron_code import find_replaced_function, find_waiting_function
from megablend.megatron.plugin.tiny_datasets import compare_builds
from megablend.system.atomic_write import replace_file


@cache
def known_misfit(builder: type[Any]) -> str | None:
    """Return the reason why the plugin is incompatible with the installed megatron-core; None if it
    is compatible. That it is compatible is stored on this node, and later processes read it.

    A negative result is not stored, since it may have a temporary cause, such as a package that is
    just being updated. Where functions of Megatron were replaced in this process, nothing is read or
    stored: what they do is not in the files whose digest names the result.
    """
    if find_replaced_function() is not None:
        return find_misfit(builder)
    path = cache_dir() / f"megatron-{_digest()}.json"
    try:
        stored: str | None = json.loads(path.read_text(encoding="utf-8"))["misfit"]
        return stored
    except (OSError, ValueError, KeyError, TypeError):
        misfit = find_misfit(builder)
    if misfit is None:
        text = json.dumps({"version": installed_version(), "misfit": misfit}, indent=1)
        with contextlib.suppress(CacheError, OSError):  # a full disk: the next process checks again
            replace_file(path, text.encode())
    return misfit


def find_misfit(builder: type[Any]) -> str | None:
    """Return how the installed megatron-core differs from what the plugin needs; None if it does
    not differ. This function does not wait for other ranks.

    Args:
        builder: MegablendDatasetBuilder.

    Raises: CacheError if the temporary folder cannot be written.
    """
    return find_waiting_function() or compare_builds(builder)


def _digest() -> str:
    """Return a digest of everything that the result of the check depends on: versions and code."""
    digest = hashlib.blake2b(
        f"{installed_version()} {np.__version__} {sys.version}".encode(), digest_size=16
    )
    for path in _list_code():
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _list_code() -> list[Path]:
    """Return the paths of the code files of Megatron's datasets (with compiled helpers), and of
    megablend's code for Megatron."""
    theirs = Path(sys.modules[GPTDataset.__module__].__file__ or "").parent
    ours = Path(__file__).parents[1]
    return sorted([*theirs.glob("*.py"), *theirs.glob("helpers*.so"), *ours.rglob("*.py")])

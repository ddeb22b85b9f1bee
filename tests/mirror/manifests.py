"""Manifests of a few files, made as simply as possible: the twin of `Manifest.of_table`."""

from __future__ import annotations

import json
from collections.abc import Iterable

from megablend.mirror.catalog.manifest import DataFile, Manifest


def make_manifest(files: Iterable[DataFile]) -> Manifest:
    """Make a manifest of files that are sorted by path."""
    lines = [json.dumps([file.path, *file.key]) for file in files]
    return Manifest("\n".join(["1", *lines]).encode())

"""A completion marker: one file that lists what a request's cache consists of, so that the next run opens no `.idx` and no array.

    .megablend/whole-<digest of the request>.json    {"artefacts": [[base, {array: bytes of its file}], ...],
                                                      "datasets": [[prefix, split, samples asked for, samples], ...],
                                                      "pairs": {prefix: [bytes of its .idx, bytes of its .bin], ...}}

It is written when a build ends. A run that finds it compares the names and sizes of the files, all of them, and then knows how
long every dataset is; what else may be damaged shows when the arrays are opened. Where the data of a pair has another size than
before, the marker no longer counts: a build compares the arrays with the new lengths of its documents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megablend.errors import CacheError
from megablend.fs.atomic_write import replace_file, translate_os_errors
from megablend.megatron.cache_builder.artefacts import Artefact
from megablend.megatron.cache_builder.commit import WORK_FOLDER
from megablend.megatron.cache_builder.work_plan import SplitPlan
from megablend.megatron.request.request import CacheRequest

_VERSION = 3
_PAIR = (".idx", ".bin")

DatasetKey = tuple[str, int, int | None]
"""Prefix, number of the split, and samples asked for, of a dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A cache whose files were all there, and of the right size, when it was checked; the data's files too."""

    num_samples: Mapping[DatasetKey, int]
    """How many samples each dataset has."""


def read_receipt(request: CacheRequest) -> Receipt | None:
    """The completion marker of a request; None if its cache has none, or one that is damaged or outdated."""
    cache = Path(request.path_to_cache)
    try:
        text, _, digest = _path(request).read_text(encoding="utf-8").rpartition("\n")
        if _digest(text) != digest:
            return None
        found = json.loads(text)
        if not all(_is_there(cache, base, arrays) for base, arrays in found["artefacts"]):
            return None
        if any(_has_other_size(prefix, sizes) for prefix, sizes in found["pairs"].items()):
            return None
    except (OSError, ValueError):
        return None
    return Receipt(num_samples={(prefix, split, asked): samples for prefix, split, asked, samples in found["datasets"]})


def write_receipt(request: CacheRequest, splits: Sequence[SplitPlan], *, built: bool) -> None:
    """Write the marker of a cache that was just filled (`built`), or found complete. Raises: CacheError."""
    artefacts = [job.artefact for split in splits for job in split.jobs]
    datasets = [
        [job.part.prefix, job.part.split, job.part.num_samples, job.num_samples]
        for split in splits
        for job in split.datasets
    ]
    prefixes = sorted({job.part.prefix for split in splits for job in split.datasets})
    pairs = {prefix: _pair_sizes(prefix) for prefix in prefixes}
    text = json.dumps(
        {"artefacts": [[each.base, _sizes(each)] for each in artefacts], "datasets": datasets, "pairs": pairs}
    )
    path = _path(request)
    # A complete cache may be read-only: it is merely checked again the next time.
    with contextlib.nullcontext() if built else contextlib.suppress(CacheError):
        with translate_os_errors(path):
            path.parent.mkdir(exist_ok=True)
        replace_file(path, f"{text}\n{_digest(text)}".encode())


def _sizes(artefact: Artefact) -> dict[str, int]:
    return {array.name: len(array.header) + array.nbytes for array in artefact.arrays}


def _is_there(cache: Path, base: str, arrays: Mapping[str, int]) -> bool:
    """Whether an artefact's files are there, the arrays in full. Raises: FileNotFoundError."""
    stem = f"{cache}/{base}-"
    os.stat(f"{stem}description.txt")  # noqa: PTH116 of thousands of files; a Path takes as long as the call
    return all(os.stat(f"{stem}{name}.npy").st_size == size for name, size in arrays.items())  # noqa: PTH116


def _pair_sizes(prefix: str) -> list[int | None]:
    """Bytes of a pair's files; None for those that are not local files, or are missing."""
    return [_size_of(prefix + suffix) for suffix in _PAIR]


def _has_other_size(prefix: str, sizes: Sequence[int | None]) -> bool:
    """Whether a pair's files have other sizes than before. Missing files are reported when they are opened."""
    return any(
        before is not None and now is not None and now != before
        for before, now in zip(sizes, _pair_sizes(prefix), strict=True)
    )


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size  # noqa: PTH116 of thousands of files; a Path takes as long as the call
    except OSError:
        return None


def _path(request: CacheRequest) -> Path:
    # The cache's location is irrelevant; tables are identified by the names of their sources.
    asked = _fields(request) | {"path_to_cache": None, "lengths_at": None, "receipt": _VERSION}
    digest = _digest(json.dumps(asked, sort_keys=True, default=_fields))
    return Path(request.path_to_cache) / WORK_FOLDER / f"whole-{digest}.json"


def _fields(value: Any) -> dict[str, Any]:
    """Those of a dataclass; unlike dataclasses.asdict, this copies none of thousands of prefixes."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

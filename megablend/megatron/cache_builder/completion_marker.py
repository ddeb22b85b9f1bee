"""A completion marker: one file that lists what a request's cache consists of, so that the next run opens no `.idx` and no array.

    .megablend/whole-<digest of the request>.json    {"artefacts": [[base, {array: bytes of its file}], ...],
                                                      "made_of": [what the arrays of each artefact depend on, ...],
                                                      "datasets": [[prefix, split, samples asked for, samples], ...],
                                                      "pairs": {prefix: [bytes of its .idx, bytes of its .bin], ...}}

It is written when a build ends. A run that finds it compares the names and sizes of the files, all of them, and then knows how
long every dataset is; what else may be damaged shows when the arrays are opened. Where a file of a pair is missing or has another
size than before, the marker no longer counts: a build reads the lengths of all documents, and makes the arrays again of which a
marker says that they were made of other lengths, or with other settings. Their names and shapes may be the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megablend.errors import CacheError
from megablend.fs.atomic_write import flush_folder, replace_file, translate_os_errors
from megablend.megatron.cache_builder.artefacts import Artefact
from megablend.megatron.cache_builder.commit import WORK_FOLDER
from megablend.megatron.cache_builder.work_plan import Job, SplitPlan
from megablend.megatron.request.request import CacheRequest

_VERSION = 3
_PAIR = (".idx", ".bin")
_PAST = ".past"

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
        found = _read(_path(request))
        if not all(_is_there(cache, base, arrays) for base, arrays in found["artefacts"]):
            return None
        if any(_has_other_size(prefix, sizes) for prefix, sizes in found["pairs"].items()):
            return None
    except (OSError, ValueError):
        return None
    return Receipt(num_samples={(prefix, split, asked): samples for prefix, split, asked, samples in found["datasets"]})


def find_outdated(jobs: Sequence[Job], cache: Path) -> frozenset[str]:
    """Base names of the artefacts that were made of other data or settings, by the newest marker that lists them."""
    known: dict[str, object] = {}
    for path in _markers(cache):
        known.update(_made_of(path))
    return frozenset(job.artefact.base for job in jobs if known.get(job.artefact.base, job.made_of) != job.made_of)


def set_aside(bases: Collection[str], cache: Path) -> None:
    """Have artefacts count as missing from now on, and no marker that lists one of them count. Raises: CacheError."""
    if not bases:
        return
    with translate_os_errors(cache):
        for path in _markers(cache):
            if path.suffix != _PAST and not _made_of(path).keys().isdisjoint(bases):
                path.rename(f"{path}{_PAST}")  # `find_outdated` still reads it: it may list artefacts of other requests
        for base in bases:
            (cache / f"{base}-description.txt").unlink(missing_ok=True)
        flush_folder(cache)


def write_receipt(request: CacheRequest, splits: Sequence[SplitPlan], *, built: bool) -> None:
    """Write the marker of a cache that was just filled (`built`), or found complete. Raises: CacheError."""
    jobs = [job for split in splits for job in split.jobs]
    artefacts = [[job.artefact.base, _sizes(job.artefact)] for job in jobs]
    datasets = [
        [job.part.prefix, job.part.split, job.part.num_samples, job.num_samples]
        for split in splits
        for job in split.datasets
    ]
    prefixes = sorted({job.part.prefix for split in splits for job in split.datasets})
    pairs = {prefix: _pair_sizes(prefix) for prefix in prefixes}
    made_of = [job.made_of for job in jobs]
    text = json.dumps({"artefacts": artefacts, "made_of": made_of, "datasets": datasets, "pairs": pairs})
    path = _path(request)
    # A complete cache may be read-only: it is merely checked again the next time.
    with contextlib.nullcontext() if built else contextlib.suppress(CacheError):
        with translate_os_errors(path):
            path.parent.mkdir(exist_ok=True)
        replace_file(path, f"{text}\n{_digest(text)}".encode())


def _markers(cache: Path) -> list[Path]:
    """All markers of a cache, also those that do not count any more, the oldest first."""
    found = []
    for path in (cache / WORK_FOLDER).glob("whole-*.json*"):
        with contextlib.suppress(FileNotFoundError):  # another build has just set it aside
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _made_of(path: Path) -> dict[str, object]:
    """What the artefacts that a marker lists were made of, by base name; nothing where it is damaged or does not say."""
    try:
        found = _read(path)
    except (OSError, ValueError):
        return {}
    return dict(zip((base for base, _ in found["artefacts"]), found.get("made_of", []), strict=False))


def _read(path: Path) -> dict[str, Any]:
    """A marker's content. Raises: OSError; ValueError if it is damaged."""
    text, _, digest = path.read_text(encoding="utf-8").rpartition("\n")
    if _digest(text) != digest:
        raise ValueError("its checksum is wrong")
    found: dict[str, Any] = json.loads(text)
    return found


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
    """Whether a pair's files are missing, or have other sizes than before."""
    return any(before is not None and now != before for before, now in zip(sizes, _pair_sizes(prefix), strict=True))


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

"""Completion markers: a completion marker is a file that lists all files of a request in the cache,
so that the next run does not have to open `.idx` files and arrays.

    .megablend/whole-<digest of the request>.json

    artefacts    [[base, {array: bytes of its file}], ...]
    made_of      [what the arrays of each artefact depend on, ...]
    number       one more than the number of any earlier marker
    datasets     [[prefix, split, samples asked for, samples], ...]
    pairs        {prefix: [bytes of its .idx, bytes of its .bin], ...}
    modified     {prefix: [when each was written, in ns], ...}

The JSON is followed by a line with its digest. A marker that is no longer valid is kept, with
`.past` appended to its name. When a build begins, it writes a marker with only the first three
keys, with `.begun` appended to its name. Both kinds still record what the artefacts were made from.

A marker is written when a build ends. A run that finds the marker compares the names and sizes of
all files. It then knows the number of samples of every dataset; any other damage is noticed when
the arrays are opened.

If a file of a pair is missing, or its size or time has changed, the marker is no longer valid. A
build then reads the lengths of all documents. It rebuilds the arrays that, according to a marker,
were made from other lengths or with other settings, since such arrays may have the same names and
shapes. Times are only a hint: if data was copied or touched, its lengths are read once more, but no
array is rebuilt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megablend.errors import CacheError
from megablend.megatron.cache_builder.commit import WORK_FOLDER
from megablend.megatron.cache_builder.work_plan import Job, SplitPlan
from megablend.megatron.pair_files import PairState, look_at_pair, look_at_pairs, sizes_of, times_of
from megablend.megatron.request.request import CacheRequest
from megablend.system.atomic_write import flush_folder, replace_file, translate_os_errors
from megablend.system.digest import hex_digest

_VERSION = 3
"""Version of the format. It is part of the digest in the file name, so markers of other versions
are not found."""
_SUFFIX = ".json"
"""File name suffix of a valid marker."""
_PAST = ".past"
"""Suffix that is added to the name of a marker that is no longer valid."""
_BEGUN = ".begun"
"""Suffix that is added to the name of the marker of a build that has begun."""

DatasetKey = tuple[str, int, int | None]
"""The prefix of a dataset, the number of its split, and the requested number of samples."""
Pairs = dict[str, PairState]
"""The states of the files of pairs, by prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The content of a valid completion marker. All files of the cache and of the data exist with
    the sizes that the marker lists."""

    num_samples: Mapping[DatasetKey, int]
    """The number of samples of each dataset."""
    pairs: Mapping[str, PairState]
    """The states of the files of pairs when they were checked, by prefix."""


def read_marker(request: CacheRequest) -> Marker | None:
    """Read the completion marker of a request. Returns None if the cache has no marker for it, or
    the marker is damaged or no longer valid."""
    cache = Path(request.path_to_cache)
    content = _read_content(_path_of(request))
    if content is None:
        return None
    try:
        if not all(_exists(cache, base, arrays) for base, arrays in content["artefacts"]):
            return None
        pairs = look_at_pairs(content["pairs"])
        if any(_has_other_size(pairs[prefix], sizes) for prefix, sizes in content["pairs"].items()):
            return None
        # Older markers have no times
        if {prefix: times_of(pair) for prefix, pair in pairs.items()} != content.get("modified"):
            return None
    except (OSError, ValueError):
        return None
    num_samples = {
        (prefix, split, requested): samples
        for prefix, split, requested, samples in content["datasets"]
    }
    return Marker(num_samples=num_samples, pairs=pairs)


def find_outdated(jobs: Sequence[Job], cache: Path) -> frozenset[str]:
    """Return the base names of the artefacts that, according to the newest marker that lists them,
    were made from other data or with other settings."""
    known: dict[str, object] = {}
    # From old to new: the newest marker that lists an artefact decides
    for _, content in _list_markers(cache):
        known.update(_inputs_by_base(content))
    return frozenset(
        job.artefact.base
        for job in jobs
        if known.get(job.artefact.base, job.made_of) != job.made_of
    )


def begin_build(
    request: CacheRequest,
    jobs: Sequence[Job],
    missing: Set[str],
    outdated: Collection[str],
    cache: Path,
) -> None:
    """Record the inputs from which artefacts will be built, in case the build is killed.

    Args:
        jobs: all jobs of the request.
        missing: base names of the artefacts that will be built; markers that list one of them
            become invalid.
        outdated: base names of the existing artefacts that are outdated. Their descriptions are
            removed.

    Raises: CacheError if the cache cannot be written.
    """
    with translate_os_errors(cache):
        for path, listed in _list_markers(cache):
            if path.suffix == _SUFFIX and not missing.isdisjoint(_bases_of(listed)):
                # `find_outdated` still reads it: it may list artefacts of other requests
                path.rename(f"{path}{_PAST}")
        for base in outdated:
            (cache / f"{base}-description.txt").unlink(missing_ok=True)
        flush_folder(cache)
    # Only after that, since no outdated artefact may be listed as made of the present data
    artefacts = [[job.artefact.base, {}] for job in jobs]
    content = {
        "artefacts": artefacts,
        "made_of": [job.made_of for job in jobs],
        "number": newest_number(cache) + 1,
    }
    _write_content(Path(f"{_path_of(request)}{_BEGUN}"), content)


def newest_number(cache: Path) -> int:
    """Return the number of the newest marker in a cache; 0 if there are no markers. If this number
    changes, another build has begun or ended."""
    return max([_number_of(content) for _, content in _list_markers(cache)], default=0)


def write_marker(
    request: CacheRequest, splits: Sequence[SplitPlan], pairs: Pairs, *, built: bool
) -> None:
    """Write the completion marker of a request to its cache.

    Args:
        pairs: states of the data's files before they were read. If a file has been replaced since
            then, the marker will not be valid.
        built: whether the cache has just been built; false if it was already complete.

    Raises: CacheError if the cache has just been built and the marker cannot be written.
    """
    jobs = [job for split in splits for job in split.jobs]
    content = {
        "artefacts": [
            [
                job.artefact.base,
                {array.name: len(array.header) + array.nbytes for array in job.artefact.arrays},
            ]
            for job in jobs
        ],
        "made_of": [job.made_of for job in jobs],
        "datasets": [
            [job.part.prefix, job.part.split, job.part.num_samples, job.num_samples]
            for split in splits
            for job in split.datasets
        ],
        "pairs": {prefix: sizes_of(pair) for prefix, pair in pairs.items()},
        "modified": {prefix: times_of(pair) for prefix, pair in pairs.items()},
        "number": newest_number(Path(request.path_to_cache)) + 1,
    }
    path = _path_of(request)
    # A complete cache may be read-only; without a marker, it is only checked again the next time
    with contextlib.nullcontext() if built else contextlib.suppress(CacheError):
        with translate_os_errors(path):
            path.parent.mkdir(exist_ok=True)
        _write_content(path, content)
        with translate_os_errors(path):
            Path(f"{path}{_BEGUN}").unlink(missing_ok=True)


def _list_markers(cache: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the paths and contents of all markers in a cache, oldest first, including markers that
    are no longer valid. Damaged markers are left out.

    Markers are sorted by number, because modification times may be in any order in a copied cache.
    Markers of older versions have no number; they are sorted by modification time.
    """
    markers = []
    for path in (cache / WORK_FOLDER).glob("whole-*.json*"):
        # Raised if another build has just renamed it
        with contextlib.suppress(FileNotFoundError):
            content = _read_content(path)
            if content is not None:
                markers.append((_number_of(content), path.stat().st_mtime_ns, path, content))
    markers.sort(key=lambda marker: marker[:3])
    return [(path, content) for _, _, path, content in markers]


def _read_content(path: Path) -> dict[str, Any] | None:
    """Read the content of a marker. Returns None if the marker is missing or damaged."""
    try:
        text, _, digest = path.read_text(encoding="utf-8").rpartition("\n")
        content: dict[str, Any] = json.loads(text)
    except (OSError, ValueError):
        return None
    return content if hex_digest(text) == digest else None


def _write_content(path: Path, content: dict[str, Any]) -> None:
    """Write a marker, replacing an existing file."""
    text = json.dumps(content)
    replace_file(path, f"{text}\n{hex_digest(text)}".encode())


def _number_of(content: dict[str, Any]) -> int:
    return int(content.get("number", 0))


def _bases_of(content: dict[str, Any]) -> list[str]:
    return [base for base, _ in content["artefacts"]]


def _inputs_by_base(content: dict[str, Any]) -> dict[str, object]:
    """Return the inputs of a marker's artefacts, by base name. The value is None for artefacts of
    an older marker whose data has changed."""
    if "made_of" in content:
        return dict(zip(_bases_of(content), content["made_of"], strict=True))
    # An older version wrote only the sizes of the data's files
    changed = any(
        _has_other_size(look_at_pair(prefix), sizes) for prefix, sizes in content["pairs"].items()
    )
    return dict.fromkeys(_bases_of(content)) if changed else {}


def _exists(cache: Path, base: str, arrays: Mapping[str, int]) -> bool:
    """Return whether the files of an artefact exist and the arrays have the given sizes. Raises:
    FileNotFoundError if a file is missing."""
    # There are thousands of files, and a Path takes as long as the call
    stem = f"{cache}/{base}-"
    os.stat(f"{stem}description.txt")  # noqa: PTH116
    return all(os.stat(f"{stem}{name}.npy").st_size == size for name, size in arrays.items())  # noqa: PTH116


def _has_other_size(pair: PairState, sizes: Sequence[int | None]) -> bool:
    """Return whether a file of a pair is missing or its size has changed."""
    return any(
        before is not None and now != before
        for before, now in zip(sizes, sizes_of(pair), strict=True)
    )


def _path_of(request: CacheRequest) -> Path:
    # The locations of the cache and of tables do not matter: tables are identified by the names of
    # their sources
    fields = _fields(request) | {"path_to_cache": None, "lengths_at": None, "receipt": _VERSION}
    digest = hex_digest(json.dumps(fields, sort_keys=True, default=_fields))
    return Path(request.path_to_cache) / WORK_FOLDER / f"whole-{digest}.json"


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name. Unlike dataclasses.asdict, this does not copy
    thousands of prefixes."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}

"""A completion marker: one file that lists what a request's cache consists of, so that the next run
opens no `.idx` and no array.

    .megablend/whole-<digest of the request>.json

    artefacts    [[base, {array: bytes of its file}], ...]
    made_of      [what the arrays of each artefact depend on, ...]
    number       one more than that of any marker before
    datasets     [[prefix, split, samples asked for, samples], ...]
    pairs        {prefix: [bytes of its .idx, bytes of its .bin], ...}
    modified     {prefix: [when each was written, in ns], ...}

A line with the digest of this JSON follows it. A marker that counts no more is kept with `.past`
after its name; what a build that has begun will list is in one with `.begun`, which has the first
three keys. Both still tell of what the artefacts were made.

It is written when a build ends. A run that finds it compares the names and sizes of the files,
all of them, and then knows how long every dataset is; what else may be damaged shows when the
arrays are opened. If a file of a pair is missing, or has another size or time than before, the
marker no longer counts: a build reads the lengths of all documents, and makes the arrays again
of which a marker says that they were made of other lengths, or with other settings. Their names
and shapes may be the same. Times are a hint only: data that was copied or touched is read once
more, and nothing is made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megablend.errors import CacheError
from megablend.megatron.cache_builder.artefacts import Artefact
from megablend.megatron.cache_builder.commit import WORK_FOLDER
from megablend.megatron.cache_builder.work_plan import Job, SplitPlan
from megablend.megatron.pair_files import PairState, look_at_pair, look_at_pairs, sizes_of, times_of
from megablend.megatron.request.request import CacheRequest
from megablend.system.atomic_write import flush_folder, replace_file, translate_os_errors

_VERSION = 3
"""Part of a request's digest: markers of another version are not found."""
_SUFFIX = ".json"
"""Of a marker that counts."""
_PAST = ".past"
"""After the name of a marker that does not count any more."""
_BEGUN = ".begun"
"""After the name of a marker while what it will list is built."""

DatasetKey = tuple[str, int, int | None]
"""Prefix, number of the split, and samples asked for, of a dataset."""
Pairs = dict[str, PairState]
"""The data's files, by prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A cache whose files were all there, and of the right size,
    when it was checked; the data's files too."""

    num_samples: Mapping[DatasetKey, int]
    """How many samples each dataset has."""
    pairs: Mapping[str, PairState]
    """The data's files when they were checked, by prefix."""


def read_marker(request: CacheRequest) -> Marker | None:
    """The completion marker of a request; None if its cache has none,
    or one that is damaged or outdated."""
    cache = Path(request.path_to_cache)
    found = _read_content(_path_of(request))
    if found is None:
        return None
    try:
        if not all(_is_there(cache, base, arrays) for base, arrays in found["artefacts"]):
            return None
        pairs = look_at_pairs(found["pairs"])
        if any(_has_other_size(pairs[prefix], sizes) for prefix, sizes in found["pairs"].items()):
            return None
        # Older markers have no times
        if {prefix: times_of(pair) for prefix, pair in pairs.items()} != found.get("modified"):
            return None
    except (OSError, ValueError):
        return None
    num_samples = {
        (prefix, split, asked): samples for prefix, split, asked, samples in found["datasets"]
    }
    return Marker(num_samples=num_samples, pairs=pairs)


def find_outdated(jobs: Sequence[Job], cache: Path) -> frozenset[str]:
    """Base names of the artefacts that were made of other data or settings,
    by the newest marker that lists them."""
    known: dict[str, object] = {}
    for _, found in _list_markers(cache):  # a newer one replaces what older ones say
        known.update(_inputs_by_base(found))
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
    """Note what artefacts will be made of before they are, in case the build is killed.

    Args:
        jobs: all of the request.
        missing: base names of the artefacts that will be built; no marker that lists one of them
            counts from now on.
        outdated: those of them that are there, and count as missing from now on.

    Raises: CacheError.
    """
    with translate_os_errors(cache):
        for path, found in _list_markers(cache):
            if path.suffix == _SUFFIX and not missing.isdisjoint(_bases_of(found)):
                # `find_outdated` still reads it: it may list artefacts of other requests
                path.rename(f"{path}{_PAST}")
        for base in outdated:
            (cache / f"{base}-description.txt").unlink(missing_ok=True)
        flush_folder(cache)
    # Only now: nothing that is there and outdated may be listed as made of what is read now.
    artefacts = [[job.artefact.base, {}] for job in jobs]
    content = {
        "artefacts": artefacts,
        "made_of": _list_inputs(jobs),
        "number": newest_number(cache) + 1,
    }
    _write_content(Path(f"{_path_of(request)}{_BEGUN}"), content)


def newest_number(cache: Path) -> int:
    """The number of a cache's newest marker: another one tells that a build has begun or ended
    since. 0 without markers."""
    return max([_number_of(found) for _, found in _list_markers(cache)], default=0)


def write_marker(
    request: CacheRequest, splits: Sequence[SplitPlan], pairs: Pairs, *, built: bool
) -> None:
    """Write the marker of a cache that was just filled (`built`), or found complete.

    Args:
        pairs: the data's files before they were read: one that was replaced since makes the marker
            not count.

    Raises: CacheError.
    """
    jobs = [job for split in splits for job in split.jobs]
    content = {
        "artefacts": [[job.artefact.base, _sizes_of_arrays(job.artefact)] for job in jobs],
        "made_of": _list_inputs(jobs),
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
    # A complete cache may be read-only: it is merely checked again the next time.
    with contextlib.nullcontext() if built else contextlib.suppress(CacheError):
        with translate_os_errors(path):
            path.parent.mkdir(exist_ok=True)
        _write_content(path, content)
        with translate_os_errors(path):
            Path(f"{path}{_BEGUN}").unlink(missing_ok=True)


def _list_markers(cache: Path) -> list[tuple[Path, dict[str, Any] | None]]:
    """All markers of a cache with their contents, the oldest first, including those that no longer
    count.

    They are sorted by number, because modification times may be in any order in a copied cache.
    Older versions wrote no numbers.
    """
    found = []
    for path in (cache / WORK_FOLDER).glob("whole-*.json*"):
        with contextlib.suppress(FileNotFoundError):  # another build has just set it aside
            content = _read_content(path)
            found.append((_number_of(content), path.stat().st_mtime_ns, path, content))
    return [(path, content) for _, _, path, content in sorted(found, key=lambda each: each[:3])]


def _read_content(path: Path) -> dict[str, Any] | None:
    """A marker's content; None if it is not there or damaged."""
    try:
        text, _, digest = path.read_text(encoding="utf-8").rpartition("\n")
        found: dict[str, Any] = json.loads(text)
    except (OSError, ValueError):
        return None
    return found if _digest(text) == digest else None


def _write_content(path: Path, content: dict[str, Any]) -> None:
    """Write a marker, in place of the one that is there."""
    text = json.dumps(content)
    replace_file(path, f"{text}\n{_digest(text)}".encode())


def _number_of(found: dict[str, Any] | None) -> int:
    return int(found.get("number", 0)) if found else 0


def _bases_of(found: dict[str, Any] | None) -> list[str]:
    return [base for base, _ in found["artefacts"]] if found else []


def _inputs_by_base(found: dict[str, Any] | None) -> dict[str, object]:
    """What the artefacts that a marker lists were made of, by base name; None if that is unknown
    and the data has changed."""
    if found is None:
        return {}
    if "made_of" in found:
        return dict(zip(_bases_of(found), found["made_of"], strict=True))
    # An older version wrote only the data's sizes, by which it is the same or not
    changed = any(
        _has_other_size(look_at_pair(prefix), sizes) for prefix, sizes in found["pairs"].items()
    )
    return dict.fromkeys(_bases_of(found)) if changed else {}


def _list_inputs(jobs: Sequence[Job]) -> list[list[int]]:
    """What the arrays of each job depend on."""
    return [job.made_of for job in jobs]


def _sizes_of_arrays(artefact: Artefact) -> dict[str, int]:
    """Bytes of each array's file."""
    return {array.name: len(array.header) + array.nbytes for array in artefact.arrays}


def _is_there(cache: Path, base: str, arrays: Mapping[str, int]) -> bool:
    """Whether an artefact's files are there, the arrays in full. Raises: FileNotFoundError."""
    stem = f"{cache}/{base}-"
    os.stat(f"{stem}description.txt")  # noqa: PTH116 of thousands of files; a Path takes as long as the call
    return all(os.stat(f"{stem}{name}.npy").st_size == size for name, size in arrays.items())  # noqa: PTH116


def _has_other_size(pair: PairState, sizes: Sequence[int | None]) -> bool:
    """Whether a pair's files are missing, or have other sizes than before."""
    return any(
        before is not None and now != before
        for before, now in zip(sizes, sizes_of(pair), strict=True)
    )


def _path_of(request: CacheRequest) -> Path:
    # Without what does not matter: the cache's location, and that of tables, which are identified
    # by the names of their sources.
    asked = _fields(request) | {"path_to_cache": None, "lengths_at": None, "receipt": _VERSION}
    digest = _digest(json.dumps(asked, sort_keys=True, default=_fields))
    return Path(request.path_to_cache) / WORK_FOLDER / f"whole-{digest}.json"


def _fields(value: Any) -> dict[str, Any]:
    """Those of a dataclass; unlike dataclasses.asdict, this copies none of thousands of
    prefixes."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

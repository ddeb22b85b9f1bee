"""A receipt says that a request's files were all there and whole: the next run reads it and one listing, and no `.idx`.

It is written when a build ends. What it vouches for may be damaged later; that shows when the arrays are opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from megablend.errors import CacheError
from megablend.index.disk import replace_file, writing
from megablend.megatron.plan import SplitPlan
from megablend.megatron.request import CacheRequest
from megablend.megatron.write import WORK_FOLDER

_VERSION = 1


def is_whole(request: CacheRequest) -> bool:
    """Whether a receipt of this request is in its cache, and all files that it lists."""
    cache = Path(request.path_to_cache)
    try:
        names = _path(request).read_text(encoding="utf-8").splitlines()
        return set(names) <= {path.name for path in cache.iterdir()}
    except OSError:
        return False


def write_receipt(request: CacheRequest, splits: Sequence[SplitPlan], *, built: bool) -> None:
    """Vouch for a cache that was just filled (`built`), or found whole. Raises: CacheError where that cannot be written."""
    artefacts = [job.artefact for split in splits for job in split.jobs]
    text = "\n".join(sorted({name for each in artefacts for name in each.file_names}))
    # A whole cache may be read-only: it is looked through again the next time, no more.
    with contextlib.nullcontext() if built else contextlib.suppress(CacheError):
        with writing(_path(request)):
            _path(request).parent.mkdir(exist_ok=True)
        replace_file(_path(request), text.encode())


def _path(request: CacheRequest) -> Path:
    # Where the cache lies does not matter; tables are told by the names of what they are of.
    asked = dataclasses.asdict(request) | {"path_to_cache": None, "lengths_at": None, "receipt": _VERSION}
    digest = hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Path(request.path_to_cache) / WORK_FOLDER / f"whole-{digest}.txt"

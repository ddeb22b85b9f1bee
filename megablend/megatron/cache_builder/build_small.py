"""Building a small dataset: all of its files in one buffer, filled by one call and written by another.

A cache of thousands of small datasets is bound by what each of them costs besides its arrays: steps of Python, threads that wait
for each other between them, fresh memory. So none of the pieces of larger datasets are used here.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from megablend.exact.small_dataset import MAX_DOCUMENTS, EpochPlan, fill_small_dataset
from megablend.megatron.cache_builder.commit import Commits
from megablend.megatron.cache_builder.lengths import counted_lengths
from megablend.megatron.cache_builder.work_plan import DatasetJob
from megablend.megatron.request.request import CacheRequest
from megablend.storage.base import Storage

_MAX_BYTES = 1 << 23
_ALIGNMENT = 64
_TYPES = ("int32", "int32", "uint32")
_buffers = threading.local()


def is_small(job: DatasetJob) -> bool:
    """Whether `build_small` can build a dataset."""
    first = job.samples_before_final
    return (
        job.artefact.nbytes <= _MAX_BYTES
        and 0 < job.size.end - job.size.begin <= MAX_DOCUMENTS
        and (first is None or 0 <= first <= job.num_samples)
        and tuple(array.dtype for array in job.artefact.arrays) == _TYPES
    )


def build_small(job: DatasetJob, request: CacheRequest, commits: Commits, storage: Storage) -> None:
    """Write a dataset's document, sample and shuffle index.

    Raises: DataError where the `.idx` cannot be read; CacheError where the cache cannot be written; StoppedError.
    """
    artefact, part, prefix = job.artefact, job.size, job.part.prefix
    stored = counted_lengths(prefix, part, request.lengths_at.get(prefix), storage=storage)
    texts = [artefact.description.encode(), *(array.header for array in artefact.arrays)]
    contents = [0, *(array.nbytes for array in artefact.arrays)]
    sizes = [len(text) + content for text, content in zip(texts, contents, strict=True)]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    buffer = _buffer(end)
    arrays: list[Any] = []
    for start, size, text in zip(starts, sizes, texts, strict=True):
        buffer[start : start + len(text)] = np.frombuffer(text, np.uint8)
        arrays.append(buffer[start + len(text) : start + size])
    fill_small_dataset(
        stored.read(part.begin, part.end),
        part.begin,
        request.random_seed,
        EpochPlan(
            length=request.sequence_length,
            extra=int(request.add_extra_token_to_sequence),
            keep_tail=job.keep_tail,
            samples_before_final=job.samples_before_final,
        ),
        arrays[1].view(np.int32),
        arrays[2].view(np.int32).reshape(-1, 2),
        arrays[3].view(np.uint32),
    )
    commits.write(artefact, buffer, starts, sizes)


def _buffer(size: int) -> Any:
    """This thread's memory, which all of its datasets use: fresh pages take as long as filling them."""
    found = getattr(_buffers, "bytes", None)
    if found is None or len(found) < size:
        fresh = np.empty(size + _ALIGNMENT, np.uint8)
        found = _buffers.bytes = fresh[-fresh.ctypes.data % _ALIGNMENT :][:size]
    return found

"""Building small datasets: the files of many in one buffer, filled by one call and written by another.

A cache of thousands of small datasets is bound by what each of them costs besides its arrays: steps of Python, threads that wait
for each other between them, fresh memory. So none of the pieces of larger datasets are used here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from megablend.megatron.cache_builder.commit import Commits, NewFiles
from megablend.megatron.cache_builder.length_reader import LengthReader
from megablend.megatron.cache_builder.lengths import check_part
from megablend.megatron.cache_builder.work_plan import DatasetJob, Job
from megablend.megatron.exact.small_dataset import MAX_DOCUMENTS, SampleRules, SmallDataset, fill_small_datasets
from megablend.megatron.request.request import CacheRequest

_MAX_BYTES = 1 << 23
TOGETHER_BYTES = 1 << 21
"""The most bytes of arrays of several datasets built together: they are still in a core's caches when they are written."""
MAX_TOGETHER = 64
"""The most datasets that are built together."""
_ALIGNMENT = 64
_TYPES = ("int32", "int32", "uint32")
_buffers = threading.local()


def is_small(job: Job) -> bool:
    """Whether `build_small` can build a job."""
    if not isinstance(job, DatasetJob):
        return False
    first = job.samples_before_final
    return (
        job.artefact.nbytes <= _MAX_BYTES
        and 0 < job.size.end - job.size.begin <= MAX_DOCUMENTS
        and (first is None or 0 <= first <= job.num_samples)
        and tuple([array.dtype for array in job.artefact.arrays]) == _TYPES
    )


def build_small(jobs: Sequence[DatasetJob], request: CacheRequest, commits: Commits, lengths: LengthReader) -> None:
    """Write the document, sample and shuffle index of each dataset.

    Raises: DataError where an `.idx` cannot be read; CacheError where the cache cannot be written; StoppedError.
    """
    texts: list[bytes] = []
    starts: list[int] = []
    sizes: list[int] = []
    end = 0
    for job in jobs:
        texts.append(job.artefact.description.encode())
        sizes.append(len(texts[-1]))
        for array in job.artefact.arrays:
            texts.append(array.header)
            sizes.append(len(array.header) + array.nbytes)
        for size in sizes[-4:]:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
    buffer = _buffer(end)
    bytes_of = buffer.data
    for start, text in zip(starts, texts, strict=True):
        bytes_of[start : start + len(text)] = text
    begins = [(start + len(text)) // 4 for start, text in zip(starts, texts, strict=True)]
    datasets = [
        _dataset(job, begins[4 * i + 1 : 4 * i + 4], lengths)  # after its description
        for i, job in enumerate(jobs)
    ]
    extra = int(request.add_extra_token_to_sequence)
    fill_small_datasets(
        datasets, SampleRules(request.random_seed, request.sequence_length, extra), buffer.view(np.int32)
    )
    commits.write([job.artefact for job in jobs], NewFiles(buffer, starts, sizes))


def _dataset(job: DatasetJob, begins: Sequence[int], lengths: LengthReader) -> SmallDataset:
    """A dataset whose document, sample and shuffle index begin at `begins`. Raises: DataError if its `.idx` cannot be read."""
    part, prefix = job.size, job.part.prefix
    documents, rows, samples = begins
    stored = lengths.find(prefix, part)
    own = stored.read(part.begin, part.end)
    check_part(stored, part, own)
    return SmallDataset(
        lengths=own,
        begin=part.begin,
        num_entries=job.artefact.arrays[0].shape[0],
        num_samples=job.num_samples,
        samples_before_final=job.samples_before_final,
        keep_tail=job.keep_tail,
        documents=documents,
        rows=rows,
        samples=samples,
    )


def _buffer(size: int) -> Any:
    """This thread's memory, which all of its datasets use: fresh pages take as long as filling them."""
    found = getattr(_buffers, "bytes", None)
    if found is None or len(found) < size:
        fresh = np.empty(size + _ALIGNMENT, np.uint8)
        found = _buffers.bytes = fresh[-fresh.ctypes.data % _ALIGNMENT :][:size]
    return found

"""Build artefacts in this process. Arrays are computed in the order in which Megatron draws random
numbers for them, and written to the disk while they are computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megablend.formats.base import Array
from megablend.megatron.cache_builder.commit import ArtefactWriter, Commits
from megablend.megatron.cache_builder.lengths import LengthReader, check_part, read_part
from megablend.megatron.cache_builder.work_plan import BlendJob, DatasetJob, Job
from megablend.megatron.exact.greedy import exhaustive, greedy
from megablend.megatron.exact.samples import sample_rows
from megablend.megatron.exact.shuffle import Generator, document_index, shuffle_index
from megablend.megatron.exact.small_dataset import MAX_DOCUMENTS, SmallDataset, fill_small_datasets
from megablend.megatron.request.request import CacheRequest

_SMALL = 1 << 16
"""Number of samples below which shuffling a dataset takes less time than starting a thread."""
_DRAWN = 1 << 22
"""Number of samples of a blend that are computed at a time; they take 40 MiB."""
_MAX_BYTES = 1 << 23
"""Maximum number of bytes of the arrays of a small dataset."""
TOGETHER_BYTES = 1 << 21
"""Maximum number of bytes of the arrays of all datasets that are built together. Up to this size,
the arrays are still in a core's caches when they are written."""
MAX_TOGETHER = 64
"""Maximum number of datasets that are built together."""
_ALIGNMENT = 64
_TYPES = ("int32", "int32", "uint32")
"""The dtypes of the document, sample and shuffle index of a small dataset."""
_buffers = threading.local()


def build_dataset(
    job: DatasetJob,
    request: CacheRequest,
    commits: Commits,
    lengths: LengthReader,
    *,
    threads: int,
    overlap: bool,
) -> None:
    """Write the document, sample and shuffle index of a dataset.

    Args:
        commits: receives the artefact when its files are complete.
        threads: number of threads for the sample index.
        overlap: whether to make the shuffle index and the sample index at the same time, which
            needs memory for both.

    Raises: DataError if the `.idx` cannot be read; CacheError if the cache cannot be written;
        StoppedError.
    """
    generator = Generator(request.random_seed)
    documents = document_index(
        np.arange(job.size.begin, job.size.end, dtype=np.int32),
        job.num_epochs,
        generator,
        job.samples_before_final is not None,
    )
    with ArtefactWriter(job.artefact, commits) as out, contextlib.ExitStack() as stack:
        shuffling = None
        if overlap and job.num_samples >= _SMALL:
            background = stack.enter_context(ThreadPoolExecutor(1))
            shuffling = background.submit(_write_shuffle_index, job, generator, out)
        out.write("document_index", documents)
        _write_sample_index(job, request, lengths, documents, out, threads=threads)
        del documents
        if shuffling is None:
            _write_shuffle_index(job, generator, out)
        else:
            shuffling.result()


def build_blend(job: BlendJob, commits: Commits, *, threads: int) -> None:
    """Write the dataset index and the dataset sample index of a blend, part by part. Raises:
    CacheError if the cache cannot be written; StoppedError."""
    blend = exhaustive(job.lengths) if job.size is None else greedy(job.weights, job.size)
    with (
        ArtefactWriter(job.artefact, commits) as out,
        out.array("dataset_index") as datasets,
        out.array("dataset_sample_index") as samples,
    ):
        while blend.step < blend.size:
            count = min(_DRAWN, blend.size - blend.step)
            next_datasets, next_samples = blend.draw(count, threads=threads)
            datasets.append(next_datasets)
            samples.append(next_samples)


def _write_sample_index(
    job: DatasetJob,
    request: CacheRequest,
    reader: LengthReader,
    documents: Array,
    out: ArtefactWriter,
    *,
    threads: int,
) -> None:
    lengths = read_part(reader.find(job.part.prefix, job.size), job.size)
    with out.array("sample_index") as file:
        parts = sample_rows(
            lengths,
            documents,
            request.sequence_length,
            job.num_samples,
            dtype=file.dtype,
            extra=int(request.add_extra_token_to_sequence),
            keep_tail=job.keep_tail,
            threads=threads,
        )
        for rows in parts:
            file.append(rows)


def _write_shuffle_index(job: DatasetJob, generator: Generator, out: ArtefactWriter) -> None:
    first = job.num_samples if job.samples_before_final is None else job.samples_before_final
    out.write("shuffle_index", shuffle_index(first, job.num_samples, generator))


def is_small(job: Job) -> bool:
    """Return whether a job is a small dataset that `build_small` can build."""
    if not isinstance(job, DatasetJob):
        return False
    first = job.samples_before_final
    return (
        job.artefact.nbytes <= _MAX_BYTES
        and 0 < job.size.end - job.size.begin <= MAX_DOCUMENTS
        and (first is None or 0 <= first <= job.num_samples)
        and tuple([array.dtype for array in job.artefact.arrays]) == _TYPES
    )


def build_small(
    jobs: Sequence[DatasetJob], request: CacheRequest, commits: Commits, lengths: LengthReader
) -> None:
    """Write the document, sample and shuffle index of each of several small datasets.

    Raises: DataError if an `.idx` cannot be read; CacheError if the cache cannot be written;
        StoppedError.
    """
    # For each file of each job (a description and three arrays): its first bytes, its position
    # in the buffer, and its size
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
    for start, text in zip(starts, texts, strict=True):
        buffer.data[start : start + len(text)] = text
    # Where the entries of each array begin, in units of 4 bytes
    begins = [(start + len(text)) // 4 for start, text in zip(starts, texts, strict=True)]
    datasets = [_dataset(job, begins[4 * i + 1 : 4 * i + 4], lengths) for i, job in enumerate(jobs)]
    fill_small_datasets(
        datasets,
        buffer.view(np.int32),
        seed=request.random_seed,
        length=request.sequence_length,
        extra=int(request.add_extra_token_to_sequence),
    )
    commits.write([job.artefact for job in jobs], buffer, starts, sizes)


def _dataset(job: DatasetJob, begins: Sequence[int], lengths: LengthReader) -> SmallDataset:
    """Return the SmallDataset of a job. Raises: DataError if its `.idx` cannot be read.

    Args:
        begins: the places of the document, sample and shuffle index in the buffer.
    """
    part = job.size
    documents, rows, samples = begins
    stored = lengths.find(job.part.prefix, part)
    part_lengths = stored.read(part.begin, part.end)
    check_part(stored, part, part_lengths)
    return SmallDataset(
        lengths=part_lengths,
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
    """Return a buffer of at least `size` bytes. It belongs to this thread and is reused: getting
    new memory pages from the system takes as long as filling them."""
    buffer = getattr(_buffers, "bytes", None)
    if buffer is None or len(buffer) < size:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        buffer = memory[-memory.ctypes.data % _ALIGNMENT :][:size]
        _buffers.bytes = buffer
    return buffer

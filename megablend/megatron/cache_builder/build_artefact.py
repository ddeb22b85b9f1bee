"""Building one artefact in this process: arrays in the order of Megatron's random draws, to the disk as they are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megablend.formats.base import Array
from megablend.megatron.cache_builder.commit import Commits
from megablend.megatron.cache_builder.length_reader import LengthReader
from megablend.megatron.cache_builder.lengths import read_part
from megablend.megatron.cache_builder.work_plan import BlendJob, DatasetJob
from megablend.megatron.cache_builder.write import ArtefactWriter
from megablend.megatron.exact.blend import exhaustive, greedy
from megablend.megatron.exact.documents import document_index, shuffle_index
from megablend.megatron.exact.permuted import largest_remainder_blend
from megablend.megatron.exact.pieces import Pieces
from megablend.megatron.exact.samples import sample_rows
from megablend.megatron.exact.shuffle import Generator
from megablend.megatron.request.request import LARGEST_REMAINDER, CacheRequest

_SMALL = 1 << 16
"""Samples of a dataset whose shuffle takes less time than another thread's start."""
_DRAWN = 1 << 22
"""Samples of a blend that are made at once: 40 MiB."""


def build_dataset(
    job: DatasetJob, request: CacheRequest, commits: Commits, lengths: LengthReader, *, threads: int, overlap: bool
) -> None:
    """Write a dataset's document, sample and shuffle index.

    Args:
        commits: takes the files when they are whole.
        threads: for the sample index.
        overlap: shuffle the samples while the sample index is made, which takes the memory of both.

    Raises: DataError where the `.idx` cannot be read; CacheError where the cache cannot be written; StoppedError.
    """
    documents, generator = _documents(job, request)
    with ArtefactWriter(job.artefact, commits) as out, contextlib.ExitStack() as stack:
        shuffled = None
        if overlap and job.num_samples >= _SMALL:
            background = stack.enter_context(ThreadPoolExecutor(1))
            shuffled = background.submit(_write_shuffle_index, job, generator, out)
        out.write("document_index", documents)
        _write_sample_index(job, request, lengths, documents, out, threads=threads)
        del documents
        if shuffled is None:
            _write_shuffle_index(job, generator, out)
        else:
            shuffled.result()


def build_divided(
    job: DatasetJob,
    request: CacheRequest,
    commits: Commits,
    *,
    begun: Callable[[Path, Path], None],
    await_rows: Callable[[], None],
) -> None:
    """Write a dataset's document and shuffle index, while others write its sample index.

    Args:
        begun: called with the files of document and sample index when the first is whole, the second nothing but long enough.
        await_rows: waits until the others have filled it.

    Others, and Raises, as build_dataset has them.
    """
    documents, generator = _documents(job, request)
    with ArtefactWriter(job.artefact, commits) as out:
        out.write("document_index", documents)
        del documents
        out.reserve("sample_index")
        begun(out.path("document_index"), out.path("sample_index"))
        _write_shuffle_index(job, generator, out)
        await_rows()


def build_blend(job: BlendJob, commits: Commits, *, threads: int) -> None:
    """Write a blend's dataset index and dataset sample index, piece by piece. Raises: CacheError; StoppedError."""
    blend = _blend(job)
    with (
        ArtefactWriter(job.artefact, commits) as out,
        out.array("dataset_index") as datasets,
        out.array("dataset_sample_index") as samples,
    ):
        while blend.step < blend.size:
            drawn = blend.draw(min(_DRAWN, blend.size - blend.step), threads=threads)
            datasets.append(drawn[0])
            samples.append(drawn[1])


def _blend(job: BlendJob) -> Pieces:
    if job.interleaving == LARGEST_REMAINDER:
        return largest_remainder_blend(job.shares, job.num_samples, job.seed)
    return exhaustive(job.lengths) if job.size is None else greedy(job.weights, job.size)


def _documents(job: DatasetJob, request: CacheRequest) -> tuple[Array, Generator]:
    """The document index, and the generator that shuffled it."""
    generator = Generator(request.random_seed)
    documents = np.arange(job.size.begin, job.size.end, dtype=np.int32)
    return document_index(documents, job.num_epochs, generator, job.samples_before_final is not None), generator


def _write_sample_index(
    job: DatasetJob, request: CacheRequest, reader: LengthReader, documents: Array, out: ArtefactWriter, *, threads: int
) -> None:
    lengths = read_part(reader.find(job.part.prefix, job.size), job.size)
    extra = int(request.add_extra_token_to_sequence)
    with out.array("sample_index") as file:
        made = sample_rows(
            lengths,
            documents,
            request.sequence_length,
            job.num_samples,
            file.dtype,
            extra=extra,
            keep_tail=job.keep_tail,
            threads=threads,
        )
        file.extend(made)


def _write_shuffle_index(job: DatasetJob, generator: Generator, out: ArtefactWriter) -> None:
    first = job.num_samples if job.samples_before_final is None else job.samples_before_final
    out.write("shuffle_index", shuffle_index(first, job.num_samples, generator))

"""Build artefacts in this process. Arrays are computed in the order in which Megatron draws random
numbers for them, and written to the disk while they are computed."""

from __future__ import annotations

import numpy as np

from megablend.megatron.cache_builder.commit import ArtefactWriter, Commits
from megablend.megatron.cache_builder.lengths import LengthReader, read_part
from megablend.megatron.cache_builder.work_plan import BlendJob, DatasetJob
from megablend.megatron.exact.greedy import exhaustive, greedy
from megablend.megatron.exact.samples import sample_rows
from megablend.megatron.exact.shuffle import Generator, document_index, shuffle_index
from megablend.megatron.request.request import CacheRequest

_DRAWN = 1 << 22
"""Number of samples of a blend that are computed at a time; they take 40 MiB."""


def build_dataset(
    job: DatasetJob, request: CacheRequest, commits: Commits, reader: LengthReader
) -> None:
    """Write the document, sample and shuffle index of a dataset.

    Args:
        commits: receives the artefact when its files are complete.

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
    lengths = read_part(reader.find(job.part.prefix, job.size), job.size)
    with ArtefactWriter(job.artefact, commits) as out:
        out.write("document_index", documents)
        with out.array("sample_index") as file:
            parts = sample_rows(
                lengths,
                documents,
                request.sequence_length,
                job.num_samples,
                dtype=file.dtype,
                extra=int(request.add_extra_token_to_sequence),
                keep_tail=job.keep_tail,
            )
            for rows in parts:
                file.append(rows)
                del rows  # before the next ones are made
        del documents, lengths
        first = job.num_samples if job.samples_before_final is None else job.samples_before_final
        out.write("shuffle_index", shuffle_index(first, job.num_samples, generator))


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

"""Build large sample indices on all ranks. Each rank gets a run of documents (consecutive entries
of the document index), and writes the rows of the samples that begin in this run.

    owner      shuffles the documents, begins the file          -> all ranks: begun
    each rank  reads its run, gathers and counts its lengths    -> all ranks: counted
    each rank  knows the tokens before its run; writes its rows -> all ranks: written
    owner      shuffles the samples at the same time; commits the artefact

The owner is the rank to which the job is assigned. Messages are sent with the heartbeats of a build
(see worker.py), so that a rank works on its own jobs until a message arrives.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megablend.formats.base import Array
from megablend.megatron.cache_builder.commit import StoppedError
from megablend.megatron.cache_builder.lengths import LengthReader, read_part
from megablend.megatron.cache_builder.schedule import Assignment
from megablend.megatron.cache_builder.work_plan import DatasetJob, Job
from megablend.megatron.exact.samples import BLOCK, ROWS, count_run, cut_run, end_row, reached
from megablend.megatron.request.request import CacheRequest
from megablend.system.atomic_write import flush, open_part, translate_os_errors

_POLL_SECONDS = 0.2


class Message(NamedTuple):
    """A message to all ranks about a divided job. It says that the job has begun, that the tokens
    of a part were counted, or that the rows of a part were written."""

    job: int
    files: tuple[Path, ...] = ()
    """If the job has begun: the files of the document index, which is complete, and of the sample
    index, which has its full size but no content yet. Empty if there is nothing to do."""
    part: int = -1
    """The number of the part that was counted or written; -1 if the message says that the job has
    begun."""
    tokens: int = -1
    """The number of tokens in the part's run if the message says that the part was counted;
    otherwise -1."""


class Parts:
    """This rank's work on the jobs that are divided among all ranks.

    Args:
        jobs: the jobs of all ranks.
        assignment: the assignment of this rank, with the divided jobs and the number of parts.
        wake: called when there is a message to send, from any thread.
        stop: set when the build has failed.
    """

    block = BLOCK
    """Number of documents that are counted at a time."""
    max_rows = ROWS
    """Number of rows that are computed at a time."""

    def __init__(
        self,
        jobs: Sequence[Job],
        assignment: Assignment,
        request: CacheRequest,
        lengths: LengthReader,
        wake: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        self._jobs = jobs
        self._request = request
        self._lengths = lengths
        self._wake = wake
        self._stop = stop
        self._part = assignment.part
        self._num_parts = assignment.num_parts
        self._left = set(assignment.divided) if assignment.part >= 0 else set()
        self._files: dict[int, tuple[Path, ...]] = {}
        self._counted: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._written: defaultdict[int, set[int]] = defaultdict(set)
        self._all_written = {job: threading.Event() for job in assignment.divided}
        self._runs: dict[int, tuple[Array, list[int]]] = {}
        self._unsent: list[Message] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self._tasks: list[Future[None]] = []

    def begin(self, job: int, *files: Path) -> None:
        """Announce to all ranks that a divided job has begun. The rank that owns the job calls this
        method, from any thread. The files are those of the document and the sample index; without
        files, there is nothing to do."""
        self._send(Message(job, files))

    def await_rows(self, job: int) -> None:
        """Wait until all parts of a job are written. Must not be called from the thread that calls
        `receive`, since that would wait forever.
        Raises: StoppedError."""
        while not self._all_written[job].wait(_POLL_SECONDS):
            if self._stop.is_set():
                raise StoppedError

    def take_messages(self) -> list[Message]:
        """Return the messages that have not been sent yet. They are for all ranks, including this
        one. Raises: the error of a part that failed."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            task.result()
        with self._lock:
            messages = self._unsent
            self._unsent = []
        return messages

    def receive(self, message: Message) -> None:
        """Process a message from any rank, and start the work that it makes possible."""
        job, files, part, tokens = message
        if part < 0:
            self._files[job] = files
            if not files:
                self._left.discard(job)
            elif self._part >= 0:
                self._tasks.append(self._pool.submit(self._count, job))
        elif tokens >= 0:
            self._counted[job][part] = tokens
            if len(self._counted[job]) == self._num_parts and self._part >= 0:
                self._tasks.append(self._pool.submit(self._write, job))
        else:
            self._written[job].add(part)
            if part == self._part:
                self._left.discard(job)
            if len(self._written[job]) == self._num_parts:
                self._all_written[job].set()

    @property
    def left(self) -> int:
        """The number of divided jobs whose part on this rank is not finished."""
        return len(self._left)

    def close(self) -> None:
        """Stop, without waiting for work in progress."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, message: Message) -> None:
        with self._lock:
            self._unsent.append(message)
        self._wake()

    def _count(self, number: int) -> None:
        """Count the tokens in this rank's run of a job's documents."""
        job = self._job(number)
        spec = job.artefact.arrays[0]
        first = spec.shape[0] * self._part // self._num_parts
        stop = spec.shape[0] * (self._part + 1) // self._num_parts
        documents = np.memmap(
            self._files[number][0], np.int32, "r", len(spec.header) + 4 * first, (stop - first,)
        )
        lengths = read_part(self._lengths.find(job.part.prefix, job.size), job.size)
        gathered, sums = count_run(lengths, documents, block=self.block)
        self._runs[number] = gathered, sums
        self._send(Message(number, part=self._part, tokens=sum(sums)))

    def _write(self, number: int) -> None:
        """Write the rows of a job's sample index that begin in this rank's run. The last rank also
        writes the rows after all documents."""
        job = self._job(number)
        gathered, sums = self._runs.pop(number)
        tokens_of_parts = [self._counted[number][part] for part in range(self._num_parts)]
        documents = job.artefact.arrays[0].shape[0]
        spec = job.artefact.arrays[1]
        row_bytes = 2 * np.dtype(spec.dtype).itemsize
        first = documents * self._part // self._num_parts
        start = sum(tokens_of_parts[: self._part])
        length = self._request.sequence_length
        samples = job.num_samples
        extra = int(self._request.add_extra_token_to_sequence)
        pieces = cut_run(
            gathered,
            sums,
            first,
            start,
            length,
            samples,
            extra=extra,
            dtype=spec.dtype,
            block=self.block,
            max_rows=self.max_rows,
        )
        sample = reached(sum(tokens_of_parts), length, samples, extra)
        if self._part == self._num_parts - 1 and sample <= samples:
            end = end_row(
                int(gathered[-1]), documents, sample, samples, extra=extra, keep_tail=job.keep_tail
            )
            pieces = chain(pieces, [(sample, np.full((samples + 1 - sample, 2), end, spec.dtype))])
        path = self._files[number][1]
        with translate_os_errors(path), open_part(path) as file:
            for sample, rows in pieces:
                if self._stop.is_set():
                    raise StoppedError
                file.seek(len(spec.header) + row_bytes * sample)
                file.write(np.ascontiguousarray(rows).data)
            flush(file)
        self._send(Message(number, part=self._part))

    def _job(self, number: int) -> DatasetJob:
        job = self._jobs[number]
        assert isinstance(job, DatasetJob)
        return job

"""Large sample indices, made by all ranks: each cuts a run of the documents into its part of the file.

    owner      shuffles the documents, begins the file          -> all ranks: begun
    each rank  reads its run, gathers and counts its lengths    -> all ranks: counted
    each rank  knows the tokens before its run; writes its rows -> all ranks: written
    owner      shuffles the samples at the same time; commits the artefact

Messages travel with the heartbeats of a build (see worker), so a rank works on its own jobs until one arrives.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megablend.formats.base import Array
from megablend.fs.atomic_write import flush, open_part, translate_os_errors
from megablend.megatron.cache_builder.commit import StoppedError
from megablend.megatron.cache_builder.length_reader import LengthReader
from megablend.megatron.cache_builder.lengths import read_part
from megablend.megatron.cache_builder.work_plan import DatasetJob, Job
from megablend.megatron.exact.sample_parts import count_run, cut_run, rows_after
from megablend.megatron.exact.samples import BLOCK, ROWS
from megablend.megatron.request.request import CacheRequest

_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Begun:
    """A job's document index is complete and the file of its sample index exists; no paths if there is nothing to do."""

    job: int
    documents: Path | None = None
    samples: Path | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of a part's run."""

    job: int
    part: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Written:
    """Message that a part's rows are on disk."""

    job: int
    part: int


Message = Begun | Counted | Written


class Parts:
    """This rank's parts of the jobs that are divided among the ranks.

    Args:
        jobs: of all ranks.
        divided: numbers of those that are divided.
        part, num_parts: this rank's, and how many there are; part -1 for a rank that makes none.
        wake: called from any thread when there is something to send.
        stop: set where the build has failed.
    """

    block = BLOCK
    """Documents that are counted at a time."""
    most_rows = ROWS
    """Rows that are computed at a time."""

    def __init__(
        self,
        jobs: Sequence[Job],
        divided: frozenset[int],
        part: int,
        num_parts: int,
        request: CacheRequest,
        lengths: LengthReader,
        wake: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        self._lengths = lengths
        self._jobs, self._request, self._wake, self._stop = jobs, request, wake, stop
        self._part, self._num_parts = part, num_parts
        self._left = set(divided) if part >= 0 else set()
        self._begun: dict[int, Begun] = {}
        self._counted: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._written: defaultdict[int, set[int]] = defaultdict(set)
        self._whole = {job: threading.Event() for job in divided}
        self._runs: dict[int, tuple[Array, list[int]]] = {}
        self._sent: list[Message] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self._tasks: list[Future[None]] = []

    def begin(self, message: Begun) -> None:
        """Called by the job's owner, from any thread."""
        self._send(message)

    def await_rows(self, job: int) -> None:
        """Wait until all parts of a job are written; from any thread but the one that receives them. Raises: StoppedError."""
        while not self._whole[job].wait(_POLL_SECONDS):
            if self._stop.is_set():
                raise StoppedError

    def take_messages(self) -> list[Message]:
        """Messages for all ranks, this one included. Raises: the error of a part that failed."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            task.result()
        with self._lock:
            sent, self._sent = self._sent, []
        return sent

    def receive(self, message: Message) -> None:
        """Process a message of any rank, and start the work that it allows."""
        job = message.job
        if isinstance(message, Begun):
            self._begun[job] = message
            if message.documents is None:
                self._left.discard(job)
            elif self._part >= 0:
                self._tasks.append(self._pool.submit(self._count, job))
        elif isinstance(message, Counted):
            self._counted[job][message.part] = message.tokens
            if len(self._counted[job]) == self._num_parts and self._part >= 0:
                self._tasks.append(self._pool.submit(self._write, job))
        else:
            self._written[job].add(message.part)
            if message.part == self._part:
                self._left.discard(job)
            if len(self._written[job]) == self._num_parts:
                self._whole[job].set()

    @property
    def left(self) -> int:
        """Jobs whose part on this rank is not done."""
        return len(self._left)

    def close(self) -> None:
        """End without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, message: Message) -> None:
        with self._lock:
            self._sent.append(message)
        self._wake()

    def _count(self, number: int) -> None:
        job, path = self._job(number), self._begun[number].documents
        assert path is not None
        size, header = job.artefact.arrays[0].shape[0], len(job.artefact.arrays[0].header)
        first, stop = (size * part // self._num_parts for part in (self._part, self._part + 1))
        documents = np.memmap(path, np.int32, "r", header + 4 * first, (stop - first,))
        lengths = read_part(self._lengths.find(job.part.prefix, job.size), job.size)
        gathered, sums = count_run(lengths, documents, block=self.block)
        self._runs[number] = gathered, sums
        self._send(Counted(number, self._part, sum(sums)))

    def _write(self, number: int) -> None:
        job, path = self._job(number), self._begun[number].samples
        assert path is not None
        gathered, sums = self._runs.pop(number)
        counted = [self._counted[number][part] for part in range(self._num_parts)]
        spec, documents = job.artefact.arrays[1], job.artefact.arrays[0].shape[0]
        header, width = len(spec.header), 2 * np.dtype(spec.dtype).itemsize
        length, extra = self._request.sequence_length, int(self._request.add_extra_token_to_sequence)
        first, start = documents * self._part // self._num_parts, sum(counted[: self._part])
        with translate_os_errors(path), open_part(path) as file:

            def put(sample: int, rows: Array) -> None:
                if self._stop.is_set():
                    raise StoppedError
                file.seek(header + width * sample)
                file.write(np.ascontiguousarray(rows).data)

            for sample, rows in cut_run(
                gathered,
                sums,
                first,
                start,
                length,
                job.num_samples,
                extra=extra,
                dtype=spec.dtype,
                block=self.block,
                most_rows=self.most_rows,
            ):
                put(sample, rows)
            if self._part == self._num_parts - 1:
                last, tokens = int(gathered[-1]), sum(counted)
                tail = rows_after(
                    last,
                    documents,
                    tokens,
                    length,
                    job.num_samples,
                    extra=extra,
                    keep_tail=job.keep_tail,
                    dtype=spec.dtype,
                )
                put(*tail)
            flush(file)
        self._send(Written(number, self._part))

    def _job(self, number: int) -> DatasetJob:
        job = self._jobs[number]
        assert isinstance(job, DatasetJob)
        return job

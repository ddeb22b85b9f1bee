"""A rank's worker processes: `python -m megablend.text.pool`, which get tasks as pickles on their
standard input and answer on their standard output.

They are new processes, not forks, and do not run the program that builds again, as those of
`multiprocessing` would: a script without `if __name__ == "__main__"` may call `build`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from megablend.errors import ResourceError
from megablend.text.engine import without_threads
from megablend.text.work import Job, Report, Setup, TaskResult, Worker

_PR_SET_PDEATHSIG = 1
_TICK_SECONDS = 0.2
_NO_THREADS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def run_jobs(
    setups: Sequence[Setup],
    jobs: Sequence[Job],
    num_processes: int,
    report: Report,
    tick: Callable[[], None],
) -> list[TaskResult]:
    """Do jobs in several processes, or here if there is one.

    Args:
        report: called in any thread, with bytes, documents and tokens that are done.
        tick: called in this thread from time to time.

    Returns: the result of each job, in order.
    Raises: the first error of a job; ResourceError if a process was killed.
    """
    if num_processes == 1 or len(jobs) < 2:
        return _run_here(setups, jobs, report, tick)
    done: list[TaskResult | None] = [None] * len(jobs)
    waiting = queue.SimpleQueue[int]()
    for number in range(len(jobs)):
        waiting.put(number)
    errors = list[BaseException]()
    # Started here, not by the threads: a process gets PR_SET_PDEATHSIG when its thread ends
    processes = [_start() for _ in range(min(num_processes, len(jobs)))]

    def drive(process: subprocess.Popen[bytes]) -> None:
        try:
            while not errors:
                number = waiting.get_nowait()
                job = jobs[number]
                done[number] = _do(process, job, setups[job.setup], report)
        except queue.Empty:
            pass
        except BaseException as error:  # is raised by the main thread
            errors.append(error)

    threads = [threading.Thread(target=drive, args=(each,), daemon=True) for each in processes]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_TICK_SECONDS / len(threads))
            tick()
            if errors:
                break
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()
        for process in processes:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what it did not take
                    assert pipe is not None
                    pipe.close()
    if errors:
        raise errors[0]
    return [each for each in done if each is not None]


def _run_here(
    setups: Sequence[Setup], jobs: Sequence[Job], report: Report, tick: Callable[[], None]
) -> list[TaskResult]:
    workers = dict[int, Worker]()
    results = list[TaskResult]()

    def report_here(num_bytes: int, documents: int, tokens: int) -> None:
        report(num_bytes, documents, tokens)
        tick()

    with without_threads():
        for job in jobs:
            if job.setup not in workers:
                workers = {job.setup: Worker(setups[job.setup])}
            results.append(workers[job.setup].do(job, report_here))
    return results


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **_NO_THREADS, "PYTHONPATH": paths},
    )


def _do(process: subprocess.Popen[bytes], job: Job, setup: Setup, report: Report) -> TaskResult:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump((job, setup), process.stdin)
        process.stdin.flush()
        while True:
            kind, value = pickle.load(process.stdout)
            if kind == "done":
                assert isinstance(value, TaskResult)
                return value
            if kind == "error":
                raise value
            report(*value)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        code = process.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise ResourceError(
            f"{job.task.file.path}: the process that tokenised it ended ({cause}): if memory ran out, build with fewer "
            "processes; build again, which goes on from the parts that are done"
        ) from error


def _serve(commands: IO[bytes], answers: IO[bytes]) -> None:
    """Do jobs until there are no more."""
    worker: Worker | None = None
    number = -1

    def answer(kind: str, value: Any) -> None:
        pickle.dump((kind, value), answers)
        answers.flush()

    while True:
        try:
            job, setup = pickle.load(commands)
        except EOFError:
            return
        try:
            if worker is None or job.setup != number:
                worker = Worker(setup)
                number = job.setup
            answer("done", worker.do(job, lambda *counts: answer("some", counts)))
        except Exception as error:
            answer("error", error)


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # it ended before it was to take this one with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank says when to stop
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()

"""A rank's worker processes. They receive tasks and send results through a connection that they
inherit.

They are new processes, not forks. Unlike the processes of `multiprocessing`, they do not run the
caller's program a second time, so a script without `if __name__ == "__main__"` may call `build`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from megablend.errors import ResourceError
from megablend.system.after_fork import (
    fill_standard_streams,
    python_command,
    start_uninterrupted,
)
from megablend.text.engine import without_threads
from megablend.text.parts import Entry
from megablend.text.setup import Setup
from megablend.text.tasks import Task
from megablend.text.work import Report, Worker

_PR_SET_PDEATHSIG = 1
"""The option of Linux's `prctl` that sets the signal which a process gets when its parent exits."""
_REPORT_SECONDS = 0.2
_NO_THREADS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def run_tasks(
    setups: Sequence[Setup], tasks: Sequence[Task], num_processes: int, report: Report
) -> list[Entry]:
    """Run tasks in several processes, or in this process if one is enough.

    Args:
        setups: the setup of each source.
        report: called at least every 0.2 seconds with the number of bytes, documents and tokens
            that were processed since the last call.

    Returns: the result of each task, in order.
    Raises: the first error of a task; ResourceError if a process was killed.
    """
    if num_processes == 1 or len(tasks) < 2:
        worker = _TaskWorker()
        with without_threads():
            return [worker.do(task, setups[task.source], report) for task in tasks]
    results = dict[int, Entry]()
    numbers = iter(range(len(tasks)))
    running = dict[Connection, tuple[_Process, int]]()
    """The busy processes by connection, each with the number of its task."""

    def assign(process: _Process) -> None:
        """Give a process the next task, if any tasks are left."""
        number = next(numbers, None)
        if number is not None:
            running[process.connection] = (process, number)
            process.send(tasks[number], setups[tasks[number].source])

    with ExitStack() as stack:
        for process in [_Process(stack) for _ in range(min(num_processes, len(tasks)))]:
            assign(process)
        while running:
            report(0, 0, 0)
            for connection in wait(list(running), _REPORT_SECONDS):
                assert isinstance(connection, Connection)
                process, number = running[connection]
                message = process.receive(tasks[number])
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Entry):
                    results[number] = message
                    del running[connection]
                    assign(process)
                else:
                    report(*message)
    return [results[number] for number in range(len(tasks))]


class _TaskWorker:
    """A worker that runs tasks of several sources, one after the other. It keeps the Worker of the
    last source, which has loaded its tokenizer."""

    def __init__(self) -> None:
        self._source = -1
        self._worker: Worker | None = None

    def do(self, task: Task, setup: Setup, report: Report) -> Entry:
        """Run a task of the source that the setup describes."""
        if self._worker is None or task.source != self._source:
            self._worker = Worker(setup)
            self._source = task.source
        return self._worker.do(task, report)


class _Process:
    """A worker process, which is killed when `stack` closes."""

    def __init__(self, stack: ExitStack) -> None:
        fill_standard_streams()
        self.connection, worker_end = Pipe()
        stack.callback(self.connection.close)
        with worker_end:
            self._process = start_uninterrupted(
                python_command(__name__, "main", str(os.getpid()), str(worker_end.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for the result of the command alone
                env={**os.environ, **_NO_THREADS},
                pass_fds=[worker_end.fileno()],
            )
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)

    def send(self, task: Task, setup: Setup) -> None:
        """Send the process a task. Raises: ResourceError if the process has exited."""
        try:
            self.connection.send((task, setup))
        except OSError as error:
            raise self._ended(task) from error

    def receive(self, task: Task) -> Any:
        """Return the next message about the task of the process: an Entry, an error, or the
        arguments for `report`. Raises: ResourceError if the process has exited."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended(task) from error

    def _ended(self, task: Task) -> ResourceError:
        code = self._process.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ResourceError(
            f"{task.file.path}: the process that was tokenising this file exited ({cause}); build again, with fewer "
            "processes if memory ran out; finished parts are kept"
        )


def _serve(connection: Connection) -> None:
    """Run tasks until the rank closes the connection."""
    worker = _TaskWorker()
    while True:
        try:
            task, setup = connection.recv()
        except EOFError:
            return
        try:
            connection.send(worker.do(task, setup, lambda *counts: connection.send(counts)))
        except Exception as error:
            connection.send(error)


def main(parent: str, descriptor: str) -> None:
    """Run the worker process that `_Process` starts."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # the rank ended before `prctl`, so no signal will come
    _serve(Connection(int(descriptor)))

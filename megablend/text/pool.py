"""A rank's worker processes: `python -m megablend.text.pool`, which get tasks and answer through a
connection that they inherit.

They are new processes, not forks, and do not run the program that builds again, as those of
`multiprocessing` would: a script without `if __name__ == "__main__"` may call `build`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from megablend.errors import ResourceError
from megablend.text.engine import without_threads
from megablend.text.parts import Entry, Task
from megablend.text.work import Report, Setup, Worker

_PR_SET_PDEATHSIG = 1
_TICK_SECONDS = 0.2
_NO_THREADS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def run_tasks(
    setups: Sequence[Setup], tasks: Sequence[Task], num_processes: int, report: Report
) -> list[Entry]:
    """Do tasks in several processes, or here if there is one.

    Args:
        setups: of all sources.
        report: called with bytes, documents and tokens that are done, and from time to time.

    Returns: the result of each task, in order.
    Raises: the first error of a task; ResourceError if a process was killed.
    """
    if num_processes == 1 or len(tasks) < 2:
        return _run_here(setups, tasks, report)
    done = dict[int, Entry]()
    waiting = iter(enumerate(tasks))
    doing = dict[Connection, tuple[_Process, int]]()

    def assign(process: _Process) -> None:
        """Give a process the next task, if there is one."""
        for number, task in waiting:
            doing[process.connection] = (process, number)
            process.send(task, setups[task.source])
            break

    with ExitStack() as stack:
        for process in [_Process(stack) for _ in range(min(num_processes, len(tasks)))]:
            assign(process)
        while doing:
            report(0, 0, 0)
            for connection in wait(list(doing), _TICK_SECONDS):
                assert isinstance(connection, Connection)
                process, number = doing[connection]
                answer = process.receive(tasks[number])
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, Entry):
                    done[number] = answer
                    del doing[connection]
                    assign(process)
                else:
                    report(*answer)
    return [done[number] for number in range(len(tasks))]


def _run_here(setups: Sequence[Setup], tasks: Sequence[Task], report: Report) -> list[Entry]:
    worker: Worker | None = None
    results = list[Entry]()
    with without_threads():
        for number, task in enumerate(tasks):
            if worker is None or task.source != tasks[number - 1].source:
                worker = Worker(setups[task.source])
            results.append(worker.do(task, report))
    return results


class _Process:
    """A worker process, which is killed when `stack` closes."""

    def __init__(self, stack: ExitStack) -> None:
        self.connection, theirs = Pipe()
        stack.callback(self.connection.close)
        paths = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is no result of a command
                env={**os.environ, **_NO_THREADS, "PYTHONPATH": paths},
                pass_fds=[theirs.fileno()],
            )
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)

    def send(self, task: Task, setup: Setup) -> None:
        """Raises: ResourceError if the process has ended."""
        try:
            self.connection.send((task, setup))
        except OSError as error:
            raise self._ended(task) from error

    def receive(self, task: Task) -> Any:
        """What the process says of its task: an Entry, an error, or numbers for `report`.
        Raises: ResourceError if the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended(task) from error

    def _ended(self, task: Task) -> ResourceError:
        code = self._process.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ResourceError(
            f"{task.file.path}: the process that was tokenising this file ended ({cause}); build again, with fewer "
            "processes if memory ran out: finished parts are kept"
        )


def _serve(connection: Connection) -> None:
    """Do tasks until there are no more."""
    worker: Worker | None = None
    source = -1
    while True:
        try:
            task, setup = connection.recv()
        except EOFError:
            return
        try:
            if worker is None or task.source != source:
                worker = Worker(setup)
                source = task.source
            connection.send(worker.do(task, lambda *counts: connection.send(counts)))
        except Exception as error:
            connection.send(error)


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # it ended before it was to take this one with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank says when to stop
    _serve(Connection(int(sys.argv[2])))


if __name__ == "__main__":
    _main()

"""A helper process that reads object stores, for programs that fork workers later. The programs
themselves never have a client.

The client does not work in a child that is forked after its first use, and Megatron's DataLoader
forks its workers. The parent reads little (it builds caches), so its reads may go through a pipe.
Workers read directly, without the helper. The helper is a new Python process, not a fork, and does
not import the program's main module.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from megablend.errors import DataError
from megablend.storage.base import KnownFiles, Storage
from megablend.storage.object_options import carrying_queries
from megablend.system.after_fork import (
    fill_standard_streams,
    python_command,
    start_uninterrupted,
)

_THREADS = 64
"""The number of calls that a helper handles at a time."""


class Helper:
    """A helper process, which calls methods of storages on request."""

    def __init__(self) -> None:
        fill_standard_streams()
        self._connection, theirs = Pipe()
        command = python_command(__name__, "serve", str(theirs.fileno()))
        self._process = start_uninterrupted(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[str, Future[Any]]] = {}
        self._reader = threading.Thread(target=self._receive, name="megablend-helper", daemon=True)
        self._reader.start()

    def call(
        self, storage: Storage, known: KnownFiles, method: str, *arguments: Any
    ) -> Future[Any]:
        """Call a method of a storage in the helper process. The first argument of the method must
        be a location.

        Args:
            known: known versions of the files that the call reads. The helper keeps no versions
                between calls.

        Returns: a future of the method's result and the versions known afterwards. It fails with
            the error that the method raises, or with DataError if the process has exited.
        """
        number = next(self._numbers)
        outcome = Future[Any]()
        with carrying_queries():
            pickled = pickle.dumps(storage)
        with self._lock:
            self._pending[number] = (arguments[0], outcome)
            try:
                self._connection.send_bytes(
                    pickle.dumps((number, pickled, known, method, arguments))
                )
            except OSError:
                self._pending.pop(number)[1].set_exception(self._ended(arguments[0]))
        return outcome

    def close(self) -> None:
        """Stop the process. Calls in flight fail."""
        with self._lock, contextlib.suppress(OSError):  # it has ended
            self._connection.send_bytes(b"")
        self._reader.join(timeout=10)
        self._process.wait(timeout=10)
        self._connection.close()

    def forget(self) -> None:
        """Forget the process, which belongs to the parent. Called in a forked child."""
        self._connection.close()

    def _receive(self) -> None:
        """Set the results of the futures of calls until the process exits. Runs in a thread."""
        try:
            while True:
                number, is_error, result = pickle.loads(self._connection.recv_bytes())
                outcome = self._pending.pop(number)[1]
                if is_error:
                    outcome.set_exception(result)
                else:
                    outcome.set_result(result)
        except (EOFError, OSError):
            with self._lock:
                pending = list(self._pending.values())
                self._pending.clear()
            for path, outcome in pending:
                outcome.set_exception(self._ended(path))

    @staticmethod
    def _ended(path: str) -> DataError:
        """Return the error for a call to a process that has exited."""
        problem = "cannot be read: the helper process for object stores has exited (see its messages above); restart this process"
        return DataError(path, problem)


_lock = threading.Lock()
_helper: Helper | None = None


def get_helper() -> Helper:
    """Return this process's helper, started on first use."""
    global _helper
    with _lock:
        if _helper is None:
            _helper = Helper()
        return _helper


@atexit.register  # the helper's thread must end before the interpreter shuts down
def close_helper() -> None:
    """Stop this process's helper, if there is one. The next read starts a new helper."""
    global _helper
    with _lock:
        ended = _helper
        _helper = None
    if ended is not None:
        ended.close()


@contextlib.contextmanager
def closing_helper() -> Iterator[None]:
    """Stop this process's helper at the end of the context."""
    try:
        yield
    finally:
        close_helper()


def serve(descriptor: str) -> None:
    """Answer calls until the other end is closed. Runs in the helper."""
    connection = Connection(int(descriptor))
    lock = threading.Lock()

    def answer(message: bytes) -> None:
        number, pickled, known, method, arguments = pickle.loads(message)
        try:
            storage = pickle.loads(pickled)
            storage.add_known_files(known)
            outcome = getattr(storage, method)(*arguments), storage.known_files()
            result = pickle.dumps((number, False, outcome), protocol=5)
        except Exception as error:  # any error is raised in the calling process
            result = pickle.dumps((number, True, error))
        with lock:
            connection.send_bytes(result)

    threads = ThreadPoolExecutor(_THREADS)
    try:
        message = connection.recv_bytes()
        while message:  # an empty one asks the helper to end
            threads.submit(answer, message)
            message = connection.recv_bytes()
    except EOFError:
        pass
    os._exit(0)  # without waiting for requests in flight


def _forget_after_fork() -> None:
    """Forget the parent's helper in a forked child, which starts its own."""
    global _helper, _lock
    _lock = threading.Lock()
    if _helper is not None:
        _helper.forget()
        _helper = None


os.register_at_fork(after_in_child=_forget_after_fork)

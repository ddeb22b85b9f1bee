"""Calls in processes that are killed: each is forked from one that has imported the package, which takes a second, only once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tests.preloaded import python

SERVE = """
import os as _os, sys as _sys, traceback as _traceback
for _line in _sys.stdin:
    _child = _os.fork()
    if not _child:
        try:
            work(*_line.rstrip("\\n").split("\\t"))
        except BaseException:
            _traceback.print_exc()
            _os._exit(1)
        _os._exit(0)
    print(_os.waitstatus_to_exitcode(_os.waitpid(_child, 0)[1]), flush=True)
"""


@contextmanager
def forked(script: str, environment: Mapping[str, str]) -> Iterator[Callable[..., int]]:
    """A function that calls `work(*arguments)` of a script in a new process, with strings, and returns its exit code.

    Args:
        script: defines `work`; starts no threads.
        environment: of the processes.
    """
    command = [*python(), "-c", script + SERVE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        requests = server.stdin
        codes = server.stdout
        assert requests is not None
        assert codes is not None

        def call(*arguments: object) -> int:
            requests.write("\t".join(map(str, arguments)) + "\n")
            requests.flush()
            return int(codes.readline())

        yield call
        requests.close()

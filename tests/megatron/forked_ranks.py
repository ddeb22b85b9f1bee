"""Ranks of a driver as torchrun starts them, but forked from one process that has imported what they need.

Torch and Megatron take seconds in each process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from tests.megatron.plugin_data import environment
from tests.preloaded import Imported, python

SECONDS = 120
"""Until the ranks of a job must have ended."""
SERVE = """
import importlib, json, os, sys, traceback
import torch.distributed

main = importlib.import_module(sys.argv[1]).main

for line in sys.stdin:
    request, ranks = json.loads(line), []
    for environment in request["ranks"]:
        rank = os.fork()
        if not rank:
            os.dup2(2, 1)  # standard output is for answers
            os.environ.update(environment)
            sys.argv[1:] = [request["spec"]]
            try:
                main()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        ranks.append(rank)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]), flush=True)
"""


@contextmanager
def serve_ranks(driver: str, imported: Imported) -> Iterator[Callable[[str, int], list[int]]]:
    """A function that runs a driver with a specification's path on so many ranks, and returns their exit codes.

    Args:
        driver: a module with a function `main`. One rank alone is no job.
        imported: what it needs; see `tests.preloaded`.
    """
    server = subprocess.Popen(
        [*python(imported), "-c", SERVE, driver],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    requests = server.stdin
    answers = server.stdout
    assert requests is not None
    assert answers is not None

    def run(spec: str, num_ranks: int) -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        job = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **job} for rank in range(num_ranks)]
        if num_ranks == 1:
            ranks = [{}]
        requests.write(json.dumps({"spec": spec, "ranks": ranks}) + "\n")
        requests.flush()
        assert wait([answers.fileno()], SECONDS), f"the ranks did not end within {SECONDS} s"
        codes: list[int] = json.loads(answers.readline())
        return codes

    try:
        yield run
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()

"""Runs commands of megablend in forked children, so that each starts in no time; waits before each, for a tracer to come.

Reads a line of JSON a command: {"argv": [...]} or {"read": config}, and "output", a file. Forks; prints the child's process id;
waits for a further line; the child begins. Prints the child's exit status, as the command would have ended by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import megablend
from megablend.cli.main import main as run_command
from megablend.errors import MegablendError
from megablend.index.tables.mapped_table import MappedTable


def read_all(config: str) -> str:
    """Digest of all tokens of a run, read sample by sample and by a Loader."""
    dataset = megablend.open(config)
    tokens = np.concatenate([dataset[k]["tokens"].numpy() for k in range(len(dataset))])
    loader = megablend.Loader(
        dataset, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1
    )
    batches = np.concatenate([batch["tokens"].numpy().reshape(-1) for batch in loader])
    assert np.array_equal(batches, tokens[: len(batches)])
    assert len(tokens) - len(batches) < 4 * dataset.run.sequence_length
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()


def run(order: dict[str, Any]) -> None:
    """Do what is asked; ends with SystemExit."""
    if order.get("large"):  # as tables of a large index are: read rather than mapped
        MappedTable.mapped_bytes = 0
    if "argv" in order:
        sys.argv = ["megablend", *order["argv"]]
        run_command()
    try:
        print(read_all(order["read"]))
    except MegablendError as error:
        print(f"megablend: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(70)
    sys.exit(0)


def warm_up(order: dict[str, Any]) -> int:
    """Run once what children will run, for all that is loaded on the way; the exit status."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            run(order)
        except SystemExit as done:
            return int(done.code or 0)
    return 0


def child(order: dict[str, Any], started: int, output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(order.get("seconds", 100))  # of a child that hangs, none is left behind
    select.select([started], [], [])
    status = 70
    try:
        run(order)
    except SystemExit as done:
        status = int(done.code or 0)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


def main() -> None:
    warm = Path(sys.argv[1])
    for order in json.loads(warm.read_text(encoding="utf-8")):
        assert warm_up(order) == 0, order
    print("ready", flush=True)
    for line in sys.stdin:
        ready, started = os.pipe()
        order = json.loads(line)
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        pid = os.fork()
        if pid == 0:
            os.close(started)
            child(order, ready, output)
        os.close(ready)
        os.close(output)
        print(pid, flush=True)
        sys.stdin.readline()
        os.write(started, b"x")
        os.close(started)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()

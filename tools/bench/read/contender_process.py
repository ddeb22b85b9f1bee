"""One contender in a process of its own: gets ready, waits for its turn, reads, and reports through a pipe.

    python tools/bench/read/contender_process.py NAME FOLDER SECONDS TOKENS PIPE

It writes a line of JSON to the descriptor PIPE at each step (`ready`, `first`, `done`), and waits for a line on stdin before it
opens the data and again before it ends, so that whoever measures it finds it there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from contenders import CONTENDERS


def main() -> None:
    """Read for so many seconds, or tokens, whichever comes first; the first batch is taken in any case."""
    name, folder, seconds, tokens, pipe = sys.argv[1:]
    with os.fdopen(int(pipe), "w", encoding="utf-8") as report:

        def say(**message: object) -> None:
            report.write(json.dumps(message) + "\n")
            report.flush()

        torch.set_num_threads(1)
        opening = CONTENDERS[name].ready(Path(folder))
        say(step="ready")
        sys.stdin.readline()
        start = time.perf_counter()
        batches = iter(opening())
        batch = next(batches)
        checksum = touch(batch)
        first = time.perf_counter()
        say(step="first", seconds=first - start, tokens=batch.numel())
        times = [first]
        size = 0
        for batch in batches:
            checksum += touch(batch)
            size += batch.numel()
            times.append(time.perf_counter())
            if times[-1] - first > float(seconds) or size >= int(tokens):
                break
        count = len(times) - 1
        waits = np.diff(times) * 1e3 if count else np.zeros(1)
        p50, p99 = np.percentile(waits, [50, 99]).tolist()
        say(
            step="done",
            tokens=size,
            seconds=times[-1] - first,
            p50_ms=p50,
            p99_ms=p99,
            checksum=checksum,
        )
        sys.stdin.readline()
        os._exit(0)  # what a peer does at its end is not measured, and some take long


def touch(batch: torch.Tensor) -> int:
    """Read every token, as int64, so that what is read lazily is read; gives their sum."""
    return int(batch.to(torch.int64).sum())


if __name__ == "__main__":
    main()

"""Opens a run NUM times, with and without closing its loader, and prints descriptors and threads, after ten times and at the end.

python opens_worker.py CONFIG NUM

A process of its own: what other tests leave to the garbage collector would be counted, too.
"""

import gc
import json
import sys
import threading
import time
from pathlib import Path

import megablend


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def await_end_of_threads() -> None:
    """Threads of collected loaders end after their current read, which may take a moment on a busy machine."""
    deadline = time.monotonic() + 500
    names = ("megablend-read", "megablend-fetch", "megablend-decode", "megablend-watch")
    gc.collect()
    while time.monotonic() < deadline and any(
        each.name.startswith(names) for each in threading.enumerate()
    ):
        time.sleep(0.01)


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    opens = int(sys.argv[2])
    counts = []
    for turn in range(opens):
        loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
        next(iter(loader))
        if turn % 3 == 0:
            loader.close()
        if turn in (9, opens - 1):
            del loader
            await_end_of_threads()
            counts.append(held())
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

"""A trainer that names its workers and then waits to be killed: python orphans_worker.py CONFIG METHOD"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path

import megablend


def block(sample: dict[str, object]) -> dict[str, object]:
    """Wait as a read does that gets no answer."""
    time.sleep(600)
    return sample


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    method = sys.argv[2]
    is_blocked = sys.argv[3] == "blocked"
    loader = megablend.Loader(
        megablend.open(config, transform=block if is_blocked else None),
        micro_batch_size=2,
        num_workers=2,
        multiprocessing_context=method,
    )
    # The former starts workers and asks them for batches at once
    batches = iter(loader._loader if is_blocked else loader)
    if not is_blocked:
        next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()

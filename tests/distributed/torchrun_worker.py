"""What torchrun starts in the tests: python torchrun_worker.py HOW CONFIG

all       every rank runs the command
restart   the same, but rank 1 fails before it, the first time that the job is started
first     only rank 0 runs the command
api       only rank 0 calls megablend.build
"""

from __future__ import annotations

import datetime
import os
import sys


def main() -> None:
    how, config = sys.argv[1:]
    rank = int(os.environ["RANK"])
    if how == "restart" and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(9)
    if how in ("first", "api") and rank != 0:
        return
    if how == "api":
        import megablend

        print("built", megablend.build(config).index.num_files, flush=True)
        return
    from megablend.cli.main import main as command
    from megablend.distributed import torch_job

    if how == "first":
        torch_job._ARRIVAL_TIMEOUT = datetime.timedelta(seconds=3)
    sys.argv = ["megablend", "build", config]
    command()


if __name__ == "__main__":
    main()

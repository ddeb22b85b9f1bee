"""What launchers start in the tests: python torchrun_worker.py HOW CONFIG

all       every rank runs the command
restart   the same, but rank 1 fails before it, the first time that the job is started
first     only rank 0 runs the command
api       only rank 0 calls megablend.build
one       every rank runs the command with --json, but rank 1 finds no file
exit      every rank runs the command, but rank 1 exits, as a program's handler of signals may
two       every rank runs gc, with options of its own
alone     rank 0 alone runs gc, in a process of its own
every     every rank skips the same samples, without looking for the others
skip      the same by rank 1 alone
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from unittest import mock


def main() -> None:
    how, config = sys.argv[1:]
    rank = int(os.environ.get("RANK") or os.environ["PMI_RANK"])
    if how == "restart" and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(9)
    if how in ("first", "api", "alone") and rank != 0:
        return
    if how == "skip" and rank != 1:
        return
    if how == "api":
        import megablend

        print("built", megablend.build(config).index.num_files, flush=True)
        return
    from megablend.cli.main import main as command
    from megablend.distributed import torch_job

    if how in ("first", "alone"):
        torch_job._ARRIVAL_TIMEOUT = datetime.timedelta(seconds=3)
    sys.argv = ["megablend", "build", config, *(["--json"] if how == "one" else [])]
    if how == "two":
        sys.argv = ["megablend", "gc", config, "--older-than", str(rank)]
    if how == "alone":
        sys.argv = ["megablend", "gc", config]
        if "PMI_RANK" in os.environ:
            sys.exit(subprocess.run([sys.executable, "-m", *sys.argv], check=False).returncode)
    if how in ("every", "skip"):
        sys.argv = ["megablend", "skip", config, "--from", "0", "--to", "4", "--batch", "4"]
        vars(torch_job)["process_group"] = mock.Mock(side_effect=AssertionError)
    if how in ("one", "exit") and rank == 1:
        from megablend.errors import MissingFileError
        from megablend.operations import build

        error = MissingFileError("/x", "no such file") if how == "one" else SystemExit(5)
        vars(build)["list_specs"] = mock.Mock(side_effect=error)
    command()


if __name__ == "__main__":
    main()

"""A dataset of very many files: what adding and wanting it takes of a node process.

    python tools/bench/mirror/many_files.py /dev/shm/files --files 1000000

Makes the folder of files of 10 bytes if it is not there, and starts a node process for a new mirror
beside it. Prints for each step seconds, CPU seconds of the process, its largest memory so far, and
the longest time in which its event loop answered nobody, with the CPU seconds that it took then: on
a machine that does other work, these tell how long an idle one would have to wait.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megablend.mirror.node.frames import Kind
from megablend.mirror.rank.connection import Connection, find_connection
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions

_TICKS = os.sysconf("SC_CLK_TCK")
_POLL_SECONDS = 0.02


def make_files(folder: Path, count: int) -> None:
    """Write files of 10 bytes, 1,000 in each folder."""
    for begin in range(0, count, 1000):
        part = folder / f"shard-{begin // 1000:04d}"
        part.mkdir(parents=True)
        for number in range(min(1000, count - begin)):
            (part / f"{number:06d}.bin").write_bytes(b"0123456789")


def read_cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def read_peak(pid: int) -> int:
    """Largest resident memory of a process so far, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


@contextmanager
def measure(name: str, pid: int, connection: Connection) -> Iterator[None]:
    """Print what a step takes."""
    longest = (0.0, 0.0)
    is_over = threading.Event()

    def poll() -> None:
        nonlocal longest
        while not is_over.wait(_POLL_SECONDS):
            begin = time.monotonic()
            cpu_before = read_cpu(pid)
            connection.command(Kind.CHECK)
            longest = max(longest, (time.monotonic() - begin, read_cpu(pid) - cpu_before))

    poller = threading.Thread(target=poll)
    poller.start()
    begin = time.monotonic()
    cpu = read_cpu(pid)
    try:
        yield
    finally:
        seconds = time.monotonic() - begin
        cpu = read_cpu(pid) - cpu
        is_over.set()
        poller.join()
    print(
        f"{name:8} {seconds:7.2f} s {cpu:7.2f} s of CPU {read_peak(pid):6d} MiB at most, "
        f"longest without an answer {longest[0]:.2f} s ({longest[1]:.2f} s of CPU)",
        flush=True,
    )


def time_listing(folder: Path) -> None:
    """Print what the listing alone takes: names and states, in a process of its own."""
    code = (
        "import sys, time; from megablend.storage.by_scheme import make_storage\n"
        "view = make_storage().for_reading(); begin = time.process_time()\n"
        "for each in view.find(sys.argv[1]).files: view.stat(each.path)\n"
        "print(f'listing alone: {time.process_time() - begin:.2f} s of CPU')"
    )
    subprocess.run([sys.executable, "-c", code, f"{folder}/**/*"], check=True)


def main() -> None:
    """Make the files, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--held", type=float, default=0.0, help="seconds of fetching to measure")
    options = parser.parse_args()
    if not options.folder.exists():
        make_files(options.folder, options.files)
    time_listing(options.folder)
    mirror = options.folder.with_name(f"{options.folder.name}-mirror")
    about = {"folder": str(mirror), "prefixes": [str(options.folder)], "reserve": 0}
    config = mirror.with_suffix(".json")
    config.write_text(json.dumps({"storage": {"mirror": about}}))
    node = subprocess.Popen(
        [sys.executable, "-m", "megablend", "node", "run", str(config)], stdout=subprocess.PIPE
    )
    try:
        assert node.stdout is not None
        node.stdout.readline()
        connection = find_connection(parse_mirror(about), ObjectOptions())

        def ask(verb: str, **arguments: Any) -> Any:
            return connection.command(Kind.DATASETS, {"verb": verb, **arguments})

        with measure("start", node.pid, connection):
            ask("list")
        with measure("add", node.pid, connection):
            ask("add", dataset="d", sources=[f"{options.folder}/"])
        with measure("want", node.pid, connection):
            ask("want", target="d")
            while not ask("status")["goals"]:
                time.sleep(_POLL_SECONDS)
        with measure("status", node.pid, connection):
            print(ask("status")["goals"])
        with measure("fetch", node.pid, connection):
            time.sleep(options.held)
        print(ask("status")["goals"])
    finally:
        node.terminate()
        node.wait()
        shutil.rmtree(mirror)
        config.unlink()


if __name__ == "__main__":
    main()

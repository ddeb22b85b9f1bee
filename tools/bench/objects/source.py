"""A source over HTTP with latency, in a process of its own: the tests' server with a folder's files under many names."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
BUCKET = "bench"


@contextlib.contextmanager
def serving(folder: Path, *, latency: float, names: int = 1) -> Iterator[str]:
    """Serve a folder's files as `bench/<number>-<file>`, each under `names` numbers; yields the URL.

    Args:
        latency: seconds before each answer.
    """
    command = [sys.executable, __file__, str(folder), str(latency), str(names)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()  # it ends
            print(f"  source: {process.stdout.readline().strip()}")


def set_keys() -> None:
    """Credentials that the source does not look at."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"}


def main() -> None:
    """Serve until standard input is closed, then print what was requested."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("latency", type=float)
    parser.add_argument("names", type=int)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.storage.faulty import Faults, FaultySource

    files = {path.name: path.read_bytes() for path in sorted(options.folder.iterdir())}
    names = {f"{BUCKET}/{i:05d}-{name}": data for i in range(options.names) for name, data in files.items()}
    with FaultySource(names, Faults(latency=options.latency)) as source:
        print(source.url, flush=True)
        sys.stdin.read()
        print(f"{source.requests:,} requests, {source.bytes / 1e6:,.1f} MB, {source.most_in_flight} in flight at most")


if __name__ == "__main__":
    main()

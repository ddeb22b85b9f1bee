"""Make the golden files of tests/golden/mirror: what nodes of neighbouring versions have in common.

    python tools/make_golden_mirror.py

It needs etcd, and writes only what is not there: a golden file is never changed as long as PROTOCOL (megablend.mirror.node)
is the same, since nodes of other versions read what it stands for. With another PROTOCOL, delete what differs first. What only
adds something that an older node passes over (a field of JSON, a path of requests) is made anew.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.mirror.layouts import GOLDEN, LAYOUTS, collect


def main() -> None:
    """Write what is missing."""
    GOLDEN.mkdir(exist_ok=True)
    for name, make in LAYOUTS.items():
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_bytes(make())
    if not (GOLDEN / "cluster.json").exists():
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(collect(Path(folder)))
        (GOLDEN / "cluster.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

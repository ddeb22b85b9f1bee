"""More is wanted than there is room for: what fits is held, and nothing is fetched in turns.

MEGABLEND_TEST_SECONDS sets for how long it is looked at.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.mirror.catalog.test_cluster_datasets import keys, services
from tests.mirror.catalog.test_datasets import check_folder, count_sent, make_files
from tests.mirror.etcd import EtcdServer

__all__ = ["keys"]

SECONDS = float(os.environ.get("MEGABLEND_TEST_SECONDS", "60"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("obstore", "keys"),
    pytest.mark.timeout(300 + 2 * SECONDS),
]
ROOM = 30_000_000


def test_wants_of_one_and_a_half_times_the_room(tmp_path: Path, etcd: EtcdServer) -> None:
    """On two nodes that hold all; a third dataset does not fit beside a pinned and an earlier one."""
    share = ROOM // 20
    files = dict[str, bytes]()
    for seed, name in enumerate(("pinned", "first", "second")):
        files |= make_files(name, {f"{i}.bin": share - 50_000 for i in range(10)}, seed)
    with services(tmp_path, files, etcd, 2, size=f"{ROOM}B") as (a, b):
        source = a.source
        revisions = {name: a.add(name, name) for name in ("pinned", "first", "second")}
        listed = count_sent(source)
        pinned = f"pinned@{revisions['pinned']}"
        a.ask("want", pinned, "--copies", "all", "--pin", "--wait")
        path = b.ask("path", pinned)["path"]
        # Beside folders and manifests, the first one has room
        a.ask("want", "first", "--copies", "all", "--wait")
        began = time.monotonic()
        code, message = b.fail("want", "second", "--copies", "all", "--wait")
        assert code == 3
        assert "second@latest does not fit: the mirror is short of " in message
        assert "\nremove other wants with" in message
        held = sum(map(len, files.values())) * 2 // 3
        num_looks = 0
        while time.monotonic() < began + SECONDS:
            for node in (a, b):
                goals = {each["want"]: each for each in node.ask("status")["goals"]}
                assert goals["second@latest"]["short"] > ROOM // 4
                assert goals[pinned[: len("pinned@") + 12]]["missing"] == 0
                assert goals["first@latest"]["missing"] == 0
            assert 0 <= count_sent(source) - listed - held <= 2 * len(files)
            num_looks += 1
            time.sleep(1)
        check_folder(path, files, "pinned")
        told = b.run("status").stdout
        print(told)
        print(
            f"{SECONDS:.0f} s, {num_looks} looks: {count_sent(source) - listed:,} bytes of {held:,} wanted that fit"
        )
        assert "does not fit" in told
        a.ask("unwant", "first")
        done = a.ask("want", "second", "--copies", "all", "--wait")
        assert done["complete"] == 2
        more = count_sent(source) - listed - sum(map(len, files.values()))
        assert 0 <= more <= 2 * len(files)

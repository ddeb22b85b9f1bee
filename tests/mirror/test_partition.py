"""A cluster that is cut in two for a minute, while it reads the source."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.mirror.namespaces import find_obstacle
from tests.mirror.partition import DUE, cut_in_two

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("obstore"), pytest.mark.timeout(700)]
COUNT = 8
APART = 3
FILES = 480
SIZE = 250_000


def test_the_smaller_part_makes_no_view_and_reads_nothing_twice(tmp_path: Path) -> None:
    obstacle = find_obstacle() or (None if shutil.which("etcd") else "etcd is not installed")
    if obstacle is not None:
        pytest.skip(f"no network namespaces here: {obstacle}")
    served = tmp_path / "served"
    served.mkdir()
    draw = random.Random(0)
    for i in range(FILES):
        (served / f"f{i}.bin").write_bytes(draw.randbytes(SIZE))
    (served / DUE).write_bytes(bytes(9))
    found = cut_in_two(
        tmp_path, served, count=COUNT, apart=APART, seconds=60, rate=40_000, lease=15
    )
    larger = found["views"][:-APART]
    smaller = found["views"][-APART:]
    first = larger[0][0][1]
    sent = found["sent"]
    twice = sum(max(0, sent[f"f{i}.bin"] - SIZE) for i in range(FILES))
    print(found["views"])
    print(
        f"of {FILES * SIZE / 1e6:.0f} MB {found['began'] / 1e6:.0f} were read before the cut, "
        f"{found['healing'] / 1e6:.0f} by its end; twice {twice / 1e6:.2f} MB, of them at most {found['only'] / 1e6:.2f} "
        f"that only the smaller part held; in one view after {found['healed']:.1f} s; what was due took {found['due']:.1f} s"
    )
    # It was cut while the source was being read, to the end
    assert found["began"] < found["healing"] < FILES * SIZE
    for seen in larger:
        assert [each[2] for each in seen][:3] == [8, 5, 8]
        assert 10 < seen[1][0] < 30
    for seen in smaller:
        # No other view, before the cut was healed
        assert (seen[0][1], seen[0][2]) == (first, 8)
        assert all(each[0] > 60 for each in seen[1:])
    # Beside what was in flight, and what the larger part does not hold, each byte left the source once
    assert twice <= found["only"] + APART * 4 * SIZE + 4 * COUNT * FILES
    assert found["healed"] <= 10
    assert found["due"] <= 15

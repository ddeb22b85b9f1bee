"""The documents of a run's sources by blocks of the run, where it reads several snapshots of the index."""

from pathlib import Path

import pytest

import megablend
from tests.behaviour.test_new_data import STAGES, entry, later, make_run, tokens_of, write_file

pytestmark = pytest.mark.long


def test_blocks_of_later_snapshots_come_after_those_of_earlier_ones(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    old = megablend.open(config).run.data.parts.copy()
    write_file(tmp_path, 1, "m2", later(1))
    write_file(tmp_path, 2, "a", later(2))
    grown = config | {
        "sources": [*config["sources"], entry(tmp_path, 2, weight=0)],
        "stages": [STAGES[0], STAGES[1] | {"sources": {"s2": {"weight": 1}}}],
    }
    megablend.build_index(grown)
    megablend.amend(grown, at=320)
    run = megablend.open(grown).run
    before = run.data.snapshots[0].parts
    first = run.store.first_blocks[1]
    assert before[:2].tolist() == old.tolist()
    assert run.data.parts["first_block"].min() == first
    blocks = [range(part["first_block"], part["stop_block"]) for part in run.data.parts]
    assert sorted(block for each in blocks for block in each) == list(
        range(first, run.store.snapshot.num_blocks)
    )
    assert len(tokens_of(later(2))) == run.data.parts["tokens"][2]

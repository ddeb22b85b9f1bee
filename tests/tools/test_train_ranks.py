"""The data's state in PyTorch's distributed checkpoints: two ranks save it while they train on, three load it."""

import json
from itertools import islice
from pathlib import Path

import pytest
import train_ranks

import megablend
from tests.runs import documents, make_config, write_source
from tests.torch_ranks import run_ranks


def read_steps(folder: Path, num_ranks: int) -> dict[int, tuple[float, list[str]]]:
    """By step: the mean loss, and the digests of its samples in the order of the ranks."""
    logs = [
        (folder / f"steps-{rank}-of-{num_ranks}.jsonl").read_text(encoding="utf-8").splitlines()
        for rank in range(num_ranks)
    ]
    steps = {}
    for lines in zip(*logs, strict=True):
        entries = [json.loads(line) for line in lines]
        (step,) = {entry["step"] for entry in entries}
        loss = sum(entry["loss"] for entry in entries) / num_ranks
        steps[step] = (loss, [sample for entry in entries for sample in entry["samples"]])
    return steps


def test_three_ranks_go_on_where_two_saved(tmp_path: Path) -> None:
    sources = [
        write_source(tmp_path, d, "parquet", documents(0, 150, 60, seed=d)) | {"weight": 1 + d}
        for d in range(2)
    ]
    config = make_config(tmp_path, sources, samples=240, lanes=12)
    megablend.build(config)
    (tmp_path / "run.json").write_text(json.dumps(config), encoding="utf-8")
    command = [train_ranks.__file__, str(tmp_path / "run.json"), str(tmp_path / "out"), "--steps"]
    run_ranks(2, *command, "8")
    run_ranks(3, *command, "14")
    by_two = read_steps(tmp_path / "out", 2)
    by_three = read_steps(tmp_path / "out", 3)
    whole = megablend.Loader(megablend.open(config), micro_batch_size=train_ranks.STEP_SAMPLES)
    expected = [train_ranks.digest_samples(batch) for batch in islice(whole, 14)]
    assert len({sample for step in expected for sample in step}) == 14 * train_ranks.STEP_SAMPLES
    assert [samples for _, samples in by_two.values()] == expected[:8]
    # Saved after step 5, while steps 6 to 8 were taken
    assert list(by_three) == list(range(6, 15))
    assert [samples for _, samples in by_three.values()] == expected[5:]
    for step in (6, 7, 8):
        assert by_three[step][0] == pytest.approx(by_two[step][0], rel=1e-3)
    assert train_ranks.find_checkpoint(tmp_path / "out") == tmp_path / "out" / "step-10"

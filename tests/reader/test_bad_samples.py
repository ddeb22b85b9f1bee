"""Damaged bytes, and samples that are masked because of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import CorruptFileError, DataError
from megablend.reader import Dataset
from tests.inspect.test_find import make_run


def damage(dataset: Dataset, file: str) -> set[int]:
    """Spoil a block of a file that is open; the samples that draw on it."""
    snapshot = dataset.run.store.snapshot
    number = next(i for i in range(snapshot.num_files) if snapshot.path(i).endswith(file))
    entry = snapshot.files.entry(number)
    block = entry.first_block + entry.num_blocks // 2
    dataset.read_blocks([block])
    row = snapshot.blocks([block])[0]
    with Path(snapshot.path(number)).open("r+b") as data:
        data.seek(int(row["offset"]))
        data.write(b"\xff" * int(row["stored_bytes"]))
    spans = [
        dataset.run.locate_spans(*dataset.run.plan.locate_many([k])) for k in range(len(dataset))
    ]
    return {k for k, each in enumerate(spans) if block in each.blocks.tolist()}


@pytest.mark.parametrize(
    "settings", [{}, {"inter_document_masking": True, "add_extra_token_to_sequence": False}]
)
def test_samples_of_a_damaged_block_are_masked(tmp_path: Path, settings: dict[str, Any]) -> None:
    config, _ = make_run(tmp_path, on_bad_sample="mask", file_checks_per_second=0, **settings)
    dataset = megablend.open(config)
    sound = [dataset[k]["tokens"].tolist() for k in range(200)]
    dataset = megablend.open(config)
    bad = damage(dataset, "source0/0.parquet")
    assert 0 < len(bad) < 100
    loader = megablend.Loader(dataset, micro_batch_size=4)
    with pytest.warns(
        RuntimeWarning,
        match=r"samples of a damaged block are masked: .*source0/0\.parquet at byte [0-9]+",
    ):
        batches = list(loader)
    tokens = [row for batch in batches for row in batch["tokens"].tolist()]
    masks = [row for batch in batches for row in batch["loss_mask"].tolist()]
    for k in range(200):
        if k in bad:
            assert not any(masks[k])
        else:
            assert (tokens[k], any(masks[k])) == (sound[k], True)
    assert loader.stats()["reads"]["masked_samples"] == len(bad)
    alone = [dataset[k] for k in sorted(bad)]  # warned of before
    assert not any(sample["loss_mask"].any() for sample in alone)


def test_otherwise_it_is_an_error(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, file_checks_per_second=0)
    dataset = megablend.open(config)
    bad = damage(dataset, "source0/0.parquet")
    k = min(bad)
    # Not the first sample of the file, whose other blocks are intact
    message = rf"source0/0\.parquet at byte .*needed for sample {k} of train, source 's0'"
    with pytest.raises(CorruptFileError, match=message):
        dataset[k]
    with pytest.raises(CorruptFileError, match=message):
        list(megablend.Loader(dataset, micro_batch_size=4))
    with pytest.raises(CorruptFileError, match=message):
        dataset.__getitems__(list(range(len(dataset))))


def test_files_that_cannot_be_read_are_errors_always(tmp_path: Path) -> None:
    # The read itself meets it
    config, _ = make_run(tmp_path, on_bad_sample="mask", file_checks_per_second=0)
    dataset = megablend.open(config)
    (tmp_path / "source0" / "0.parquet").unlink()
    with pytest.raises(DataError, match=r"0\.parquet.*needed for sample"):
        list(megablend.Loader(dataset, micro_batch_size=4))

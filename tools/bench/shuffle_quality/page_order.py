"""megablend's own order of a corpus, as its plan has it, checked against what its loader gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from strategies import Int64s, Setting

import megablend


def places(
    setting: Setting,
    tokens: npt.NDArray[np.int32],
    path: Path,
    cache: Path,
    *,
    lanes: int,
    order: str,
    seed: int,
) -> Int64s:
    """Where each token of each sample lies in the corpus: int64 [num_samples, sequence_length + 1].

    Args:
        tokens: int32 [num_tokens], the corpus.
        path: the Parquet file that holds it.
        cache: folder of the index, of this order and seed alone.
        order: `page`, or another that the config knows.

    Raises: AssertionError where the loader gives other tokens than lie there.
    """
    config = {
        "cache": str(cache),
        "sequence_length": setting.sequence_length,
        "samples": setting.num_samples,
        "seed": seed,
        "order": order,
        "lanes": lanes,
        "shuffle_window": setting.buffer // lanes,
        "sources": [{"name": "corpus", "path": str(path), "weight": 1}],
    }
    megablend.build(config)
    dataset = megablend.open(config)
    run = dataset.run
    spans = run.locate_spans(*run.plan.locate_many(np.arange(setting.num_samples)))
    firsts = run.store.snapshot.tokens_before[spans.blocks] + spans.starts
    lengths = spans.stops - spans.starts
    before = np.cumsum(lengths) - lengths
    found = np.repeat(firsts - before, lengths) + np.arange(lengths.sum())
    found = found.reshape(setting.num_samples, -1)
    batches = iter(megablend.Loader(dataset, micro_batch_size=setting.batch))
    for batch, expected in zip(
        batches, np.split(found, range(setting.batch, len(found), setting.batch)), strict=False
    ):
        assert np.array_equal(batch["tokens"].numpy(), tokens[expected[:, :-1]])
        assert np.array_equal(batch["labels"].numpy(), tokens[expected[:, 1:]])
    return found

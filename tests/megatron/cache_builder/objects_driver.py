"""Datasets of words in an object store, read in Megatron's own way: by a DataLoader whose workers are forked. Prints a digest.

objects_driver.py CACHE WORKERS WORD ...
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset
from megablend.storage.objects import loop
from tests.megatron.plugin_data import plugin_config


def read_all(cache: Path, workers: int, words: Sequence[str], **settings: Any) -> str:
    """Digest of all samples of the words' documents."""
    blend = (list(words), [1.0] * len(words))
    settings = {"object_storage_cache_path": str(cache / "idx"), **settings}
    config = plugin_config(cache, blend=blend, split="100,0,0", **settings)
    builder: Any = MegablendDatasetBuilder
    train, *_ = builder(MegablendGPTDataset, [40, 0, 0], lambda: True, config).build()
    # In the parent, before workers are forked
    digest = hashlib.sha256(train[0]["tokens"].numpy().tobytes())
    context = "fork" if workers else None
    for batch in DataLoader(
        train, batch_size=4, num_workers=workers, multiprocessing_context=context
    ):
        digest.update(batch["tokens"].numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(read_all(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
    assert not loop.is_used()  # by the parent

"""Small runs over files of every format, for the tests of what stands upon them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.prefetch import samples
from megablend.reader.dataset import Dataset
from megablend.reader.tensors import batch_dict
from megablend.run.run import Run
from megablend.testing.documents import Documents
from tests.formats.writers import KINDS

EOD = 0
STEP = 100_000
"""Source d's tokens are d * STEP + 1, d * STEP + 2, ...: each occurs once, so that what was read can be counted."""


def documents(source: int, num_documents: int, longest: int, seed: int) -> list[list[int] | None]:
    """Documents of distinct tokens; some empty, some null."""
    rng = random.Random(seed * 1000 + source)
    token = source * STEP
    found = list[list[int] | None]()
    for _ in range(num_documents):
        size = rng.choice([0, 1, rng.randrange(longest + 1), rng.randrange(longest + 1)])
        found.append(
            list(range(token + 1, token + size + 1)) if size or rng.random() < 0.5 else None
        )
        token += size
    return found


def write_source(
    folder: Path, source: int, kind: str, listed: Documents, *, num_files: int = 2
) -> dict[str, Any]:
    """The files of one source, and its entry in a config."""
    here = folder / f"source{source}"
    here.mkdir(parents=True)
    cut = -(-len(listed) // num_files)
    for i in range(num_files):
        KINDS[kind].write(here / f"{i}{KINDS[kind].suffix}", listed[i * cut : (i + 1) * cut])
    return {
        "name": f"s{source}",
        "path": f"{here}/*{KINDS[kind].suffix}",
        "column": KINDS[kind].column,
    }


def write_blend(folder: Path, *weights: int) -> list[dict[str, Any]]:
    """Sources of Parquet files with these weights, s0, s1 and so on, below `folder`/data."""
    return [
        write_source(folder / "data", d, "parquet", documents(d, 150, 60, 5)) | {"weight": weight}
        for d, weight in enumerate(weights)
    ]


def make_config(folder: Path, sources: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """A config of these sources; defaults that make many blocks, lanes and cycles out of little data."""
    defaults = {
        "cache": str(folder / "cache"),
        "sequence_length": 8,
        "block_bytes": 64,
        "lanes": 4,
        "shuffle_window": 4,
        "seed": 7,
    }
    return defaults | {"sources": list(sources)} | settings


class ReadSample(NamedTuple):
    """What was read of a sample."""

    source: int
    ordinal: int
    tokens: npt.NDArray[np.int64]
    """The extra one included."""
    extra: dict[str, npt.NDArray[Any]]
    """By extra column, one value per token."""


def read_samples(dataset: Dataset, ks: Sequence[int] | None = None) -> list[ReadSample]:
    """Samples `ks`, or all: as `dataset.sample` reads each, in batches, which takes a thirtieth of the time."""
    found: list[ReadSample] = []
    for run, batch, read in _read_batches(dataset, ks):
        sources, ordinals = run.plan.locate_many(batch)
        tokens = np.concatenate(
            [read.tokens, read.labels[:, read.labels.shape[1] - run.extra_token :]], axis=1
        )
        columns = [
            {name: values[i] for name, values in read.extra.items()} for i in range(len(batch))
        ]
        found += map(ReadSample, sources.tolist(), ordinals.tolist(), tokens, columns)
    return found


def read_fields(dataset: Dataset, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Samples `ks`, or all, as lists: as `dataset` gives each, and a Loader, in batches."""
    found: list[dict[str, Any]] = []
    for run, _, read in _read_batches(dataset, ks):
        found += list_fields(batch_dict(run.settings, read))
    return found


def list_fields(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of a batch, as lists."""
    return [
        dict(zip(batch, row, strict=True))
        for row in zip(*(each.tolist() for each in batch.values()), strict=True)
    ]


def _read_batches(
    dataset: Dataset, ks: Sequence[int] | None
) -> Iterator[tuple[Run, list[int], samples.Samples]]:
    sections = dataset.run.sections
    for section, group in groupby(
        range(len(dataset)) if ks is None else ks, lambda k: next(s for s in sections if k < s.stop)
    ):
        run = dataset.run.view(section)
        listed = list(group)
        for batch in (listed[i : i + 256] for i in range(0, len(listed), 256)):
            yield run, batch, samples.read_samples(run, dataset.block_cache, batch)

"""Show exactly what a sample, or a rank's part of a step, consists of, without a cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.formats.base import DecodedBlock
from megablend.formats.eod import with_eod
from megablend.index.blocks.block_store import BlockStore
from megablend.inspect.text_places import TextPlaces
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.order.base import Spans
from megablend.reader import Dataset
from megablend.run.run import Run
from megablend.run.skips import skips_of
from megablend.storage.base import Storage
from megablend.system.failures import translating
from megablend.text.places import TextPlace


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Piece(Record):
    """A piece of a sample: its tokens that come from one block."""

    file: str
    block: int
    """Number of the block in the index; `export` counts the blocks of each file."""
    byte_offset: int
    """Offset in the file at which the block begins."""
    first_token: int
    stop_token: int
    """The piece is tokens [first_token, stop_token) of the block, counting appended tokens. In the
    result of `find`, these fields count tokens of the sample instead."""
    epoch: int
    texts: tuple[TextPlace, ...] = ()
    """The places of the documents that the tokens belong to, if the source is text."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SampleDescription(Record):
    """The contents of a sample, and the locations where they are stored."""

    sample: int
    split: str
    source: str
    ordinal: int
    """Number of the sample among the samples of its source."""
    epochs: tuple[int, ...]
    """The epochs of the source from which the sample has tokens."""
    pieces: tuple[Piece, ...]
    document_starts: tuple[int, ...]
    """Positions in the sample at which a document begins, or continues from another sample or
    another block; the first is 0."""
    tokens: tuple[int, ...]
    extra: dict[str, tuple[float, ...]]
    """The values of each extra column, by its name, with one value per token."""
    appended: tuple[int, ...] = ()
    """Positions of the tokens that `append_eod` appended, which are not in any file."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepDescription(Record):
    """The samples that a data-parallel rank read at a step."""

    run: str
    split: str
    step: int
    rank: int
    samples: tuple[SampleDescription, ...]


@translating("show")
def show(
    config: ConfigLike,
    sample: int,
    split: str = "train",
    *,
    run: str | None = None,
    cache: str | None = None,
    storage: Storage | None = None,
) -> SampleDescription:
    """Show what a sample contains and where it comes from.

    Args:
        config: a config, or a cache's folder; `run` is needed with the latter. If the config has
            been edited since the build, the run's ledger applies.
        run: name of a run of the cache, instead of the config's.
        cache: cache folder, instead of the config's `cache`.
        storage: the storage that reads files, instead of the config's storage.

    Raises: the same errors as `open_dataset`; ConfigError if the run does not have the sample.
    """
    dataset = Dataset(Session(config, cache=cache, run=run, storage=storage).open(split))
    sample = whole_number("sample", sample)
    num_samples = dataset.run.num_samples
    if not 0 <= sample < num_samples:
        raise ConfigError(
            f"found sample {sample}, expected 0 to {num_samples - 1}: {split} has {num_samples:,} samples"
        )
    return _describe_sample(dataset, sample)


@translating("show")
def show_step(
    config: ConfigLike,
    step: int,
    *,
    micro_batch_size: int,
    rank: int = 0,
    data_parallel_size: int = 1,
    global_batch_size: int | None = None,
    split: str = "train",
    run: str | None = None,
    cache: str | None = None,
    storage: Storage | None = None,
) -> StepDescription:
    """Show what a data-parallel rank read at a step.

    A step is `global_batch_size` samples (by default one micro step, micro_batch_size *
    data_parallel_size), which are assigned to ranks as PretrainingSampler and Megatron do. If the
    batch size changes during a run, steps cannot be numbered in this way: show samples instead.

    Args:
        config, run, cache, storage: as for `show`.

    Raises: the errors of `show`; ConfigError if the rank or the step does not exist, or a step is
        not a multiple of a micro step.
    """
    dataset = Dataset(Session(config, cache=cache, run=run, storage=storage).open(split))
    skips = skips_of(dataset.run)
    micro_batch_size = whole_number("micro_batch_size", micro_batch_size, least=1)
    size = whole_number("data_parallel_size", data_parallel_size, least=1)
    rank = whole_number("rank", rank)
    micro_step = micro_batch_size * size
    if global_batch_size is None:
        global_batch_size = micro_step
    batch = whole_number("global_batch_size", global_batch_size, least=1)
    if not 0 <= rank < size:
        raise ConfigError(
            f"found rank {rank}, expected 0 to {size - 1}: there are {size} data-parallel ranks"
        )
    if batch % micro_step:
        raise ConfigError(
            f"found a global batch of {batch} samples, expected a multiple of micro batch {micro_batch_size} x {size} ranks = "
            f"{micro_step}"
        )
    step = _check_step(step, batch, skips.count_trained(dataset.run.num_samples), dataset)
    first = step * batch + rank * micro_batch_size
    # Numbers of samples that count trained samples only: skipped ones are left out
    trained_numbers = [
        number
        for start in range(first, (step + 1) * batch, micro_step)
        for number in range(start, start + micro_batch_size)
    ]
    return StepDescription(
        run=dataset.run.ledger.run,
        split=split,
        step=step,
        rank=rank,
        samples=tuple(
            _describe_sample(dataset, skips.position(number)) for number in trained_numbers
        ),
    )


def _check_step(step: int, batch: int, num_trained: int, dataset: Dataset) -> int:
    """Check that a training step exists, and return its number. Raises: ConfigError if not.

    Args:
        num_trained: number of samples that the run does not skip.
    """
    split = dataset.run.split
    num_steps = num_trained // batch
    if num_steps == 0:
        raise ConfigError(
            f"a step of {batch:,} samples is larger than {split}, which has {num_trained:,} samples that are not "
            "skipped; choose a smaller batch size"
        )
    step = whole_number("step", step)
    if not 0 <= step < num_steps:
        raise ConfigError(
            f"found step {step}, expected 0 to {num_steps - 1}: {split} has {dataset.run.num_samples:,} samples, {batch:,} per "
            "step"
        )
    return step


def _describe_sample(dataset: Dataset, number: int) -> SampleDescription:
    """Describe a sample of a dataset, given its number."""
    sample = dataset.sample(number)
    source = dataset.run.sources[sample.source]
    extra = dict[str, tuple[float, ...]]()
    for name, numbers in sample.extra.items():
        extra[name] = tuple(numbers.tolist())
    return SampleDescription(
        sample=number,
        split=dataset.run.split,
        source=source.name,
        ordinal=sample.ordinal,
        epochs=tuple(np.unique(sample.spans.epochs).tolist()),
        pieces=tuple(_list_pieces(dataset.run, sample.spans)),
        document_starts=tuple(sample.starts.tolist()),
        tokens=tuple(sample.tokens.tolist()),
        extra=extra,
        appended=_find_appended(dataset.run.store, source.append_eod, sample.spans),
    )


def _list_pieces(run: Run, spans: Spans) -> list[Piece]:
    """Return a piece for each of a sample's spans."""
    snapshot = run.store.snapshot
    texts = TextPlaces(run)
    files = snapshot.file_of(spans.blocks).tolist()
    offsets = snapshot.blocks(spans.blocks)["offset"].tolist()
    pieces = []
    for file, offset, epoch, block, start, stop in zip(
        files,
        offsets,
        spans.epochs.tolist(),
        spans.blocks.tolist(),
        spans.starts.tolist(),
        spans.stops.tolist(),
        strict=True,
    ):
        path = snapshot.path(file, run.store.roots)
        pieces.append(
            Piece(
                file=path,
                block=block,
                byte_offset=offset,
                first_token=start,
                stop_token=stop,
                epoch=epoch,
                texts=texts.list_documents(path, block, start, stop),
            )
        )
    return pieces


def _find_appended(store: BlockStore, append_eod: int | None, spans: Spans) -> tuple[int, ...]:
    """Return the positions of a sample's appended tokens. They are found from the documents of the
    blocks, since a file may contain the same token id. None are found in blocks that were
    replaced."""
    if append_eod is None or store.damaged.intersection(spans.blocks.tolist()):
        return ()
    offsets, _ = store.pieces(spans.blocks)
    flags = store.snapshot.blocks(spans.blocks)["flags"].tolist()
    # In blocks of zeros, the tokens that are appended are 1
    marks = []
    for block, block_offsets in enumerate(offsets):
        zeros = DecodedBlock(np.zeros(block_offsets[-1], np.int32), block_offsets)
        marked = with_eod(zeros, flags[block], 1).tokens
        marks.append(marked[spans.starts[block] : spans.stops[block]])
    return tuple(np.flatnonzero(np.concatenate(marks)).tolist())

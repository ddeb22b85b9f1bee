"""The results of `describe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megablend.operations.drains import Drain
from megablend.operations.manage_runs import DamagedRun, RunSummary
from megablend.operations.results import Record
from megablend.operations.skip import SkippedSamples
from megablend.storage.transfer import Transfer

if TYPE_CHECKING:
    from megablend.prefetch.estimate_mirror import MirrorEstimate


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FirstRepeat(Record):
    """The first source that begins a second epoch, by the number of its samples. Samples of both
    epochs may be mixed about there, to within a cycle."""

    source: str
    sample: int
    """Number of the sample with which the source begins to have more samples than its first epoch
    has."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SourceDescription(Record):
    """A source of one split, and how much of it the run reads, according to the config, the index
    and the plan."""

    OLD_KEYS: ClassVar[Mapping[str, str]] = {
        "share_wanted": "requested_share",
        "share_given": "actual_share",
        "unread_tokens_of_last_epoch": "tokens_left_in_epoch",
    }
    name: str
    blocks: int
    documents: int
    tokens: int
    """Number of tokens of the source in this split, in one epoch."""
    requested_share: float
    """The fraction of the samples that the config requests for the source."""
    actual_share: float
    """The fraction of the run's samples that come from the source."""
    samples: int
    """Number of the run's samples that come from the source."""
    epochs: float
    """The number of times that the source's tokens are read."""
    max_epochs: float | None
    """The limit on `epochs` that the config sets; None if it sets none."""
    tokens_left_in_epoch: int
    """Number of tokens of the source's last epoch that the run does not reach."""
    tokens_read: int
    """Number of the source's tokens that the run reads, over all epochs."""
    stored_bytes: int
    """Stored size of the source's blocks in this split, in bytes. If there are many blocks, it is
    estimated from a part of them."""
    max_tokens: int | None
    """The limit on `tokens_read` that the config sets; None if it sets none."""
    most_samples: int | None
    """Maximum number of samples that the source's limits allow; None if it has no limits."""
    first_sample: int | None
    """Number of the source's first sample in the run; None if the source has no samples."""
    last_sample: int | None
    """Number of the source's last sample in the run; None if the source has no samples."""
    epoch_ends: tuple[int, ...]
    """The sample at which each of the first 32 epochs ends, by count: up to this sample, the source
    has as many samples as there are in the epochs up to this one. Within the same cycle (lanes *
    shuffle_window samples), samples of the epoch may come later, and samples of the next epoch
    earlier."""
    worst_prefix_error: float
    """Largest difference, in samples, between the number of the source's samples and its share of a
    prefix of a stage. All prefixes of up to 65,536 samples are compared."""
    withdrawn_tokens: int | None = None
    """Number of tokens that are not read because their files were withdrawn during an epoch; None
    if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageSource(Record):
    """A source in one stage of a run."""

    name: str
    share: float
    """The planned fraction of the stage's samples."""
    actual_share: float
    """The fraction of the stage's samples that come from the source."""
    samples: int
    tokens: int
    """Number of the source's tokens that the stage reads."""
    first_sample: int | None
    """Number of the source's first sample in the stage, counted from the start of the run; None if
    the source has no samples in the stage."""
    last_sample: int | None
    """Number of the source's last sample in the stage, counted from the start of the run; None if
    the source has no samples in the stage."""
    worst_prefix_error: float
    """Largest difference between the source's samples and its share; see `SourceDescription`."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageDescription(Record):
    """One stage of a run: samples [start, stop)."""

    start: int
    stop: int
    sequence_length: int
    lanes: int
    sources: tuple[StageSource, ...]
    drain: Drain | None = None
    """The first samples that continue the previous stage; None if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SplitDescription(Record):
    """The samples, sources and stages of one split of a run."""

    OLD_KEYS: ClassVar[Mapping[str, str]] = {"first_to_run_out": "first_repeated_source"}
    samples: int
    tokens: int
    blended: bool
    """Whether sources are mixed by share; otherwise the split is one pass over each source."""
    first_repeated_source: FirstRepeat | None
    """The first source that begins a second epoch; None if no source has as many samples as its
    first epoch has."""
    sources: tuple[SourceDescription, ...]
    problem: str | None = None
    """The reason why the split cannot be planned, so that it has no samples; None if it can be
    planned."""
    steps: int | None = None
    """Number of micro steps of all ranks together, if `micro_batch_size` was given."""
    stages: tuple[StageDescription, ...] | None = None
    """The split's stages; None if the split has only one stage."""
    sources_left_out: int | None = None
    """Number of sources that `select_sources` left out; None if it left out none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class IndexedSource(Record):
    """A source as the index describes it."""

    name: str
    format: str | None
    """Name of the format; None if an older release did not record it."""
    column: str | None
    """Column that the config names; None if the config names no column."""
    column_taken: str | None
    """Column that the tokens are read from; None if the format has no columns."""
    skipped: tuple[str, ...]
    """Files that were left out because they cannot be read (`on_unreadable: skip`)."""
    files: int
    blocks: int
    rows: int
    tokens: int
    document_table_bytes: int | None
    """Size of the table of the source's documents; None if there is none."""
    extra_columns: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class IndexDescription(Record):
    """An index of a cache, or all indexes of a run together, with sums over the sources. A file
    that several indexes contain unchanged counts once."""

    digest: str
    index_bytes: int
    files: int
    blocks: int
    rows: int
    tokens: int
    sources: tuple[IndexedSource, ...]
    sources_left_out: int | None = None
    """Number of sources that `select_sources` left out; None if it left out none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DamagedIndex(Record):
    """An index that cannot be opened."""

    digest: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BadDocuments(Record):
    """The documents of a source of text that were left out for one reason
    (`on_bad_document: skip`)."""

    source: str
    kind: str
    """The reason; see docs/text.md."""
    count: int
    """Number of documents."""
    first: tuple[str, ...]
    """A text for each of the first few documents, with its path, its place in the file, and the
    reason."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunDescription(Record):
    """A description of what a run reads, or would read if it were built."""

    cache: str
    run: str
    order: str
    sequence_length: int
    committed: bool
    """Whether `build` has committed the run as described."""
    note: str | None
    """The difference between the description and what is committed, and what to do; None if they
    agree."""
    plan: str
    """Digest of the run's plan."""
    stages: tuple[int, ...]
    """Sample numbers at which the stages end."""
    skips: tuple[SkippedSamples, ...]
    """Ranges of samples that the run skips."""
    lanes: int
    index: IndexDescription
    splits: dict[str, SplitDescription]
    """The splits by name: train, valid, test."""
    problems: tuple[str, ...]
    """Data files that are missing or changed, one line each."""
    warnings: tuple[str, ...]
    """Properties of the plan that should be checked, one line each."""
    read_amplification: float | None = None
    """Number of bytes that loaders read for each byte that they use, if `micro_batch_size` was
    given."""
    transfer: Transfer | None = None
    """The requests to object stores that the given loaders (by default one loader) make to read
    train; None if all files are local, or a file cannot be opened."""
    mirror: MirrorEstimate | None = None
    """The estimated transfers if train is read through a mirror on each node; set if `num_nodes` or
    `mirror_size` was given."""
    bad_documents: tuple[BadDocuments, ...] | None = None
    """Documents that the last build left out; None if there are none."""
    fitting_lanes: int | None = None
    """The smallest number of lanes that suits the loaders and is not below that of the config, if
    `micro_batch_size` was given."""
    memory_per_rank: int | None = None
    """Minimum memory of the loaders of a rank, in bytes, if `micro_batch_size` was given."""
    memory_limit_per_rank: int | None = None
    """Memory that the config's `memory` allows the loaders of a rank, in bytes, if
    `micro_batch_size` was given."""
    fitting_unit: int | None = None
    """A number that must be a multiple of the step size (micro batch x ranks), since the length or
    the masks of samples can change only between steps. None if they do not change, or
    `micro_batch_size` was not given."""

    def __str__(self) -> str:
        """Return the description as `print` shows it: problems and warnings, then a line for each
        split and each of its sources."""
        lines = [f"warning: {problem}" for problem in (*self.problems, *self.warnings)]
        lines.append(f"run {self.run!r}: samples of {self.sequence_length:,} tokens")
        for name, split in self.splits.items():
            lines.append(f"{name}: {split.samples:,} samples, {split.tokens:,} tokens")
            lines += [
                f"  {source.name}: {source.actual_share:.2%}, {source.tokens_read:,} tokens, {source.epochs:,.2f} epochs"
                for source in split.sources
            ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SourceFiles(Record):
    """The number and size of the files of a source that is not indexed yet."""

    name: str
    format: str | None
    files: int
    """Number of files."""
    bytes: int
    """Total size of the files."""
    share: dict[str, float | str] | None
    """The share that the config requests, as a dict from the key in the config, such as `weight`,
    to the number (or `size`); None if the config gives no share."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FilesDescription(Record):
    """A description of a run whose sources are not indexed yet, so that only their files are
    known."""

    cache: str
    run: str
    order: str
    sequence_length: int
    committed: bool
    """Always False."""
    note: str
    """The reason why token counts are not known, and what to do."""
    files: tuple[SourceFiles, ...]
    sources_left_out: int | None = None
    """Number of sources that `select_sources` left out; None if it left out none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheDescription(Record):
    """The indexes and runs of a cache."""

    cache: str
    indices: tuple[IndexDescription | DamagedIndex, ...]
    """The indexes, from the oldest to the newest."""
    runs: tuple[RunSummary | DamagedRun, ...]


Description = RunDescription | FilesDescription | CacheDescription

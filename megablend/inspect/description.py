"""What `describe` returns."""

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
    """The first source that begins a second epoch."""

    source: str
    sample: int
    """Number of the first sample of its second epoch."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SourceDescription(Record):
    """A source of one split, and how much of it the run reads: from config, index and plan."""

    OLD_KEYS: ClassVar[Mapping[str, str]] = {
        "share_wanted": "requested_share",
        "share_given": "actual_share",
        "unread_tokens_of_last_epoch": "tokens_left_in_epoch",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"document_lengths", "withdrawn_tokens"})
    name: str
    blocks: int
    documents: int
    tokens: int
    """Tokens of the source in this split, in one epoch."""
    requested_share: float
    """Fraction of the samples that the config requests."""
    actual_share: float
    """Fraction of the samples that the source has in the run."""
    samples: int
    epochs: float
    """How many times its tokens are read."""
    max_epochs: float | None
    """The limit that the config sets."""
    tokens_left_in_epoch: int
    """Tokens of its last epoch that the run does not reach."""
    tokens_read: int
    """Tokens that the run reads, over all epochs."""
    stored_bytes: int
    """Size of its blocks in this split as they are stored; of many blocks an estimate from some of
    them."""
    max_tokens: int | None
    """The limit that the config sets."""
    most_samples: int | None
    """Samples that its limits allow; None where it has none."""
    first_sample: int | None
    """Number of its first sample in the run; None where it has none."""
    last_sample: int | None
    epoch_ends: tuple[int, ...]
    """Numbers of the samples with which it has given an epoch's worth of samples; at most the first
    32. Those of the epoch that are still unread then, and those of the next one that were read
        before, are of one cycle (lanes * shuffle_window)."""
    worst_prefix_error: float
    """Largest distance from its share, in samples, over the prefixes of each stage that end in its
    first 65,536 samples."""
    document_lengths: tuple[int, ...] | None = None
    """Documents by length, where requested and known to the index: [0] of no token, [i] of 2^(i-1)
    to 2^i - 1 tokens."""
    withdrawn_tokens: int | None = None
    """Tokens of epochs that were begun which are not read, since their files were withdrawn; None
    where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageSource(Record):
    """A source in one stage of a run."""

    name: str
    share: float
    """Fraction of the stage's samples that the stage plans."""
    actual_share: float
    samples: int
    tokens: int
    """Tokens that the stage reads of it."""
    first_sample: int | None
    """Number of its first sample in the stage, counted from the start of the run; None where it has
    none."""
    last_sample: int | None
    worst_prefix_error: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageDescription(Record):
    """One stage of a run: samples [start, stop)."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"drain"})
    start: int
    stop: int
    sequence_length: int
    lanes: int
    sources: tuple[StageSource, ...]
    drain: Drain | None = None
    """What of it continues the stage before; None if nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SplitDescription(Record):
    """What one split of a run reads."""

    OLD_KEYS: ClassVar[Mapping[str, str]] = {"first_to_run_out": "first_repeated_source"}
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        {"problem", "steps", "stages", "sources_left_out"}
    )
    samples: int
    tokens: int
    blended: bool
    """Whether sources are mixed by share; otherwise the split is one pass over each."""
    first_repeated_source: FirstRepeat | None
    """None where no source begins a second epoch."""
    sources: tuple[SourceDescription, ...]
    problem: str | None = None
    """Why the split cannot be planned; it then has no samples."""
    steps: int | None = None
    """Micro steps of all ranks together, where `micro_batch_size` was given."""
    stages: tuple[StageDescription, ...] | None = None
    """None where the split has only one."""
    sources_left_out: int | None = None
    """Sources that `select_sources` left out; None if all are there."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class IndexedSource(Record):
    """A source as it was indexed: from the index alone."""

    name: str
    format: str | None
    """None where an older release did not record it."""
    column: str | None
    """Column that the config named."""
    column_taken: str | None
    """Column that the tokens are read from; None where the format has no columns."""
    skipped: tuple[str, ...]
    """Files left out because they cannot be read (`on_unreadable: skip`)."""
    files: int
    blocks: int
    rows: int
    tokens: int
    document_table_bytes: int | None
    """Size of its table of documents; None where it has none."""
    extra_columns: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class IndexDescription(Record):
    """An index of a cache, or those of a run as one, with sums over its sources: of several
    indexes a file that did not change counts once."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"sources_left_out"})
    digest: str
    index_bytes: int
    files: int
    blocks: int
    rows: int
    tokens: int
    sources: tuple[IndexedSource, ...]
    sources_left_out: int | None = None
    """Sources that `select_sources` left out; None if all are there."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DamagedIndex(Record):
    """An index that cannot be opened."""

    digest: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BadDocuments(Record):
    """Documents of a source of text that were left out for one reason
    (`on_bad_document: skip`)."""

    source: str
    kind: str
    """See docs/text.md."""
    count: int
    first: tuple[str, ...]
    """Path, place and reason of the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunDescription(Record):
    """What a run reads, or would read."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        {
            "read_amplification",
            "fitting_lanes",
            "memory_per_rank",
            "memory_limit_per_rank",
            "most_lanes",
            "fitting_unit",
            "full_share_stages",
            "transfer",
            "mirror",
            "bad_documents",
        }
    )
    cache: str
    run: str
    order: str
    sequence_length: int
    committed: bool
    """Whether `build` has committed the run as described."""
    note: str | None
    """How the description differs from what is committed, and what to do; None where it does
    not."""
    plan: str
    """Digest of the run's plan."""
    stages: tuple[int, ...]
    """Sample numbers at which its stages end."""
    skips: tuple[SkippedSamples, ...]
    """Ranges of samples that the run skips."""
    lanes: int
    index: IndexDescription
    splits: dict[str, SplitDescription]
    """The splits by name: train, valid, test."""
    problems: tuple[str, ...]
    """Data files that are missing or changed, one line each."""
    warnings: tuple[str, ...]
    """Numbers of the plan that deserve a second look."""
    opening_seconds: float
    """Time to open train in this process, apart from imports and compiled kernels."""
    full_share_stages: str | None = None
    """YAML of `stages` in which sources keep their shares until they run out, where
    `on_exhausted: redistribute` changes them."""
    read_amplification: float | None = None
    """Bytes that loaders read for each byte that they use, where `micro_batch_size` was given."""
    transfer: Transfer | None = None
    """What the described loaders, or one, will request of object stores to read train; None where
    all files are local, or one cannot be opened."""
    mirror: MirrorEstimate | None = None
    """What reading train takes through a mirror on each node, where `num_nodes` or `mirror_size`
    was given."""
    bad_documents: tuple[BadDocuments, ...] | None = None
    """Documents that the last build left out; None if there are none."""
    fitting_lanes: int | None = None
    """Least number of lanes, from the config's on, that suits the loaders, where `micro_batch_size`
    was given."""
    memory_per_rank: int | None = None
    """Bytes that the loaders of a rank need at least, where `micro_batch_size` was given."""
    memory_limit_per_rank: int | None = None
    """Bytes that `memory` allows them, where `micro_batch_size` was given."""
    most_lanes: int | None = None
    """The most lanes that suit the loaders and fit in `memory`; None also where memory does not
    depend on lanes."""
    fitting_unit: int | None = None
    """Steps (micro batch x ranks) must divide it, since the length or the masks of samples change
    between steps only, where `micro_batch_size` was given; None if they do not change."""

    def __str__(self) -> str:
        """What deserves a look, then a line for each split and each of its sources: for `print`."""
        lines = [f"warning: {each}" for each in (*self.problems, *self.warnings)]
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
    """The files of a source that is not indexed yet: from the config and a listing."""

    name: str
    format: str | None
    files: int
    bytes: int
    share: dict[str, float | str] | None
    """The share that the config requests: its unit, and the number as written, or `size`."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FilesDescription(Record):
    """What is known of a run whose sources are not indexed yet."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"sources_left_out"})
    cache: str
    run: str
    order: str
    sequence_length: int
    committed: bool
    """Always False."""
    note: str
    """What is missing, and what to do."""
    files: tuple[SourceFiles, ...]
    sources_left_out: int | None = None
    """Sources that `select_sources` left out; None if all are there."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheDescription(Record):
    """What a cache holds."""

    cache: str
    indices: tuple[IndexDescription | DamagedIndex, ...]
    """The oldest first."""
    runs: tuple[RunSummary | DamagedRun, ...]


Description = RunDescription | FilesDescription | CacheDescription

"""The keys of a config: frozen models, validated on construction. Numbers are exact: 0.1 is
1/10."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, field_validator

from megablend.config.other_names import explain_mapping
from megablend.config.source import Model, Source
from megablend.config.stages import StageSettings
from megablend.config.values import (
    Count,
    Number,
    Objects,
    OrderName,
    PathText,
    Positive,
    Split,
    Temperature,
    Token,
    VocabSize,
)
from megablend.storage.object_options import ObjectOptions
from megablend.storage.settings import Size

LENGTHS = ("samples", "tokens", "epochs")
"""Units of the length of the run, at the top level of the config."""
SPLITS = ("train", "valid", "test")
EOD_MASKS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Mask settings that take effect at end-of-document tokens."""
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of a run's name, which is also a file name."""
MAX_RUN_NAME = 100
OLD_KEYS = {"cycle": "shuffle_window"}
"""Keys of release 0.1.0 that have a new name; configs that use the old name remain valid."""


class Warnings(Model):
    """Thresholds at which `build` and `describe` warn; null disables a warning."""

    max_epochs: Positive | None = Fraction(16)
    """Warn if a source without its own max_epochs is read more often than this."""
    min_source_samples: Count | None = 1
    """Warn if a source in use contains fewer samples than this."""
    max_read_amplification: Positive | None = Fraction(6, 5)
    """Warn if loaders read more than this multiple of the bytes that they use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The settings of the masks and positions that the dict of a sample contains."""

    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    inter_document_masking: bool = False
    eod: int | None = None
    """The end-of-document token that masks act on."""

    @property
    def needs_eod(self) -> bool:
        """Whether a mask acts on end-of-document tokens."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class Settings(Model):
    """The keys of a config: the data of a run, its blend, its samples, and how they are read. Each
    key is validated by itself; `Config` checks their combinations."""

    cache: PathText
    """Location of the index: a folder that all ranks can access, or a prefix of an object store
    (s3://bucket/caches/name); created by `build`."""
    local_cache: PathText | None = None
    """Folder on each node's local disk for its copy of a `cache` in an object store; if null,
    MEGABLEND_LOCAL_CACHE or a folder in ~/.cache."""
    run: Annotated[str, Field(max_length=MAX_RUN_NAME, pattern=RUN_NAME)] = "default"
    """Name of the run's ledger. The past of a run never changes; another name starts a new run on
    the same cache."""
    sequence_length: Count
    """Tokens per sample."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 1234
    samples: Count | None = None
    """Length of train in samples; set this, `tokens` or `epochs`."""
    tokens: Count | None = None
    """Length of train in tokens."""
    epochs: Positive | None = None
    """Length of train in passes over the tokens of all its sources."""
    on_exhausted: Literal["error", "redistribute"] = "error"
    """What to do if a source's share exceeds its max_epochs or max_tokens: `error` refuses the
    blend; `redistribute` reads the source up to its cap and gives the rest to the other sources, by
    their weights. A source without a cap is repeated."""
    temperature: Temperature | None = None
    """Weights are raised to the power 1 / temperature: above 1, small sources get more. Usually
    used with `weight: size`."""
    valid_samples: Count | None = None
    """Length of a blended validation split; if absent, validation is one unblended pass."""
    test_samples: Count | None = None
    """Length of a blended test split; if absent, test is one unblended pass."""
    split: Split | None = None
    """Shares of the documents in train, valid and test, such as 95,5,0. If absent, all are in
    train."""
    order: OrderName = "block"
    """The arrangement of a source's samples: `block` (shuffled blocks), `document` (shuffled
    documents) or `sequential`."""
    interleaving: str = "lanes"
    """The way in which the samples of the sources alternate: a name from
    megablend.blend.interleavings.registry."""
    lanes: Annotated[int, Field(ge=1, le=2**20, strict=True)] = 8
    """Number of independent streams (K), comparable to MosaicML's num_canonical_nodes. It should be
    a multiple of micro batch x data-parallel size (x loader workers)."""
    shuffle_window: Annotated[int, Field(ge=1, le=2**20, strict=True)] = Field(
        64, validation_alias=AliasChoices("shuffle_window", *OLD_KEYS)
    )
    """Samples per lane that are shuffled together."""
    sources: dict[Literal["train", "valid", "test"], tuple[Source, ...]]
    """One list of sources, which is divided into the splits, or a list for each of train, valid and
    test."""
    stages: tuple[StageSettings, ...] = ()
    """The whole history of train, stage by stage: the end of each stage and its changes; see
    docs/stages.md."""
    on_bad_sample: Literal["raise", "mask"] = "raise"
    """What to do with samples whose bytes are damaged, according to a checksum or in decoding:
    `raise` an error, or `mask`, which gives zeros for the damaged block, sets the loss mask of its
    samples to 0 and warns. Files that cannot be read, or were replaced, are always errors."""
    on_unreadable: Literal["error", "skip"] = "error"
    """What to do with folders and files without read permission, and with dangling symbolic links,
    that match the patterns: raise an `error`, or `skip` them; `build` and `describe` report what is
    skipped."""
    block_bytes: Count = 1 << 20
    """Approximate size of a block of a Megatron `.bin`."""
    memory: Size = 512 << 20
    """Maximum bytes that a process (a rank, or each of its loader's workers) uses for reading a
    split; see megablend.prefetch.memory_budget."""
    file_checks_per_second: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    """Number of files per second that the loader of a rank checks in the background, to find those
    that were removed or changed; 0 disables the check."""
    direct_io: bool = False
    """Read blocks with O_DIRECT, bypassing the page cache."""
    storage: Objects = ObjectOptions()
    """Object stores and web servers: URL prefixes, each with its settings (endpoint, region,
    ...)."""
    warnings: Warnings = Warnings()
    add_extra_token_to_sequence: bool = True
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    inter_document_masking: bool = False
    """Whether to provide cu_seqlens and max_seqlen, and restart position_ids at each document;
    cannot be combined with an attention mask."""
    vocab_size: VocabSize | None = None
    """Vocabulary size, or the path of a tokenizer.json that defines it: `check --data` refuses ids
    that are not less than it."""
    eod_token: Token | None = None
    """Token that the three masks above act on; by default the sources' append_eod, if all have the
    same."""
    tokenizer: PathText | None = None
    """The tokenizer of text sources: a tokenizer.json, a folder that has one, or the name of a
    model in the local Hugging Face cache."""
    token_files: PathText | None = None
    """Folder, or prefix of an object store, for the tokens of text; by default `tokens` in the
    cache."""
    on_bad_document: Literal["error", "skip"] = "error"
    """What `build` does with documents of text that cannot be read: invalid JSON, not text, invalid
    Unicode, or longer than max_document."""
    max_bad: Number = Fraction(1, 1000)
    """Share of a source's documents that `on_bad_document: skip` may leave out."""
    max_document: Size | None = None
    """Maximum length of a line (or of a text in a table). The default is 64 MiB, or 16 MiB for
    tokenizers that only the `tokenizers` library knows, since it needs 117 bytes of memory for each
    byte."""

    @field_validator("sources", mode="before")
    @classmethod
    def _one_list_or_three(cls, value: object) -> object:
        """Accept one list of sources, or a list for each split."""
        if isinstance(value, (list, tuple)):
            return {"train": value}
        if not isinstance(value, Mapping):
            raise ValueError(
                f"found {value!r}, expected a list of sources, or a list for each of train, valid, test"
            )
        if not value.keys() <= set(SPLITS) and not any(
            isinstance(shares, (list, tuple)) for shares in value.values()
        ):
            raise ValueError(explain_mapping(value, Source.model_fields))
        return value

    @property
    def appended_eods(self) -> set[int | None]:
        """The end-of-document tokens that sources append to documents; None stands for sources that
        append none."""
        return {source.append_eod for sources in self.sources.values() for source in sources}

    @property
    def masks(self) -> Masks:
        """The mask settings, with the end-of-document token that masks act on: `eod_token`, or the
        token that all sources append."""
        eod = self.eod_token
        if eod is None:
            appended = self.appended_eods
            if len(appended) == 1:
                (eod,) = appended
        return Masks(
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_mask_loss=self.eod_mask_loss,
            create_attention_mask=self.create_attention_mask,
            inter_document_masking=self.inter_document_masking,
            eod=eod,
        )

    @property
    def shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """Shares of train, valid and test in the documents of the sources listed for train."""
        return self.split or (Fraction(1), Fraction(0), Fraction(0))

    @property
    def listed_by_split(self) -> bool:
        """Whether each split has its own sources; otherwise all splits are parts
        of the sources of train."""
        return set(self.sources) != {"train"}

    def has_split(self, split: str) -> bool:
        """Return whether a split has sources."""
        if self.listed_by_split:
            return any(listed for name, listed in self.sources.items() if name == split)
        return self.shares[SPLITS.index(split)] > 0

    def sources_of(self, split: str) -> dict[str, Source]:
        """Return the sources of a split, by their names in the index."""
        if not self.listed_by_split:
            return {source.name: source for source in self.sources["train"]}
        return {
            f"{name}/{s.name}": s
            for name, listed in self.sources.items()
            if name == split
            for s in listed
        }

    @property
    def all_sources(self) -> dict[str, Source]:
        """The sources of all splits, by their names in the index."""
        if not self.listed_by_split:
            return self.sources_of("train")
        return {name: source for split in SPLITS for name, source in self.sources_of(split).items()}

    def is_blended(self, split: str) -> bool:
        """Return whether a split is a blend, arranged by `order`; otherwise it is one pass over its
        sources as stored."""
        return split == "train" or getattr(self, f"{split}_samples") is not None

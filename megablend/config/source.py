"""A source of a config: its files, and its share of the blend."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from megablend.config.read_spec import OptionValue
from megablend.config.values import (
    Count,
    Documents,
    Number,
    Option,
    Positive,
    Token,
    VocabSize,
    Weight,
    parse_path,
)

UNITS = ("weight", "tokens", "samples", "epochs")
"""Units of a source's share; all sources of a blend use the same one."""


class Model(BaseModel):
    """Base class of the parts of a config. Instances are frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True
    )

    def list_given(self, names: Sequence[str]) -> list[str]:
        """Return those of the keys `names` that have a value other than null."""
        return [name for name in names if getattr(self, name) is not None]


class Share(Model):
    """How much of a source is read: its share, in one of UNITS, and its caps."""

    weight: Weight | None = None
    """Share of the samples, relative to the other sources' weights; `size` stands for the source's
    number of tokens in the split."""
    tokens: Number | None = None
    """Share given as tokens."""
    samples: Number | None = None
    """Share given as samples."""
    epochs: Number | None = None
    """Share given as passes over the source's documents in the split."""
    max_epochs: Positive | None = None
    """Cap: the number of times that the source may be read; see `on_exhausted`."""
    max_tokens: Count | None = None
    """Cap: the number of tokens of the source that may be read, over all its epochs; the smaller
    cap counts."""


class Source(Share):
    """Files that are read as one dataset, and its share of the blend.

    A key that cannot change which tokens a sample has belongs in OUTSIDE_REQUEST of
    megablend.config.model; any other key changes Config.request_digest if it is set.
    """

    name: Annotated[str, Field(pattern=r"^[^\s/]+$")]
    """Name of the source, unique among the sources of a split."""
    path: tuple[str, ...]
    """Files, globs (`**` too) or Megatron prefixes."""
    format: Annotated[str, Field(min_length=1)] | None = None
    """Format of the files: `parquet`, `arrow`, `arrow-stream`, `megatron`, `raw`, or one that
    another package adds. If absent, it is determined by the suffix of the file names."""
    format_options: dict[str, Option] = {}
    """Options of the format, such as `dtype`; each format's documentation lists its own."""
    column: str | None = None
    """Token column of Parquet and Arrow files; dotted path for nested ones. If absent, the only
    plausible column is used; see megablend.formats.choose."""
    append_eod: Token | None = None
    """End-of-document token appended on reading to each document that has tokens."""
    documents: Documents | None = None
    """The extent of a document in a flat column: `file`, `row_group` (a record batch of Arrow
    files), or `{eod_token: ID}`, for the token that ends documents and is part of them. Columns of
    lists have a document in each row."""
    vocab_size: VocabSize | None = None
    """Like the config's `vocab_size`, for this source."""
    extra_columns: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Additional columns: one number per document, or per token."""
    text: Annotated[str, Field(min_length=1)] | None = None
    """Set for files of text, which `build` tokenises: the JSON key or column with the text, dotted
    for nested ones; see docs/text.md."""
    key: Annotated[str, Field(min_length=1)] | None = None
    """JSON key or column that names a document of a text source, for `show` and `find`."""
    eos: bool = False
    """Append the end-of-text token that the tokenizer names: the same as `append_eod` with its
    id."""
    bos: bool = False
    """Begin each document of a text source with the tokenizer's beginning-of-text token."""
    add_special_tokens: bool = False
    """Add the special tokens of the tokenizer's post-processor to each document of text."""
    _place: object = PrivateAttr("")
    _token_files: str = PrivateAttr("")

    @field_validator("path", mode="before")
    @classmethod
    def _paths(cls, value: object) -> object:
        """Accept one path or a list of paths."""
        paths = tuple(map(parse_path, value if isinstance(value, (list, tuple)) else [value]))
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise ValueError(f"found {value!r}, expected a path, a glob or a list of them")
        return paths

    @property
    def options(self) -> dict[str, OptionValue]:
        """The options of the format, with `documents`."""
        if self.documents is None:
            return self.format_options
        return {**self.format_options, "documents": self.documents}

    @property
    def place(self) -> str:
        """The place where the config defines the source, for messages, such as
        `demo.yaml:12: sources[1]`."""
        return str(self._place)

    @property
    def token_paths(self) -> tuple[str, ...]:
        """Patterns of the files that contain the tokens: `path` or, for a text source, the files
        that `build` makes."""
        return self.path if self.text is None else (f"{self._token_files}/*",)

    @property
    def token_folder(self) -> str:
        """The folder of the tokens of a text source."""
        return self._token_files

    @property
    def is_capped(self) -> bool:
        """Whether the source has a cap."""
        return self.max_epochs is not None or self.max_tokens is not None

    @property
    def unit(self) -> str | None:
        """The unit in which the share is given."""
        for unit in UNITS:
            if getattr(self, unit) is not None:
                return unit
        return None

    @model_validator(mode="after")
    def _keys_fit(self) -> Source:
        """Check that the keys of the source are consistent."""
        of_tokens = ("format", "format_options", "column", "documents", "extra_columns")
        of_text = ("key", "eos", "bos", "add_special_tokens")
        unfit = of_text if self.text is None else of_tokens
        for key in unfit:
            if getattr(self, key):
                reason = "has no `text`" if self.text is None else "is tokenised from text"
                raise ValueError(
                    f"source {self.name!r} {reason}, so {key} does not apply; remove {key}"
                    + (", or set `text` to the key of the text" if self.text is None else "")
                )
        shorter, longer = sorted((f"{self.text}.", f"{self.key}."), key=len)
        if self.key is not None and longer.startswith(shorter):
            raise ValueError(
                f"source {self.name!r}: text and key are {self.text!r} and {self.key!r}, one of which contains the "
                "other; expected two separate keys"
            )
        if self.bos and self.add_special_tokens:
            raise ValueError(
                f"source {self.name!r} sets both bos and add_special_tokens, which may add the same token; keep only one"
            )
        if self.documents is not None and self.extra_columns:
            raise ValueError(
                f"source {self.name!r} sets both documents and extra_columns, which need one document per row; "
                "remove documents and write the tokens as lists, or remove extra_columns"
            )
        if self.documents is not None and self.format in ("raw", "megatron"):
            hint = (
                "set `format_options: {eod_token: ID}` instead"
                if self.format == "raw"
                else "an .idx already says where documents end"
            )
            raise ValueError(
                f"source {self.name!r} has `documents`, which does not apply to {self.format} files; remove it "
                f"({hint})"
            )
        units = self.list_given(UNITS)
        if len(units) > 1:
            raise ValueError(
                f"source {self.name!r} has {' and '.join(units)}; expected only one of {', '.join(UNITS)}"
            )
        return self


def check_blend(split: str, sources: Sequence[Source], *, blended: bool) -> None:
    """Check that the sources of a split are compatible. If the split is `blended`, their shares
    must have the same unit. Raises: ValueError."""
    seen: set[str] = set()
    expected = set(sources[0].extra_columns) if sources else set()
    for source in sources:
        columns = set(source.extra_columns)
        if len(columns) < len(source.extra_columns):
            raise ValueError(
                f"sources: source {source.name!r} has a duplicate name in extra_columns; keep one"
            )
        if columns != expected:
            raise ValueError(
                f"sources: {source.name!r} has extra_columns {', '.join(source.extra_columns) or 'none'}, but "
                f"{sources[0].name!r} has {', '.join(sources[0].extra_columns) or 'none'}; expected the same for all "
                f"sources of {split}, whose samples share batches"
            )
        if source.name in seen:
            raise ValueError(
                f"sources: two sources of {split} are named {source.name!r}; rename one of them"
            )
        seen.add(source.name)
    if blended:
        check_units(split, sources)


def check_units(split: str, sources: Sequence[Source]) -> None:
    """Check that the shares of the sources of a blended split have the same unit, and are not all
    0. Raises: ValueError."""
    units = list(map(attrgetter("unit"), sources))
    if units == [None]:
        return
    for i, (source, unit) in enumerate(zip(sources, units, strict=True)):
        if unit is None:
            raise ValueError(
                f"sources.{split}[{i}]: {source.name!r} has no share; expected exactly one of {', '.join(UNITS)}, the same for "
                "all sources"
            )
    for i, unit in enumerate(units):
        if unit != units[0]:
            listed_units = ", ".join(f"{source.name!r} {source.unit}" for source in sources)
            raise ValueError(
                f"sources.{split}[{i}]: mixed units ({listed_units[:200]}); expected one unit for all sources of a blend"
            )
    if not any(map(attrgetter(units[0]), sources)):
        raise ValueError(
            f"sources: `{units[0]}` is 0 for every source of {split}; expected at least one above 0"
        )

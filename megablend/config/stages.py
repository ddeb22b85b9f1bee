"""The `stages` of a config: the end of each stage of train, and its changes from the previous
stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from megablend.config.source import UNITS, Model, Share, Source
from megablend.config.values import Count, OrderName, Positive, Temperature
from megablend.errors import did_you_mean

ENDS = ("samples", "tokens", "share")
"""Keys that set the end of a stage, each in its own unit."""
MASKS = (
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "create_attention_mask",
    "inter_document_masking",
)
SETTINGS = (
    "sequence_length",
    "order",
    "lanes",
    "shuffle_window",
    "on_exhausted",
    "temperature",
    *MASKS,
)
"""Keys of the config that a stage may change."""


class _Changes(Model):
    """Base class of the keys by which a stage changes settings or a source."""

    fixed: ClassVar[tuple[str, ...]]
    """Keys that exist elsewhere in the config, but that no stage may change."""
    remedy: ClassVar[str]
    """Text that follows `KEY cannot change within a run` in messages."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_fixed(cls, data: Any) -> Any:
        """Refuse the keys in `fixed`."""
        if not isinstance(data, Mapping):
            return data
        for key in cls.fixed:
            if key in data:
                raise ValueError(f"{key} cannot change within a run{cls.remedy}")
        return data


class StageSource(Share, _Changes):
    """The changes of a source in a stage; other settings stay as in the previous stage."""

    fixed = tuple(key for key in Source.model_fields if key not in Share.model_fields)
    remedy = "; set it in `sources`, for all stages"

    def find_changes(self) -> dict[str, Any]:
        """Return the fields of a `Source` to update. A new share replaces the source's share,
        whatever its unit."""
        changes = {name: getattr(self, name) for name in self.model_fields_set}
        if any(changes.get(unit) is not None for unit in UNITS):
            changes = dict.fromkeys(UNITS) | changes
        return changes


class StageSettings(_Changes):
    """A stage of train. Settings that a stage does not list stay as in the previous stage; the
    first stage starts from the settings of the top level."""

    fixed = (
        "seed",
        "split",
        "interleaving",
        "add_extra_token_to_sequence",
        "cache",
        "run",
        "epochs",
    )
    remedy = ", whose order depends on it; set it at the top level for a new run (`run:`)"

    from_: Annotated[int, Field(ge=1, strict=True)] | None = Field(None, alias="from")
    """The sample from which the stage applies, and at which it ends the previous stage early; see
    `megablend amend`."""
    drain: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Number of samples at the start of the stage that still continue the previous stage, if the
    length of samples changes; `megablend amend` prints it."""
    samples: Count | None = None
    """The end of the stage, in samples from the start of the run."""
    tokens: Count | None = None
    """The end of the stage, in tokens from the start of the run."""
    share: Positive | None = None
    """The end of the stage, as a share of the run's length."""
    sources: dict[str, StageSource] = Field(default_factory=dict)
    """Sources whose share or limit changes, by name."""
    new_data: bool = False
    """Whether the stage reads the current files, which are indexed again. Each source first
    finishes its epoch on the previous files."""
    withdraw: tuple[str, ...] = ()
    """Sources that are no longer read, and whose files may be removed; implies `new_data`."""
    schedule: Literal["linear", "cosine"] | None = None
    """The way in which shares change during the stage, in steps, from those of the previous stage
    to those of `sources`; by default they change at once."""
    steps: Annotated[int, Field(ge=2, le=256, strict=True)] = 32
    """Maximum number of steps of a schedule. There are fewer if steps would be shorter than a few
    cycles."""
    sequence_length: Count | None = None
    order: OrderName | None = None
    """The order of each source from its next epoch on. The current epoch is finished in the order
    of the previous stage."""
    lanes: Annotated[int, Field(ge=1, le=2**20, strict=True)] | None = None
    shuffle_window: Annotated[int, Field(ge=1, le=2**20, strict=True)] | None = None
    on_exhausted: Literal["error", "redistribute"] | None = None
    temperature: Temperature | None = None
    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool | None = None
    inter_document_masking: bool | None = None

    @field_validator("sources", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Accept only a mapping from names of sources to their changes."""
        if not isinstance(value, Mapping):
            description = "a list" if isinstance(value, list | tuple) else repr(value)
            raise ValueError(
                f"found {description}, expected the changes for each source, as in `sources: {{web: {{weight: 2}}}}`"
            )
        return value

    @field_validator("share")
    @classmethod
    def _at_most_all(cls, value: Fraction | None) -> Fraction | None:
        """Refuse a share above 1."""
        if value is not None and value > 1:
            raise ValueError(
                f"found {float(value):g}, expected a share of the run, more than 0 and at most 1"
            )
        return value

    @model_validator(mode="after")
    def _keys_fit(self) -> StageSettings:
        """Check that the keys of the stage are consistent."""
        ends = self.list_given(ENDS)
        if len(ends) > 1:
            raise ValueError(f"the stage's end is given by {' and '.join(ends)}; keep only one")
        if self.schedule is None and "steps" in self.model_fields_set:
            raise ValueError(
                "steps apply to a schedule only; add `schedule: linear` or `cosine`, or remove steps"
            )
        return self

    @property
    def changes_index(self) -> bool:
        """Whether the stage reads a different snapshot of the index from the previous stage."""
        return self.new_data or bool(self.withdraw)

    @property
    def changes_samples(self) -> bool:
        """Whether the stage changes the length of samples, or a mask."""
        return bool(self.list_given(("sequence_length", *MASKS)))

    @property
    def has_end(self) -> bool:
        """Whether the stage sets its end."""
        return bool(self.list_given(ENDS))

    def find_changes(self) -> dict[str, Any]:
        """Return the settings of the config that the stage changes, apart from its sources."""
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}

    def change_source(self, source: Source) -> Source:
        """Return a source with the stage's changes."""
        if source.name in self.withdraw:
            return source.model_copy(update={source.unit or "weight": 0})
        changes = self.sources.get(source.name)
        return source.model_copy(update=changes.find_changes()) if changes else source


def check_listed(
    stages: Sequence[StageSettings], names: Sequence[str], lengths: Sequence[str]
) -> None:
    """Check that the keys of stages are consistent with the sources of train and the length of the
    run.

    Args:
        names: the names of the sources of train.
        lengths: the keys that set the run's length.

    Raises: ValueError, whose message begins with the place.
    """
    for i, stage in enumerate(stages):
        unknown = sorted(stage.sources.keys() - set(names))
        if unknown:
            hint = did_you_mean(unknown[0], names) or "list it in `sources` too, with `weight: 0`"
            raise ValueError(f"stages[{i}]: train has no source {unknown[0]!r}; {hint}")
        unknown = sorted(set(stage.withdraw) - set(names))
        if unknown:
            hint = (
                did_you_mean(unknown[0], names)
                or "put it back in `sources`, since earlier stages read it"
            )
            raise ValueError(f"stages[{i}]: withdraw: train has no source {unknown[0]!r}; {hint}")
        if i == 0 and (stage.from_ is not None or stage.drain is not None):
            key = "from" if stage.from_ is not None else "drain"
            raise ValueError(
                f"stages[0]: found `{key}`, but the first stage begins at sample 0 and has no earlier stage to cut "
                f"short; list the earlier stage before this one, or remove `{key}`"
            )
        if i == 0 and stage.changes_index:
            key = "new_data" if stage.new_data else "withdraw"
            raise ValueError(
                f"stages[0]: found `{key}`, but there is no earlier stage whose data it could change; remove it"
            )
        if stage.share is not None and not lengths:
            raise ValueError(
                f"stages[{i}]: share is a fraction of the run's length, which is not set; add samples, tokens or epochs"
            )
    _check_withdrawn(stages)
    if stages and lengths and stages[-1].has_end and stages[-1].share is None:
        raise ValueError(
            f"{lengths[0]}: the last stage already sets the end of the run; remove one of the two"
        )


def _check_withdrawn(stages: Sequence[StageSettings]) -> None:
    """Check that no source is withdrawn twice, or given a share after it was withdrawn. Raises:
    ValueError, whose message begins with the place."""
    withdrawn_in = dict[str, int]()
    for i, stage in enumerate(stages):
        for name in (*stage.withdraw, *stage.sources):
            if name in withdrawn_in:
                raise ValueError(
                    f"stages[{i}]: source {name!r} was withdrawn in stages[{withdrawn_in[name]}]; remove it here"
                )
        both = sorted(set(stage.withdraw) & stage.sources.keys())
        if both:
            raise ValueError(
                f"stages[{i}]: source {both[0]!r} is both withdrawn and changed in `sources`; keep only one of the "
                "two"
            )
        if stage.withdraw and stage.schedule is not None:
            raise ValueError(
                f"stages[{i}]: a schedule starts from the shares of the previous stage, which still has source "
                f"{stage.withdraw[0]!r}; withdraw it in a stage before the schedule"
            )
        withdrawn_in |= dict.fromkeys(stage.withdraw, i)

"""The settings of a run that do not decide its order:
where it is kept and read from, and what the dict of a sample contains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megablend.caches.base import CacheStore
from megablend.config.model import Config
from megablend.config.settings import Settings
from megablend.storage.object_options import ObjectOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """What the dict of a sample contains besides its tokens."""

    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    inter_document_masking: bool = False
    eod: int | None = None
    """The end-of-document token that masks act on."""

    @classmethod
    def of(cls, config: Settings) -> Masks:
        """The masks of a config, or of the settings of one of its stages."""
        return cls(
            reset_position_ids=config.reset_position_ids,
            reset_attention_mask=config.reset_attention_mask,
            eod_mask_loss=config.eod_mask_loss,
            create_attention_mask=config.create_attention_mask,
            inter_document_masking=config.inter_document_masking,
            eod=config.eod,
        )

    @property
    def needs_eod(self) -> bool:
        """Whether a mask acts on end-of-document tokens."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


_DEFAULTS = {name: field.default for name, field in Settings.model_fields.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What opening a committed run takes from a config;
    a run that is opened from its cache alone has the defaults."""

    cache: CacheStore
    objects: ObjectOptions
    """How object stores are accessed."""
    memory: int = _DEFAULTS["memory"]
    on_bad_sample: str = _DEFAULTS["on_bad_sample"]
    file_checks_per_second: float = _DEFAULTS["file_checks_per_second"]
    direct_io: bool = _DEFAULTS["direct_io"]
    masks: Masks = Masks()
    """Of the top level, and so of valid and test."""
    stage_masks: tuple[Masks, ...] = ()
    """Of each stage that the config lists; none where no stage changes them."""
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By a source's name in the index: where its files are; where absent, the folder that the last
    build recorded."""
    extra_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By a source's name in the index, of those that have any."""

    @classmethod
    def of(cls, config: Config) -> Runtime:
        """That of a config."""
        sources = config.all_sources
        changes_samples = any(stage.changes_samples for stage in config.stages)
        return cls(
            cache=config.cache_store,
            objects=config.storage,
            memory=config.memory,
            on_bad_sample=config.on_bad_sample,
            file_checks_per_second=config.file_checks_per_second,
            direct_io=config.direct_io,
            masks=Masks.of(config),
            stage_masks=tuple(map(Masks.of, config.stage_configs_ignoring_sources))
            if changes_samples
            else (),
            paths={name: source.path for name, source in sources.items()},
            extra_columns={
                name: source.extra_columns
                for name, source in sources.items()
                if source.extra_columns
            },
        )

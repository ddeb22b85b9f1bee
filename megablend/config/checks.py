"""Check that the keys of a config are consistent with each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

from megablend.config.settings import EOD_MASKS, LENGTHS, SPLITS, Settings
from megablend.config.source import check_blend, check_units
from megablend.config.stages import StageSettings
from megablend.config.values import SIZE


def check_settings(settings: Settings) -> list[str]:
    """Check that the keys of the top level are consistent.

    Returns: the key among LENGTHS that gives the length of train, if there is one.
    Raises: ValueError, whose message begins with the key.
    """
    if not settings.sources.get("train"):
        raise ValueError("sources: found no source for train, expected at least one")
    if settings.split is not None and set(settings.sources) - {"train"}:
        raise ValueError(
            "split: `sources` already lists the sources of each split; keep only one of the two"
        )
    lengths = settings.list_given(LENGTHS)
    if len(lengths) > 1:
        raise ValueError(
            f"{lengths[1]}: the number of training samples is already set by {lengths[0]}; keep only one of the two"
        )
    for split in SPLITS[1:]:
        if settings.is_blended(split) and not settings.has_split(split):
            raise ValueError(
                f"{split}_samples: there is no {split} split; give it a share in `split`, or list sources for it"
            )
    for split, sources in settings.sources.items():
        check_blend(split, sources, blended=settings.is_blended(split))
    _check_weights(settings)
    has_end = bool(lengths or (settings.stages and settings.stages[-1].has_end))
    if not has_end and _is_weighted(settings):
        raise ValueError(
            "samples: missing; weights do not say how many samples the run has: add samples, tokens or epochs"
        )
    _check_masks(settings)
    _check_vocab_sizes(settings)
    for source in chain.from_iterable(settings.sources.values()):
        if source.text and settings.tokenizer is None:
            raise ValueError(
                f"tokenizer: missing; source {source.name!r} is text: give the path of a tokenizer.json or of its folder, "
                "or the name of a model in the Hugging Face cache"
            )
    return lengths


def check_stages(
    stages: Sequence[StageSettings], configs: Sequence[Settings], ends_with_run: bool
) -> None:
    """Check each stage as if it were a separate config, and check that its end is known.

    Args:
        configs: the settings and sources of each stage.
        ends_with_run: whether the length of the run is set. It is then the end of the last stage.

    Raises: ValueError, whose message begins with the stage.
    """
    for i, (stage, config) in enumerate(zip(stages, configs, strict=True)):
        try:
            check_units("train", config.sources["train"])
            _check_weights(config)
            _check_masks(config)
            if stage.on_exhausted == "redistribute":
                check_caps([config])
        except ValueError as error:
            raise ValueError(f"stages[{i}]: {error}") from None
        if stage.schedule is not None and config.on_exhausted == "redistribute":
            raise ValueError(
                f"stages[{i}]: schedule: shares that change step by step cannot be redistributed; set "
                "`on_exhausted: error`, or list stages with constant shares"
            )
        is_last = i == len(stages) - 1
        has_end = stage.has_end or (is_last and ends_with_run)
        if not has_end and _is_weighted(config):
            raise ValueError(
                f"stages[{i}]: has no end, and weights do not say where it ends; add samples, tokens or share"
            )


def check_caps(configs: Sequence[Settings]) -> None:
    """Check that at least one source has a cap, as `on_exhausted: redistribute` requires, at the
    top level or in a stage, whose settings are `configs`.

    Raises: ValueError, whose message begins with the key.
    """
    lists = (listed for settings in configs for listed in settings.sources.values())
    if not any(source.is_capped for listed in lists for source in listed):
        raise ValueError(
            "on_exhausted: no source can be exhausted, since none has a cap; give max_epochs or max_tokens to at "
            "least one source, or remove on_exhausted"
        )


def _is_weighted(settings: Settings) -> bool:
    """Return whether the shares of the sources of train are weights, which is the default."""
    return (settings.sources["train"][0].unit or "weight") == "weight"


def _check_weights(settings: Settings) -> None:
    """Check that `weight: size` and `temperature` are compatible with the shares of the sources."""
    for split, sources in settings.sources.items():
        is_sized = SIZE in map(attrgetter("weight"), sources)
        for i, source in enumerate(sources):
            if is_sized and source.weight is not None and source.weight not in (SIZE, 0):
                raise ValueError(
                    f"sources.{split}[{i}]: {source.name!r} has weight {float(source.weight):g}, but other sources have "
                    "`weight: size`; expected `size` for all sources of a blend, or numbers for all (0 leaves a source "
                    "out)"
                )
            if settings.temperature is not None and source.unit not in (None, "weight"):
                raise ValueError(
                    f"temperature: only applies to weights, but the share of {source.name!r} is given by "
                    f"{source.unit}; use weights (`weight: size` for numbers of tokens), or remove temperature"
                )


def _check_masks(settings: Settings) -> None:
    """Check that the mask settings are compatible, and that the end-of-document token is known if
    they need it."""
    masks = settings.masks
    if masks.needs_eod and masks.eod is None:
        raise ValueError(f"eod_token: {_why_no_eod(settings)}")
    if masks.inter_document_masking and masks.create_attention_mask:
        raise ValueError(
            "inter_document_masking: provides cu_seqlens instead of an attention mask; set `create_attention_mask: false`"
        )


def _why_no_eod(settings: Settings) -> str:
    """Return a message that explains which masks need an end-of-document token, why it is not
    known, and what to do."""
    masks = [name for name in EOD_MASKS if getattr(settings, name)]
    appended = settings.appended_eods
    shown = ", ".join(sorted("none" if token is None else str(token) for token in appended))
    differ = f", and the sources append different ones ({shown})" if len(appended) > 1 else ""
    return (
        f"missing; {' and '.join(masks)} need{'s' if len(masks) == 1 else ''} to know the end-of-document token"
        f"{differ}: set `eod_token` to the token that ends documents in the data"
    )


def _check_vocab_sizes(settings: Settings) -> None:
    """Check that end-of-document tokens are in the vocabulary, if the vocabulary size is given."""
    eods = [("eod_token", settings.eod_token, settings.vocab_size)]
    for split, sources in settings.sources.items():
        for i, source in enumerate(sources):
            size = settings.vocab_size if source.vocab_size is None else source.vocab_size
            eods.append((f"sources.{split}[{i}]", source.append_eod, size))
    for place, token, size in eods:
        if token is not None and isinstance(size, int) and token >= size:
            named = "" if place == "eod_token" else "append_eod "
            raise ValueError(
                f"{place}: {named}{token} is not in a vocabulary of {size:,}; expected 0 to {size - 1}"
            )

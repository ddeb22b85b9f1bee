"""What a config requests for one split of an index: sources, shares and length, before anything is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.blocks.splits import parts_of
from megablend.config import SPLITS, Config, Source
from megablend.errors import ConfigError, PlanError
from megablend.order.registry import current_name
from megablend.plan.allocate import cycles_per_run
from megablend.plan.interleavings.registry import find_interleaving
from megablend.plan.ledger_format import PLAN_VERSION
from megablend.plan.shares import shares_of
from megablend.plan.stage import Blend, SourceShare
from megablend.plan.stage_requests import samples_of_one_pass


@dataclass(frozen=True, kw_only=True)
class Specification:
    """One split of a run, as the config requests it."""

    config: Config
    split: str
    sources: tuple[Source, ...]
    """[num_sources], in the order of the config."""
    parts: npt.NDArray[np.void]
    """PART_DTYPE [num_sources]: the documents of each source that belong to the split."""
    weights: tuple[Fraction, ...]
    """[num_sources], sum 1; empty where the split is not blended."""
    num_samples: int
    requested: tuple[Fraction, ...] = ()
    """[num_sources], sum 1: the shares before `on_exhausted: redistribute` changes them; empty as above."""

    @property
    def tokens(self) -> list[int]:
        """Tokens of each source in this split, including end-of-document tokens."""
        return [int(n) for n in self.parts["tokens"]]

    @property
    def blend(self) -> Blend:
        """The blend that the split would have with the newest plan version."""
        config = self.config
        shares: Sequence[Fraction | None] = self.weights or [None] * len(self.sources)
        listed = zip(self.sources, self.parts, shares, strict=True)
        blend = Blend(
            split=f"{self.split} of {','.join(map(str, config.shares))}",
            sequence_length=config.sequence_length,
            add_extra_token_to_sequence=config.add_extra_token_to_sequence,
            sources=tuple(_share(config, source, part, share) for source, part, share in listed),
        )
        if not self.weights:
            return blend
        return replace(
            blend,
            interleaving=config.interleaving,
            order=current_name(config.order),
            plan_version=PLAN_VERSION,
            seed=config.seed,
            lanes=config.lanes,
            shuffle_window=config.shuffle_window,
        )


def specify(config: Config, split: str, store: BlockStore, *, keep: bool = False) -> Specification:
    """Compute what a config requests for a split.

    Args:
        keep: store the computed split ranges in the cache (`build` does).

    Raises: PlanError where the blend is not possible; ConfigError for an unknown interleaving.
    """
    try:
        find_interleaving(config.interleaving)
    except ValueError as error:
        raise ConfigError(f"interleaving: {error}") from None
    named = config.sources_of(split)
    if not named:
        raise PlanError(f"the config lists no sources for split {split!r}")
    numbers = {entry.name: number for number, entry in enumerate(store.generation.sources)}
    parts = parts_of(store, config.shares, keep=keep)
    column = 0 if config.listed_by_split else SPLITS.index(split)
    split_parts = parts[[numbers[name] for name in named], column]
    sources, tokens = tuple(named.values()), [int(n) for n in split_parts["tokens"]]
    if config.is_blended(split):
        weights, requested, num_samples = shares_of(config, split, sources, tokens)
    else:
        extra = int(config.add_extra_token_to_sequence)
        weights, requested, num_samples = (), (), sum(samples_of_one_pass(tokens, config.sequence_length, extra))
        if num_samples == 0:
            raise PlanError(
                f"split {split!r} has fewer tokens than one sample of {config.sequence_length} tokens ({sum(tokens):,} tokens in "
                "all): give it a larger share in `split`"
            )
    return Specification(
        config=config,
        split=split,
        sources=sources,
        parts=split_parts,
        weights=weights,
        num_samples=num_samples,
        requested=requested,
    )


def _share(config: Config, source: Source, part: np.void, share: Fraction | None) -> SourceShare:
    """A source's share, and how many cycles share each of its runs, chosen so that a run spans whole blocks or documents."""
    if share is None:
        return SourceShare(name=source.name, append_eod=source.append_eod)
    num_units = part["documents"] if config.moves_documents else part["stop_block"] - part["first_block"]
    mean_tokens = Fraction(int(part["tokens"]), max(1, int(num_units)))
    cycles = cycles_per_run(mean_tokens, share, config.sequence_length, config.shuffle_window)
    return SourceShare(name=source.name, append_eod=source.append_eod, share=share, cycles=cycles)

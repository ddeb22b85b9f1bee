"""One split of a run, assembled: sources, parts, plan and orders behind `locate(k)` and `spans(k)`.

Nothing here is a sample long, and nothing but the parts is a source long until a source is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.blocks.extra_check import extra_columns
from megablend.blocks.extra_columns import SEPARATOR, ExtraColumn
from megablend.blocks.memory_shares import get_extra_bytes
from megablend.blocks.splits import SplitBlocks, parts_of
from megablend.config import SPLITS, Config, Source
from megablend.errors import ConfigError, PlanError
from megablend.index.snapshot import Snapshot, SourceEntry
from megablend.order import ORDERS, Order
from megablend.order.base import Spans, by_value, joined
from megablend.plan.allocate import cycles_per_run, stage_totals
from megablend.plan.blend import BlendPlan
from megablend.plan.ledger import PLAN_VERSION, Ledger, digest_of
from megablend.plan.sequential import SequentialPlan
from megablend.plan.shares import check_totals, samples_in, shares_of
from megablend.storage.base import Storage
from megablend.storage.location import find_root


def open_block_store(config: Config, generation: Snapshot, storage: Storage) -> BlockStore:
    """The generation's blocks, read as the config says and from where the config says.

    Raises: PlanError where the generation lacks a source of the config, or read it in another way; ConfigError where a
        source's append_eod does not fit its tokens.
    """
    named = config.all_sources
    entries = {entry.name: entry for entry in generation.sources}
    for name, source in named.items():
        entry = entries.get(name)
        if entry is None:
            problem = f"has no source {name!r} (it has {', '.join(entries)})"
        elif entry.column != source.column:
            problem = f"read column {entry.column!r} of source {name!r}, the config says {source.column!r}"
        elif missing := [each for each in source.extra_columns if f"{name}{SEPARATOR}{each}" not in entries]:
            problem = f"does not hold extra column {missing[0]!r} of source {name!r}"
        elif config.needs_documents(source) and not entry.documents:
            needed_by = "append_eod, split, extra_columns and order: row"
            problem = f"does not know the documents of source {name!r}, which {needed_by} need"
        else:
            _check_eod(source, generation.token_dtypes(entry))
            continue
        raise PlanError(
            f"the index {generation.digest} that run {config.run!r} stands on {problem}; "
            "give the run another name (`run:`) and build it, or put the config back"
        )
    eods = [named[entry.name].append_eod if entry.name in named else None for entry in generation.sources]
    roots = {name: _root(generation, entries[name], named[name], storage) for name in named}
    roots |= {entry.name: roots[entry.extra_of] for entry in generation.sources if entry.extra_of in roots}
    plain = BlockStore(generation, eods, roots, storage=storage)
    extra = {name: extra_columns(plain, name, sorted(each.extra_columns)) for name, each in named.items()}
    for split in SPLITS:
        _check_types([(name, extra[name]) for name in config.sources_of(split)])
    return BlockStore(generation, eods, roots, extra, get_extra_bytes(config.memory), storage=storage)


def _check_types(extra: Sequence[tuple[str, Sequence[ExtraColumn]]]) -> None:
    for name, columns in extra:
        for column, first in zip(columns, extra[0][1], strict=True):
            if column.dtype != first.dtype:
                raise ConfigError(
                    f"extra column {column.column!r} is of {first.dtype} in source {extra[0][0]!r} and of {column.dtype} in "
                    f"{name!r}; write it alike in all sources of a split"
                )


def _check_eod(source: Source, dtypes: Sequence[str]) -> None:
    for dtype in dtypes:
        if source.append_eod is not None and source.append_eod > np.iinfo(dtype).max:
            raise ConfigError(
                f"{f'{source.place}: ' if source.place else ''}source {source.name!r}: append_eod {source.append_eod} does not "
                f"fit its tokens, which are stored as {dtype} (up to {np.iinfo(dtype).max}); give a smaller one"
            )


def _root(generation: Snapshot, entry: SourceEntry, source: Source, storage: Storage) -> str:
    """The folder that the names of a source's files are relative to: the config's, since data may have moved.

    A config to which paths were added since the index was made may have another root, under which the names mean nothing;
    then the files lie where they did.
    """
    root = find_root(source.path)
    if root == entry.root or not entry.files:
        return root
    here, there = (generation.path(entry.files.start, {entry.name: folder}) for folder in (root, entry.root))
    return entry.root if storage.glob(there) and not storage.glob(here) else root


@dataclass(frozen=True, kw_only=True)
class Run:
    """One split of a run over an opened index."""

    config: Config
    split: str
    store: BlockStore
    sources: tuple[Source, ...]
    """[num_sources], in the order of the config."""
    parts: npt.NDArray[np.void]
    """PART_DTYPE [num_sources]: the documents of each source that belong to the split."""
    weights: tuple[Fraction, ...]
    """[num_sources], summing to 1; of an unblended split, empty."""
    ledger: Ledger
    """What is promised; of valid and test, made anew from the config each time, in the plan version of the run."""

    @property
    def num_samples(self) -> int:
        """Samples promised."""
        return self.ledger.ends[-1]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each source in this split, end-of-document tokens included."""
        return [int(n) for n in self.parts["tokens"]]

    @cached_property
    def plan(self) -> BlendPlan | SequentialPlan:
        """Sample number -> (source, ordinal)."""
        if not self.weights:
            return SequentialPlan(_one_pass(self.config, self.tokens))
        return BlendPlan(
            stage_totals(self.weights, self.ledger.ends),
            lanes=self.config.lanes,
            slots=self.config.cycle,
            spans=[source["cycles"] for source in self.ledger.blend["sources"]],
            seed=self.config.seed,
            epoch_tokens=self.tokens if self.ledger.plan_version > 1 else None,
            sample_tokens=self.config.sequence_length,
        )

    def blocks(self, source: int) -> SplitBlocks:
        """The source's blocks in this split."""
        eod = self.sources[source].append_eod is not None
        return SplitBlocks(self.store.generation, self.parts[source], eod=eod)

    def order(self, source: int) -> Order:
        """How the source's samples are laid over its blocks."""
        if source not in self._orders:
            key = int(digest_of([self.config.seed, self.split, self.sources[source].name])[:16], 16)
            name = self.config.order if self.weights else "sequential"
            self._orders[source] = ORDERS[name](self.blocks(source), key)
        return self._orders[source]

    def stretches(self, sources: npt.NDArray[np.int32], ordinals: npt.NDArray[np.int64]) -> Spans:
        """Where the tokens of samples lie: sequence_length of each, and the extra one.

        Args:
            sources, ordinals: [n], what the plan says of the samples.

        Returns: spans of rows 0 to n - 1; `blocks` are numbers of the generation, `starts` and `stops` count a block's tokens as
            the store gives them.
        """
        length, found = self.config.sequence_length, []
        for source, mine in by_value(sources):
            blocks = self.blocks(source)
            spans = self.order(source).spans(ordinals[mine] * length, self.sample_tokens)
            clips = blocks.clips(spans.blocks)
            found.append(
                Spans(
                    mine[spans.rows],
                    spans.epochs,
                    spans.blocks + blocks.first_block,
                    spans.starts + clips,
                    spans.stops + clips,
                )
            )
        return joined(found)

    @property
    def extra_columns(self) -> tuple[ExtraColumn, ...]:
        """Columns read along with the tokens, the same of all sources."""
        return self.store.extra.get(self._first_source, ())

    @cached_property
    def _first_source(self) -> str:
        return next(iter(self.config.sources_of(self.split)))

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample, the extra one included."""
        return self.config.sequence_length + self.config.add_extra_token_to_sequence

    @cached_property
    def _orders(self) -> dict[int, Order]:
        return {}


def plan_run(config: Config, split: str, store: BlockStore, *, keep: bool = False) -> Run:
    """Assemble a split as the config asks for it: a run of one stage, by the newest version of the plan.

    Args:
        keep: write what was found out about the splits to the cache (`build` does).

    Raises: PlanError where the blend cannot be had.
    """
    named = config.sources_of(split)
    if not named:
        raise PlanError(f"the config lists no sources for split {split!r}")
    numbers = {entry.name: number for number, entry in enumerate(store.generation.sources)}
    parts = parts_of(config.cache, store, config.shares, keep=keep)
    column = 0 if config.listed_by_split else SPLITS.index(split)
    mine = parts[[numbers[name] for name in named], column]
    sources, tokens = tuple(named.values()), [int(n) for n in mine["tokens"]]
    if config.is_blended(split):
        weights, num_samples = shares_of(config, split, sources, tokens)
    else:
        weights, num_samples = (), sum(_one_pass(config, tokens))
        if num_samples == 0:
            raise PlanError(
                f"split {split!r} has no whole sample of {config.sequence_length} tokens ({sum(tokens):,} tokens in all): "
                "give it a larger share in `split`"
            )
    cycles = [_cycles(config, part, weight) for part, weight in zip(mine, weights, strict=True)] if weights else []
    ledger = Ledger(
        run=config.run,
        index=store.generation.digest,
        blend=_describe(config, split, sources, weights, cycles),
        ends=(num_samples,),
    )
    run = Run(config=config, split=split, store=store, sources=sources, parts=mine, weights=weights, ledger=ledger)
    check_run(run)
    return run


def as_promised(run: Run, ledger: Ledger) -> Run:
    """The run in the version of the plan that its ledger has; train with its cycles, which are never chosen again."""
    promised = run.ledger.in_version(ledger.plan_version)
    return dataclasses.replace(run, ledger=promised.with_cycles_of(ledger) if run.split == "train" else promised)


def precompute_orders(config: Config, store: BlockStore) -> None:
    """Keep in the cache what the orders of blended splits would have to count on opening. Raises CacheError."""
    entries = {entry.name: number for number, entry in enumerate(store.generation.sources)}
    parts = parts_of(config.cache, store, config.shares)
    for number, split in enumerate(SPLITS):
        if not config.is_blended(split):
            continue
        for name, source in config.sources_of(split).items():
            part = parts[entries[name], 0 if config.listed_by_split else number]
            if part["tokens"] == 0:
                continue  # refused where the split is opened
            ORDERS[config.order](SplitBlocks(store.generation, part, eod=source.append_eod is not None), 0).keep()


def check_run(run: Run) -> None:
    """Refuse totals that leave out a source or exceed its cap. Raises PlanError."""
    if run.weights:
        totals = np.sum(np.array(stage_totals(run.weights, run.ledger.ends), dtype=np.int64), axis=0).tolist()
        check_totals(run.config, run.split, run.sources, run.weights, totals, run.tokens)


def _one_pass(config: Config, tokens: Sequence[int]) -> list[int]:
    extra = int(config.add_extra_token_to_sequence)
    return [samples_in(n, config.sequence_length, extra) for n in tokens]


def _cycles(config: Config, part: np.void, weight: Fraction) -> int:
    """Over how many cycles a lane's run of the source is dealt, so that it spans whole blocks; or, by row, documents."""
    in_one_piece = part["documents"] if config.order == "row" else part["stop_block"] - part["first_block"]
    mean_tokens = Fraction(int(part["tokens"]), max(1, int(in_one_piece)))
    return cycles_per_run(mean_tokens, weight, config.sequence_length, config.cycle)


def _describe(
    config: Config, split: str, sources: Sequence[Source], weights: Sequence[Fraction], cycles: Sequence[int]
) -> dict[str, Any]:
    """All that decides the order of the samples, besides the index and the stages."""
    described: dict[str, Any] = {
        "split": f"{split} of {','.join(map(str, config.shares))}",
        "sequence_length": config.sequence_length,
        "add_extra_token_to_sequence": config.add_extra_token_to_sequence,
        "sources": [{"name": source.name, "append_eod": source.append_eod} for source in sources],
    }
    if weights:
        described |= {"plan": PLAN_VERSION, "seed": config.seed, "order": config.order}
        described |= {"lanes": config.lanes, "cycle": config.cycle}
        for source, weight, number in zip(described["sources"], weights, cycles, strict=True):
            source |= {"share": str(weight), "cycles": number}
    return described

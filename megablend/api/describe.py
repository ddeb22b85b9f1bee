"""describe: what a run will read, before it runs; what a cache holds."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from megablend.api.check import check_store
from megablend.api.manage_runs import list_runs
from megablend.api.runs import ConfigLike, newest_snapshot
from megablend.api.warn import find_warnings, warn_of_amplification
from megablend.api.what_if import foresee_run, list_files
from megablend.config import SPLITS, load_config
from megablend.config.numbers import whole_number
from megablend.errors import CacheError, ConfigError, PlanError, ResourceError
from megablend.index.document_table import table_bytes
from megablend.index.list_snapshots import list_snapshots
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.plan.fitting_lanes import fitting_lanes, unfit_lanes
from megablend.plan.run import Run, as_promised, plan_run
from megablend.plan.shares import samples_in
from megablend.prefetch.read_amplification import read_amplification
from megablend.system.failures import translating

FORESEEN_SAMPLES = 1 << 16
"""Of which read amplification is told: some cycles, in some tenths of a second."""


@translating("describe")
def describe(
    what: ConfigLike,
    *,
    cache: str | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int = 1,
    num_workers: int = 0,
) -> dict[str, Any]:
    """A run (for a config) or a cache (for its folder), as a JSON-able dict.

    Nothing needs to be built: a run that is not committed is described as `build` would commit it, with `committed` False and a
    `note`; where no index holds its sources, `files` tells of what is there.

    Args:
        cache: in place of the config's `cache`.
        micro_batch_size, data_parallel_size, num_workers: of the loaders whose steps and read amplification are to be told.

    Raises: as `build` where the config cannot be planned; CacheError for a folder that holds no index; ConfigError where a
        number is out of range, or memory too small for the loaders.
    """
    for name, value, least in (("data_parallel_size", data_parallel_size, 1), ("num_workers", num_workers, 0)):
        whole_number(name, value, least=least)
    if micro_batch_size is not None:
        whole_number("micro_batch_size", micro_batch_size, least=1)
    if isinstance(what, str | Path) and Path(what).is_dir():
        if cache is not None:
            raise ConfigError(f"found the folder of a cache, {what}, and cache={str(cache)!r}, expected one of them")
        return describe_cache(str(what))
    config = load_config(what, cache=cache)
    foreseen = foresee_run(config)
    named = {"cache": config.cache, "run": config.run, "order": config.order, "sequence_length": config.sequence_length}
    if isinstance(foreseen, str):
        return {**named, "committed": False, "note": foreseen, "files": list_files(config)}
    run = foreseen.run
    splits, warnings = {"train": describe_run(run)}, find_warnings(run)
    for split in SPLITS[1:]:
        if config.listed_by_split and split not in config.sources:
            continue
        if config.listed_by_split or config.shares[SPLITS.index(split)] > 0:
            try:
                other = as_promised(plan_run(config, split, run.store), run.ledger)
                splits[split] = describe_run(other)
                warnings += find_warnings(other)
            except PlanError as error:
                splits[split] = {"samples": 0, "problem": str(error)}
    found: dict[str, Any] = {
        **named,
        "committed": foreseen.committed,
        "note": foreseen.note,
        "plan": run.ledger.digest,
        "stages": list(run.ledger.ends),
        "lanes": config.lanes,
        "index": _describe_generation(run.store.generation, config.cache),
        "splits": splits,
        "problems": list(check_store(config, run.store).problems),
        "warnings": warnings,
    }
    if micro_batch_size is not None:
        loaders = {
            "micro_batch_size": micro_batch_size,
            "data_parallel_size": data_parallel_size,
            "num_workers": num_workers,
        }
        for described in splits.values():
            described["steps"] = described["samples"] // (micro_batch_size * data_parallel_size)
        found["read_amplification"] = read_amplification(
            run,
            **loaders,
            first=0,
            stop=min(run.num_samples, FORESEEN_SAMPLES),
        )
        warnings += warn_of_amplification(config, found["read_amplification"])
        if problem := unfit_lanes(config.lanes, **loaders):
            warnings.append(problem)
        found["fitting_lanes"] = fitting_lanes(config.lanes, **loaders)
    return found


def describe_cache(cache: str) -> dict[str, Any]:
    """Generations and runs of a cache. Of those that cannot be read: what is wrong with them, as `problem`."""
    digests = list_snapshots(cache)
    if not digests:
        newest_snapshot(cache)  # says what is missing
    return {
        "cache": str(Path(cache).absolute()),
        "indices": [_describe_index(cache, digest) for digest in digests],
        "runs": list_runs(cache),
    }


def _describe_index(cache: str, digest: str) -> dict[str, Any]:
    """An index of a cache, or what is wrong with it."""
    try:
        with translating(cache):
            return _describe_generation(open_snapshot(cache, digest), cache)
    except (CacheError, ResourceError) as error:
        return {"digest": digest, "problem": str(error)}


def describe_run(run: Run) -> dict[str, Any]:
    """Sources of one split: what there is, what was wanted, what is given."""
    length, extra = run.config.sequence_length, int(run.config.add_extra_token_to_sequence)
    counts = run.plan.counts(run.num_samples).tolist()
    sources, run_out = [], []
    for number, (source, part, samples) in enumerate(zip(run.sources, run.parts, counts, strict=True)):
        tokens = int(part["tokens"])
        used = samples * length + extra if samples else 0
        one_pass = samples_in(
            tokens, length, extra
        )  # the next one reads a token again, and may come before some of these
        if run.is_blended and (again := run.plan.first_sample_from(number, one_pass)) is not None:
            run_out.append((again, source.name))
        wanted = run.weights[number] if run.weights else Fraction(samples, run.num_samples)
        sources.append(
            {
                "name": source.name,
                "blocks": int(part["stop_block"] - part["first_block"]),
                "documents": int(part["documents"]),
                "tokens": tokens,
                "share_wanted": float(wanted),
                "share_given": samples / run.num_samples,
                "samples": samples,
                "epochs": used / tokens if tokens else 0.0,
                "max_epochs": None if source.max_epochs is None else float(source.max_epochs),
                "unread_tokens_of_last_epoch": -used % tokens if tokens else 0,
            }
        )
    first = min(run_out, default=None)
    return {
        "samples": run.num_samples,
        "tokens": run.num_samples * length,
        "blended": run.is_blended,
        "first_to_run_out": None if first is None else {"source": first[1], "sample": first[0]},
        "sources": sources,
    }


def _describe_generation(generation: Snapshot, cache: str) -> dict[str, Any]:
    folder = Path(cache) / "generations" / generation.digest
    sources = [
        {
            "name": entry.name,
            "format": entry.format,
            "column": entry.column,
            "column_taken": entry.column_taken,
            "skipped": list(entry.skipped),
            "files": len(entry.files),
            "blocks": len(entry.blocks),
            "rows": entry.rows,
            "tokens": entry.tokens,
            "document_table_bytes": table_bytes(generation, number),
            "extra_columns": [each.column for each in entry.extra_columns],
        }
        for number, entry in enumerate(generation.sources)
    ]
    return {
        "digest": generation.digest,
        "index_bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        **{name: sum(source[name] for source in sources) for name in ("files", "blocks", "rows", "tokens")},
        "sources": sources,
    }

"""Statistics of a Loader: the progress by source, which is computed from the plan, and the reads of
its own process and of its workers."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.data

from megablend.arrays import Float64s, Int64s
from megablend.errors import ConfigError
from megablend.prefetch.read_counts import ReadCounts
from megablend.reader.batch_dataset import BatchDataset
from megablend.reader.transform import Transform, apply_to_batch
from megablend.run.run import Run
from megablend.run.skips import Skips
from megablend.system.atomic_write import replace_file
from megablend.system.failures import translating

T = TypeVar("T")


class CountedBatch(NamedTuple):
    """A batch from a worker, with the read counters of the worker."""

    batch: Any
    counts: ReadCounts


class CountedSteps(torch.utils.data.Dataset[CountedBatch]):
    """A dataset of batches with their read counters, for the workers of a DataLoader. Batches are
    transformed in the process that reads them.

    Args:
        steps: the batches before the transform, indexed by lists of sample numbers.
        transform: the function that is applied to each sample, if any.
    """

    def __init__(self, steps: BatchDataset, transform: Transform | None) -> None:
        self._steps = steps
        self._transform = transform

    def __getitem__(self, ks: list[int]) -> CountedBatch:
        """Return the batch of samples `ks`. Raises: the errors of the steps; TransformError."""
        batch: Any = self._steps[ks]
        if self._transform is not None:
            batch = apply_to_batch(self._transform, batch, ks)
        with translating(f"the batch of sample {ks[0]}" if ks else "a padding sample"):
            _share(batch)
        return CountedBatch(batch, self._steps.meter.take())


def collate_shared(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Collate samples in a worker of torch's DataLoader, and share the batch; see `_share`. Raises:
    ResourceError if shared memory has no room; the errors of `collate_fn`."""
    batch = collate_fn(samples)
    with translating("a batch of the collate_fn"):
        _share(batch)
    return batch


def _share(value: Any) -> None:
    """Move the tensors of a batch to shared memory. A worker's queue would do so later, in a thread
    whose errors only it prints, while the trainer waits for ever."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout == torch.strided:
            value.share_memory_()  # type: ignore[no-untyped-call]
    elif isinstance(value, Mapping):
        for item in value.values():
            _share(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _share(item)


class LoaderCounts:
    """Counters of a Loader since it was created; they are not part of the Loader's state."""

    def __init__(self) -> None:
        self.batches = 0
        """Number of batches yielded."""
        self.waiting_seconds = 0.0
        """Time in seconds spent waiting for the next batch."""
        self.reads = ReadCounts()
        """Read counters of this process, and of the workers as far as their batches have
        arrived."""

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, counting them and the time spent waiting for them."""
        coming = iter(batches)
        while True:
            started = perf_counter()
            try:
                batch = next(coming)
            except StopIteration:
                return
            self.waiting_seconds += perf_counter() - started
            self.batches += 1
            yield batch


def describe_progress(
    run: Run, consumed_samples: int, skips: Skips | None = None
) -> dict[str, Any]:
    """Describe the progress of a run after `consumed_samples` samples, over all ranks and restarts.
    The numbers are exact, since they are computed from the plan.

    Args:
        skips: ranges of samples that are not trained on, and not counted by source.

    Returns: run, split, consumed_samples, num_samples, and sources. `sources` is a list of dicts
        with name, dataset_id, samples, tokens, epochs, share (of the samples trained on so far; 0
        before the first) and planned_share (the share that the stages so far plan; before the first
        sample, that of the first stage).
    """
    skips = skips or Skips()
    samples = _count_trained(run.plan.counts, consumed_samples, skips).tolist()
    tokens_read = _count_trained(run.plan.count_tokens, consumed_samples, skips).tolist()
    trained = skips.count_trained(consumed_samples)
    planned = _plan_shares(run, max(1, consumed_samples)).tolist()
    return {
        "run": run.ledger.run,
        "split": run.split,
        "consumed_samples": consumed_samples,
        "num_samples": run.num_samples,
        "sources": [
            {
                "name": source.name,
                "dataset_id": i,
                "samples": samples[i],
                "tokens": tokens_read[i],
                "epochs": tokens_read[i] / tokens if tokens else 0.0,
                "share": samples[i] / trained if trained else 0.0,
                "planned_share": planned[i],
            }
            for i, (source, tokens) in enumerate(zip(run.sources, run.data.tokens, strict=True))
        ],
    }


def _plan_shares(run: Run, count: int) -> Float64s:
    """Return the shares of the sources that the stages plan for the first `count` samples, as
    float64 [num_sources].

    Complete stages count with their actual samples. The last stage may be incomplete; it counts as
    if its samples so far had the shares of the whole stage.
    """
    last = bisect.bisect_left(run.ledger.ends, count)
    last = min(last, len(run.ledger.ends) - 1)
    start = run.ledger.starts[last]
    stop = run.ledger.ends[last]
    complete = run.plan.counts(start)
    reached_part = (count - start) / max(1, stop - start)
    in_last = (run.plan.counts(stop) - complete) * reached_part
    shares: Float64s = (complete + in_last) / count
    return shares


def _count_trained(count: Callable[[int], Int64s], consumed_samples: int, skips: Skips) -> Int64s:
    """Apply `count` to the first `consumed_samples` samples, and subtract the counts of skipped
    samples. Returns: int64 [num_sources].

    Args:
        count: returns a count for each source (int64 [num_sources]) in the first samples of the
            run, given the number of these samples.
    """
    total = count(consumed_samples)
    for start, stop in skips.ranges:
        if start < consumed_samples:
            total = total - (count(min(stop, consumed_samples)) - count(start))
    return total


def append_stats(stats: dict[str, Any], path: str | Path) -> None:
    """Append the result of `Loader.stats` to a JSON Lines file.
    Raises: OSError if the file cannot be written."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(stats, separators=(",", ":")) + "\n")


def write_prometheus(stats: dict[str, Any], path: str | Path) -> None:
    """Write the result of `Loader.stats` to `path` atomically in Prometheus text format, for
    node_exporter's textfile collector.

    Raises: ConfigError if prometheus_client is not installed; CacheError if the file cannot
        be written.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest
    except ImportError:
        raise ConfigError(
            "write_prometheus needs prometheus_client: pip install 'megablend[prometheus]'"
        ) from None
    registry = CollectorRegistry()
    of_run = {"run": stats["run"], "split": stats["split"], "rank": str(stats["rank"])}
    for name in ("consumed_samples", "num_samples", "batches", "waiting_seconds"):
        gauge = Gauge(
            f"megablend_{name}", f"{name} of megablend.Loader.stats", of_run, registry=registry
        )
        gauge.labels(**of_run).set(stats[name])
    for name, value in (stats["reads"] or {}).items():
        gauge = Gauge(
            f"megablend_read_{name}",
            f"reads.{name} of megablend.Loader.stats",
            of_run,
            registry=registry,
        )
        gauge.labels(**of_run).set(value)
    for name in ("samples", "tokens", "epochs", "share", "planned_share"):
        labels = [*of_run, "source"]
        gauge = Gauge(f"megablend_source_{name}", f"{name} of a source", labels, registry=registry)
        for source in stats["sources"]:
            gauge.labels(**of_run, source=source["name"]).set(source[name])
    replace_file(Path(path), generate_latest(registry), "the statistics")

"""Descriptions for pages: as `describe` gives them, without a build."""

from __future__ import annotations

from typing import Any

from megablend.inspect.description import (
    IndexDescription,
    RunDescription,
    SourceDescription,
    SplitDescription,
    StageDescription,
    StageSource,
)
from megablend.operations.skip import SkippedSamples

HOSTILE = "<b>x&'$\"</b>"
"""A name that is none of HTML's, matplotlib's or CSS's business."""


def source(name: str, number: int, count: int, **changes: Any) -> SourceDescription:
    share = 1 / count
    values: dict[str, Any] = {
        "name": name,
        "blocks": 3,
        "documents": 10 + number,
        "tokens": 1000 * (number + 1),
        "requested_share": share,
        "actual_share": share,
        "samples": 100,
        "epochs": 0.8 / (number + 1),
        "max_epochs": None,
        "tokens_left_in_epoch": 5,
        "tokens_read": 800 - number,
        "stored_bytes": 1 << 20,
        "max_tokens": None,
        "most_samples": None,
        "first_sample": number,
        "last_sample": 100 * count - number - 1,
        "epoch_ends": (50 * count,) if number % 3 == 0 else (),
        "worst_prefix_error": 0.75,
    }
    return SourceDescription(**values | changes)


def stage(start: int, stop: int, names: list[str]) -> StageDescription:
    share = 1 / len(names)
    return StageDescription(
        start=start,
        stop=stop,
        sequence_length=8,
        lanes=4,
        sources=tuple(
            StageSource(
                name=name,
                share=share,
                actual_share=share,
                samples=10,
                tokens=80,
                first_sample=start,
                last_sample=stop - 1,
                worst_prefix_error=0.5,
            )
            for name in names
        ),
    )


def run(count: int, **changes: Any) -> RunDescription:
    """A run of so many sources; the first has a hostile name."""
    names = [
        HOSTILE,
        "a-name-that-is-much-too-long-for-a-chart",
        *(f"source-{i}" for i in range(2, count)),
    ][:count]
    split = SplitDescription(
        samples=100 * count,
        tokens=800 * count,
        blended=True,
        first_repeated_source=None,
        sources=tuple(source(name, i, count) for i, name in enumerate(names)),
        steps=25,
        stages=(stage(0, 40 * count, names), stage(40 * count, 100 * count, names)),
    )
    values: dict[str, Any] = {
        "cache": "/data/cache",
        "run": "demo",
        "order": "block",
        "sequence_length": 8,
        "committed": True,
        "note": None,
        "plan": "0" * 32,
        "stages": (40 * count, 100 * count),
        "skips": (SkippedSamples(start=8, stop=16, samples=8, tokens=64, by_source={}),),
        "lanes": 4,
        "index": IndexDescription(
            digest="1" * 32, index_bytes=1, files=2, blocks=3, rows=4, tokens=5, sources=()
        ),
        "splits": {"train": split},
        "problems": (),
        "warnings": (f"source {HOSTILE!r} is read more than 16 times",),
        "read_amplification": 1.07,
        "fitting_lanes": 4,
        "memory_per_rank": 1 << 20,
        "memory_limit_per_rank": 1 << 30,
    }
    return RunDescription(**values | changes)

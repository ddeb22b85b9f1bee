"""Stages drawn at random."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from tests.behaviour.histories.job import Job, Requested, draw_masks


def draw_stage(job: Job) -> tuple[dict[str, Any], Requested]:
    """A next stage, and what it requests."""
    rng = job.rng
    files = job.files
    stage: dict[str, Any] = {"samples": len(job.dataset) + 32 * rng.randrange(4, 9)}
    if rng.random() < 0.15:
        return stage, job.requested[-1]
    weights = list(job.requested[-1].weights)
    renamed = None
    if rng.random() < 0.6:
        renamed = files.change()
        stage["new_data"] = True
    living = [s for s in range(files.num_sources) if files.list_files(s)]
    weights += [Fraction(0)] * (files.num_sources - len(weights))
    if len(living) > 2 and rng.random() < 0.15:
        # an index has the new name of a renamed file only if its source is still there
        may_go = [
            source
            for source in living
            if source < len(job.requested[-1].weights) and source != renamed
        ]
        gone = rng.choice(may_go)
        files.withdraw(gone)
        living.remove(gone)
        weights[gone] = Fraction(0)
        stage["withdraw"] = [f"s{gone}"]
    for source in living:
        weights[source] = Fraction(rng.randrange(0, 4))
    if "new_data" in stage and files.lost_by in living and rng.random() < 0.5:
        # What is left of its epoch comes later, perhaps after further changes
        weights[files.lost_by] = Fraction(0)
    if not any(weights):
        weights[living[0]] = Fraction(1)
    stage["sources"] = {f"s{s}": {"weight": weights[s]} for s in living}
    for key, chance, values in (
        ("lanes", 0.3, (2, 4, 8)),
        ("shuffle_window", 0.2, (1, 2, 4)),
        ("sequence_length", 0.6 if "withdraw" in stage else 0.25, (5, 8, 16)),
        ("order", 0.2, ("block", "document", "sequential")),
    ):
        if rng.random() < chance:
            stage[key] = rng.choice(values)
    if rng.random() < 0.2:
        stage |= draw_masks(rng)
    draw_limits(rng, stage, living, is_withdrawn="withdraw" in stage)
    return stage, Requested(len(files.snapshots) - 1, tuple(weights))


def draw_limits(
    rng: random.Random, stage: dict[str, Any], living: list[int], *, is_withdrawn: bool
) -> None:
    """Perhaps a schedule, or caps of a source."""
    stage["on_exhausted"] = "error"
    if not is_withdrawn and rng.random() < 0.25:
        stage |= {"schedule": rng.choice(["linear", "cosine"]), "steps": rng.choice([2, 3, 8])}
    for source in living:
        cap = stage["sources"][f"s{source}"]
        cap |= {"max_epochs": None, "max_tokens": None}
        if rng.random() < 0.4:
            cap |= rng.choice(
                [
                    {"max_epochs": rng.choice([1, 1.5, 2.25, 4])},
                    {"max_tokens": rng.randrange(400, 4000)},
                ]
            )
            stage["on_exhausted"] = (
                "error"
                if "schedule" in stage
                else rng.choice(["error", "redistribute", "redistribute"])
            )


def change_caps(job: Job, stage: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a stage says of its sources, to be changed."""
    living = [
        source for source in range(len(job.requested[-1].weights)) if job.files.list_files(source)
    ]
    found: dict[str, dict[str, Any]] = stage.setdefault(
        "sources", {f"s{source}": {} for source in living}
    )
    return found


def ease(job: Job, stage: dict[str, Any], requested: Requested) -> Requested:
    """Change a stage that cannot be, as its error says. Returns: what it requests now."""
    said = job.refused
    number = len(job.stages)
    if "where the length of samples changes" in said and "sequence_length" in stage:
        del stage["sequence_length"]
    elif said.startswith("stages[") and not said.startswith(f"stages[{number}]"):
        job.amends_late = True  # a stage that had not begun cannot be planned from so early on
    elif "end later" in said:
        stage["samples"] += 256  # it would end within a drain
    elif "so it cannot have steps" in said:
        stage["schedule"] = None
        stage.pop("steps", None)
    elif "would have been read" in said or "allow" in said:
        for each in change_caps(job, stage).values():
            each |= {"max_epochs": None, "max_tokens": None}
        stage["on_exhausted"] = "error"
    elif "gets none of" in said:
        source = int(said.partition("source 's")[2].partition("'")[0])
        caps = change_caps(job, stage)
        if f"s{source}" not in caps:  # its files are gone, but a schedule begins with its share
            stage["schedule"] = None
            stage.pop("steps", None)
            return requested
        weights = [
            Fraction(0) if number == source else each
            for number, each in enumerate(requested.weights)
        ]
        caps[f"s{source}"]["weight"] = 0
        return requested._replace(weights=tuple(weights))
    elif "has no document counts" in said:
        del stage["order"]
    elif "would change nothing" in said:
        stage["shuffle_window"] = 3 + job.rng.randrange(9)
        job.amends_late = (
            True  # perhaps it is the stage before this one that has not begun, and changes nothing
        )
    else:
        raise AssertionError(said)
    return requested

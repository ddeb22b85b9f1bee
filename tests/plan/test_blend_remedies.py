"""What the messages about mistakes in blends say to do is done, word for word; and then the config is planned."""

from __future__ import annotations

from typing import Any

import pytest

import megablend
from tests.plan.test_blend_mistakes import (
    CONFIG_ERRORS,
    COUNTS,
    EPOCHS,
    NOTES,
    ONCE,
    PLAN_ERRORS,
    TOKENS,
    Mistake,
    apply,
)

Change = dict[str, Any]
SIZES = {name: {"weight": "size"} for name in ("s0", "s1", "s2")}
WEB = {"name": "s0", "weight": 1}
BY_SPLIT: Change = {"sources": {"train": [WEB], "valid": [WEB | {"name": "v"}]}}
STAGE: Change = {"sources": {"s0": {"weight": 1}}}
CAPPED: list[Change] = [
    {"samples": 81},
    {"s0": {"max_epochs": "2.4025"}},
    {"s0": {"max_epochs": 1, "weight": 1}},
    {"on_exhausted": "redistribute"},
    {name: {"weight": weight} for name, weight in (("s0", "0.245"), ("s1", "0.56625"), ("s2", "0.18875"))}
    | {"s0": {"weight": "0.245", "max_epochs": 1}},
]
OTHER_RUN: list[Change] = [{"run": "next"}]

REMEDIES: dict[str, list[Change]] = {
    # by the name of the mistake: changes that take the place of its own, one for each way out that the message names
    "weights, but no length": [{"samples": 9}, {"tokens": 80}, {"epochs": 1}],
    "two lengths": [{"epochs": None}, {"samples": None}],
    "shares in different units": [{"s1": {"weight": 3}}, EPOCHS],
    "two shares of one source": [
        {"s0": {"weight": 1}},
        *(
            {"samples": None, **units, "s0": {"weight": None, unit: 8}}
            for unit, units in (("tokens", TOKENS), ("samples", COUNTS))
        ),
        {**EPOCHS, "s0": {"weight": None, "epochs": 2}},
    ],
    "a source without a share": [{"s1": {"weight": 1}}, TOKENS, COUNTS, EPOCHS],
    "no share at all": [{"s1": {"weight": 1}}],
    "a negative weight": [{"s0": {"weight": 0}}, {"s0": {"weight": 1}}],
    "a weight that is no number": [{"s0": {"weight": 0.5}}, SIZES],
    "an infinite weight": [{"s0": {"weight": 1e9}, "samples": "1e10"}, SIZES],
    "a percentage": [{"s0": {"weight": 0.5}}, SIZES],
    "a weight for each stage": [{"s0": {"weight": 1}}],
    "a misspelt key": [{"s0": {"weight": 1}}],
    "a key of torchtitan": [{"s0": {"weight": 1}}],
    "a key of datasets": [{"s0": {"weight": 1}}],
    "a key of Streaming": [{**EPOCHS, "s0": {"weight": None, "epochs": 2}}],
    "weights apart from the sources": [
        {"weights": None, "s0": {"weight": 6}, "s1": {"weight": 3}, "s2": {"weight": 1}}
    ],
    "a blend as Megatron's argument has it": [{"sources": [WEB]}],
    "a blend of pairs": [{"sources": [WEB]}],
    "sources by their names": [{"sources": [WEB]}],
    "the length in training steps": [{"samples": 10, "train_iters": None}],
    "two sources of one name": [{"s1": {"name": "s9"}}],
    "exhaustion as datasets calls it": [
        {"on_exhausted": kind, "s1": {"max_epochs": 1}} for kind in ("error", "redistribute")
    ],
    "exhaustion without a cap": [{"s0": {"max_epochs": 1}}, {"s0": {"max_tokens": 80}}, {"on_exhausted": None}],
    "a cap of 0 to leave a source out": [{"s0": {"max_epochs": 3}}],
    "sizes and numbers as weights": [
        SIZES,
        {"s0": {"weight": 6}},
        {"s0": {"weight": "size"}} | {name: {"weight": 0} for name in ("s1", "s2")},
    ],
    "a temperature for epochs": [{"samples": 200} | SIZES | {"tiny": {"weight": 0}}, {"temperature": None}],
    "a temperature of 0": [{"temperature": value} for value in (0.1, 0.5, 2)],
    "a validation split of nothing": [{"split": "90,10,0"}, BY_SPLIT],
    "a split of nothing": [{"split": "95,5,0"}],
    "a stage of a source that is not listed": [
        {"sources": [WEB, WEB | {"name": "s9", "weight": 0}], "samples": 160},
    ],
    "another seed in a stage": [{"stages": [{"samples": 100}, {}], "seed": 3, "run": "next"}],
    "a stage without an end": [
        {"stages": [STAGE | end, {}]} for end in ({"samples": 80}, {"tokens": 800}, {"share": 0.5})
    ],
    "a stage longer than the run": [{"stages": [{"share": 0.5}, {}]}, {"stages": [{"share": 1}]}],
    "a stage's end in training steps": [{"stages": [{"samples": 100}, {}]}],
    "more of a source than its cap": CAPPED,
    "the same, in tokens": [
        {"samples": 83},
        {"s0": {"max_tokens": 960}},
        {"s0": {"max_tokens": 400, "weight": 1}},
        {"on_exhausted": "redistribute"},
    ],
    "more than all sources together": [
        {"samples": 81},
        {"on_exhausted": "redistribute", "samples": 347},
        {name: {"max_epochs": 99} for name in ONCE},
    ],
    "more than all, redistributed": [{"samples": 347}, {"s0": {"max_epochs": 99}, "s1": {"max_epochs": 1}}, {"s0": {}}],
    "more epochs than the cap": [
        {"samples": 297},
        {"s0": {"weight": None, "epochs": 3, "max_epochs": "2.9825"}},
        {"s0": {"weight": None, "epochs": 1, "max_epochs": 2}},
        {"on_exhausted": "redistribute"},
    ],
    "a share too small for a sample": [{"samples": 7_000_000_001}, {"s1": {"weight": 1}}, {"s1": {"weight": 0}}],
    "an amount less than a sample": [{"s0": {"weight": None, "tokens": tokens}} for tokens in (8, 0)],
    "half a sample": [{"s0": {"weight": None, "samples": 2}}, {"samples": 9}],
    "a run shorter than a sample": [{"tokens": 80}],
    "a split that leaves train nothing": [{"split": "50,50,0"}],
    "a split that rounds to nothing": [{"split": "50,50,0"}],
    "tokens where samples are meant": [{"samples": 1_125_899_906_842_623}],
    "a stage that ends before it begins": [{"stages": [{"samples": 100}, {"samples": 148}, {}]}],
    "a stage that ends within a step of lanes": [{"stages": [{"samples": end}, STAGE]} for end in (100, 104)],
    # what is restored or goes into another run
    "another mix in the middle of a run": [*OTHER_RUN, {"s0": {}}],
    "a source withdrawn from a run": [*OTHER_RUN, {"sources": 4}],
    "another sequence length in a run": [*OTHER_RUN, {"sequence_length": 8}],
    "another seed on resuming": [*OTHER_RUN, {"seed": 7}],
    "another split on resuming": [*OTHER_RUN, {"split": None}],
    "a run that gets shorter": [*OTHER_RUN, {"samples": 200}],
    # warnings
    "a source read far too often": [{"warnings": {"max_epochs": 61}}, {name: {"max_epochs": 61} for name in ONCE}],
    "a source of 3 tokens": [{"warnings": {"min_source_samples": None}}],
    "lanes that no loader fits": [{"lanes": 16}],
}


def change(base: Change, mistake: Mistake, remedy: Change) -> Change:
    """The config with a remedy in the place of the mistake."""
    config = apply(base, {**mistake.change, **remedy})
    listed = config["sources"]
    for each in listed if isinstance(listed, list) else [source for split in listed.values() for source in split]:
        each.setdefault("path", base["sources"][0]["path"])
    return config


def list_cases(mistakes: list[Mistake]) -> list[Any]:
    """Each remedy, with its mistake."""
    return [
        pytest.param(each, remedy, id=f"{each.name}: {remedy}")
        for each in mistakes
        for remedy in REMEDIES.get(each.name, ())
    ]


@pytest.mark.parametrize(("mistake", "remedy"), list_cases([*CONFIG_ERRORS, *PLAN_ERRORS]))
def test_a_config_that_is_refused(base: Change, mistake: Mistake, remedy: Change) -> None:
    config = change(base, mistake, remedy)
    if mistake in CONFIG_ERRORS:
        megablend.load_config(config)
    else:
        megablend.describe(config)


@pytest.mark.parametrize(("mistake", "remedy"), list_cases(NOTES))
def test_what_is_noted(base: Change, mistake: Mistake, remedy: Change) -> None:
    described = megablend.describe(change(base, mistake, remedy), micro_batch_size=4, data_parallel_size=4)
    assert not any(mistake.message in line for line in (str(described["note"]), *described["warnings"]))


def test_every_refusal_has_a_remedy() -> None:
    changes = [(str(mistake.change), mistake.name) for mistake in (*CONFIG_ERRORS, *PLAN_ERRORS)]
    done = {change for change, name in changes if REMEDIES.get(name)}
    assert {change for change, _ in changes} == done
    assert REMEDIES.keys() <= {mistake.name for mistake in (*CONFIG_ERRORS, *PLAN_ERRORS, *NOTES)}

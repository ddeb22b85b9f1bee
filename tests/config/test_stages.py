"""The `stages` of a config: what each changes, and a clear refusal of what cannot change within a run."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megablend.config import load_config
from megablend.errors import ConfigError

BASE: dict[str, Any] = {
    "cache": "c",
    "sequence_length": 8,
    "sources": [
        {"name": "web", "path": "/w.arrow", "weight": 3},
        {"name": "code", "path": "/c.arrow", "weight": 1},
    ],
}


def load(stages: list[Any], **settings: Any) -> Any:
    return load_config(BASE | {"stages": stages} | settings)


def test_what_a_stage_does_not_change_stays_as_before() -> None:
    config = load(
        [
            {"samples": 100},
            {"share": 0.5, "lanes": 16, "sources": {"code": {"weight": 2, "max_epochs": 4}}},
            {"sequence_length": 16, "eod_mask_loss": True, "sources": {"web": {"weight": 0}}},
        ],
        samples=1000,
        eod_token=0,
    )
    first, second, third = config.stage_configs
    assert [
        (each.lanes, each.sequence_length, each.eod_mask_loss) for each in config.stage_configs
    ] == [
        (8, 8, False),
        (16, 8, False),
        (16, 16, True),
    ]
    assert [[s.weight for s in each.sources["train"]] for each in (first, second, third)] == [
        [3, 1],
        [3, 2],
        [0, 2],
    ]
    assert [each.sources["train"][1].max_epochs for each in (first, second, third)] == [None, 4, 4]
    assert third.samples is None
    assert third.stage_configs == (third,)
    assert config.stages[1].share == Fraction(1, 2)


def test_a_share_may_change_its_unit_and_a_cap_may_go() -> None:
    sources = {"web": {"epochs": 2, "max_epochs": 2}, "code": {"epochs": 1}}
    config = load(
        [
            {"samples": 64},
            {"sources": sources},
            {"samples": 960, "sources": {"web": {"max_epochs": None}}},
        ]
    )
    assert [[s.unit for s in each.sources["train"]] for each in config.stage_configs] == [
        ["weight"] * 2,
        ["epochs"] * 2,
        ["epochs"] * 2,
    ]
    assert [each.sources["train"][0].max_epochs for each in config.stage_configs] == [None, 2, None]


@pytest.mark.parametrize(
    ("stages", "settings", "says"),
    [
        ([{"samples": 8, "seed": 3}], {}, "stages[0]: seed cannot change within a run"),
        (
            [{"samples": 8}, {"samples": 16, "split": "9,1"}],
            {},
            "stages[1]: split cannot change within a run",
        ),
        (
            [{"samples": 8, "interleaving": "sequential"}],
            {},
            "stages[0]: interleaving cannot change within a run",
        ),
        (
            [{"samples": 8, "sources": {"web": {"append_eod": 0}}}],
            {},
            "stages[0].sources.web: append_eod cannot change within a run",
        ),
        (
            [{"samples": 8, "sources": {"web": {"column": "x"}}}],
            {},
            "stages[0].sources.web: column cannot change within a run",
        ),
        (
            [{"samples": 8, "sources": {"web": {"documents": "file"}}}],
            {},
            "stages[0].sources.web: documents cannot change within a run",
        ),
        (
            [{"samples": 8, "sources": {"web": {"vocab_size": 9}}}],
            {},
            "stages[0].sources.web: vocab_size cannot change within a run; set it in `sources`, for all stages",
        ),
        ([{"samples": 8, "lane": 3}], {}, "stages[0].lane: unknown key; did you mean 'lanes'?"),
        (
            [{"samples": 8, "sources": {"web": {"waight": 3}}}],
            {},
            "sources.web.waight: unknown key; did you mean 'weight'?",
        ),
        (
            [{"samples": 8, "sources": {"wep": {"weight": 3}}}],
            {},
            "stages[0]: train has no source 'wep'; did you mean 'web'?",
        ),
        (
            [{"samples": 8, "sources": [{"name": "web", "weight": 3}]}],
            {},
            "stages[0].sources: found a list, expected the changes for each source, as in `sources: {web: {weight: "
            "2}}`",
        ),
        (
            [{"samples": 8, "tokens": 64}],
            {},
            "stages[0]: the stage's end is given by samples and tokens; keep only one",
        ),
        (
            [{"samples": 8}, {"lanes": 2}],
            {},
            "samples: missing; weights do not say how many samples the run has",
        ),
        ([{}, {"samples": 80}], {}, "stages[0]: has no end, and weights do not say where it ends"),
        (
            [{"share": 0.5}, {"samples": 80}],
            {},
            "stages[0]: share is a fraction of the run's length, which is not set",
        ),
        (
            [{"share": 1.5}],
            {"samples": 80},
            "stages[0].share: found 1.5, expected a share of the run",
        ),
        (
            [{"samples": 80}],
            {"samples": 80},
            "samples: the last stage already sets the end of the run; remove one",
        ),
        (
            [{"from": 3, "samples": 80}],
            {},
            "stages[0]: found `from`, but the first stage begins at sample 0",
        ),
        (
            [{"samples": 8, "sources": {"web": {"epochs": 1}}}],
            {},
            "stages[0]: sources.train[1]: mixed units ('web' epochs, 'code' weight)",
        ),
        (
            [{"samples": 8, "steps": 4}],
            {},
            "stages[0]: steps apply to a schedule only; add `schedule: linear`",
        ),
        (
            [{"samples": 8, "schedule": "sine"}],
            {},
            "stages[0].schedule: found 'sine', expected 'linear' or 'cosine'",
        ),
        (
            [{"samples": 8, "schedule": "linear", "steps": 257}],
            {},
            "stages[0].steps: found 257, expected at most 256",
        ),
        (
            [{"samples": 8, "schedule": "linear", "sources": {"web": {"max_epochs": 1}}}],
            {
                "on_exhausted": "redistribute",
                "sources": [BASE["sources"][0] | {"max_epochs": 2}, BASE["sources"][1]],
            },
            "stages[0]: schedule: shares that change step by step cannot be redistributed",
        ),
        (
            [{"samples": 8, "eod_mask_loss": True}],
            {},
            "stages[0]: eod_token: missing; eod_mask_loss needs to know",
        ),
        (
            [{"samples": 8, "sequence_length": 0}],
            {},
            "stages[0].sequence_length: found 0, expected more than 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(
    stages: list[Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(stages, **settings)


def test_the_line_of_a_stage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "cache: c\nsequence_length: 8\nsources:\n  - {name: web, path: w.arrow, weight: 1}\n"
        "stages:\n  - samples: 80\n  - samples: 160\n    sources: {wep: {weight: 1}}\n"
    )
    with pytest.raises(ConfigError, match=r"run.yaml:7: stages\[1\]: train has no source 'wep'"):
        load_config(path)


def test_a_stage_may_change_how_shares_are_computed() -> None:
    first, second = load(
        [
            {"samples": 64},
            {
                "samples": 128,
                "temperature": 2,
                "on_exhausted": "redistribute",
                "sources": {"web": {"max_epochs": 2}},
            },
        ]
    ).stage_configs
    assert (first.temperature, first.on_exhausted) == (None, "error")
    assert (second.temperature, second.on_exhausted) == (2, "redistribute")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"samples": 64, "new_data": True}], "stages\\[0\\]: found `new_data`"),
        ([{"samples": 64}, {"samples": 128, "withdraw": ["s7"]}], "train has no source 's7'"),
        (
            [
                {"samples": 64},
                {"samples": 128, "withdraw": ["web"], "sources": {"web": {"weight": 1}}},
            ],
            "keep only one of the two",
        ),
        (
            [
                {"samples": 64},
                {"samples": 128, "withdraw": ["web"]},
                {"samples": 192, "sources": {"web": {"weight": 1}}},
            ],
            "was withdrawn in stages\\[1\\]",
        ),
    ],
)
def test_data_that_cannot_change_so_is_refused(stages: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(stages)

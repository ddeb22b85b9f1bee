"""What happens where a source's share exceeds its cap, from the config to the samples that are read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.runs import make_config, read_samples, write_source

TOKENS = (400, 800, 1600)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Three sources of 49, 99 and 199 whole samples of 8 tokens, with weights 6, 3, 1."""
    listed = [[list(range(d * 10**5, d * 10**5 + n))] for d, n in enumerate(TOKENS)]
    sources = [
        write_source(tmp_path, d, "arrow", documents, num_files=1) | {"weight": weight}
        for d, (documents, weight) in enumerate(zip(listed, (6, 3, 1), strict=True))
    ]
    return make_config(tmp_path, sources, samples=200, warnings={"max_epochs": None})


def counts(config: dict[str, Any]) -> dict[str, int]:
    """Samples of each source that a build commits, which a walk over the run confirms."""
    megablend.build(config)
    dataset = megablend.open(config)
    described = megablend.describe(config).to_dict()["splits"]["train"]["sources"]
    planned = {source["name"]: source["samples"] for source in described}
    walked = Counter(dataset.sources[each.source] for each in read_samples(dataset))
    assert planned == {name: walked[name] for name in planned}
    return planned


def test_without_a_cap_sources_repeat(config: dict[str, Any]) -> None:
    assert counts(config) == {"s0": 120, "s1": 60, "s2": 20}


def test_the_excess_goes_to_the_others_by_weight(config: dict[str, Any]) -> None:
    config["sources"][0]["max_epochs"] = 1
    assert counts(config | {"on_exhausted": "redistribute"}) == {"s0": 49, "s1": 113, "s2": 38}
    assert megablend.describe(config | {"on_exhausted": "redistribute"}).to_dict()["committed"]


def test_the_excess_may_exhaust_others(config: dict[str, Any]) -> None:
    config["sources"][0]["max_epochs"] = 1
    config["sources"][1]["max_tokens"] = 808
    assert counts(config | {"on_exhausted": "redistribute"}) == {"s0": 49, "s1": 101, "s2": 50}


def test_the_smaller_cap_counts(config: dict[str, Any]) -> None:
    config["sources"][0] |= {"max_epochs": 2, "max_tokens": 80}
    assert counts(config | {"on_exhausted": "redistribute"})["s0"] == 10


def test_an_error_names_the_longest_run_and_the_nearest_blend(config: dict[str, Any]) -> None:
    config["sources"][0]["max_epochs"] = 1
    with pytest.raises(megablend.PlanError) as caught:
        megablend.build(config)
    text = str(caught.value)
    assert (
        "source 's0' would be read 2.40 times (120 samples of 8 tokens from its 400 tokens)" in text
    )
    assert (
        "more than its max_epochs 1 (49 samples). At most 81 samples fit all caps: set `samples: 81` or less"
        in text
    )
    assert "`on_exhausted: redistribute` gives: s0 0.245, s1 0.56625, s2 0.18875" in text
    assert counts(config | {"samples": 81}) == {"s0": 49, "s1": 24, "s2": 8}
    nearest = [
        source | {"weight": share}
        for source, share in zip(config["sources"], ("0.245", "0.56625", "0.18875"), strict=True)
    ]
    found = megablend.describe(config | {"sources": nearest, "run": "nearest"}).to_dict()["splits"][
        "train"
    ]["sources"]
    assert [source["samples"] for source in found] == [49, 113, 38]


def test_a_cap_in_tokens_is_named(config: dict[str, Any]) -> None:
    config["sources"][0]["max_tokens"] = 800
    with pytest.raises(
        megablend.PlanError,
        match=r"more than its max_tokens 800 \(100 samples\).* set `max_tokens: 960` for it",
    ):
        megablend.build(config)
    config["sources"][0]["max_tokens"] = 960
    assert counts(config)["s0"] == 120


def test_the_longest_run_of_all_caps(config: dict[str, Any]) -> None:
    for source in config["sources"]:
        source["max_epochs"] = 1
    longest = config | {"on_exhausted": "redistribute", "samples": 347}
    with pytest.raises(
        megablend.PlanError,
        match=r"would have 348 samples, but the caps of its sources together allow only 347: set `samples: 347`",
    ):
        megablend.build(longest | {"samples": 348})
    assert counts(longest) == {"s0": 49, "s1": 99, "s2": 199}
    with pytest.raises(
        megablend.PlanError,
        match="with `on_exhausted: redistribute` at most 347 samples fit all caps",
    ):
        megablend.build(config | {"samples": 348, "run": "other"})


def test_weights_by_size_and_temperature(config: dict[str, Any]) -> None:
    for source in config["sources"]:
        source["weight"] = "size"
    assert counts(config | {"samples": 700}) == {"s0": 100, "s1": 200, "s2": 400}
    assert counts(config | {"temperature": 1e6, "samples": 300, "run": "flat"}) == {
        "s0": 100,
        "s1": 100,
        "s2": 100,
    }
    root = counts(config | {"temperature": 2, "samples": 3414, "run": "root"})  # 1 : sqrt(2) : 2
    assert root == {"s0": 773, "s1": 1094, "s2": 1547}
    again = megablend.build(config | {"samples": 700})  # the shares are what the ledger has
    assert again.stages_before == 1


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            {},
            {"on_exhausted": "redistribute"},
            "no source can be exhausted, since none has a cap; give max_epochs or max_tokens",
        ),
        (
            {},
            {"on_exhausted": "stop"},
            "on_exhausted: found 'stop', expected 'error' or 'redistribute'",
        ),
        (
            {"weight": "size"},
            {},
            r"'s1' has weight 3, but other sources have `weight: size`; expected `size` for all",
        ),
        ({"weight": "sizes"}, {}, "found 'sizes', expected a finite number .* or `size`"),
        (
            {},
            {"temperature": 0},
            "temperature: found 0, expected 0.1 or more: above 1 evens weights out",
        ),
    ],
)
def test_what_cannot_be_meant(
    config: dict[str, Any], changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    config["sources"][0] |= changes
    with pytest.raises(megablend.ConfigError, match=message):
        megablend.load_config(config | settings)


def test_temperature_needs_weights(config: dict[str, Any]) -> None:
    for source in config["sources"]:
        del source["weight"]
        source["epochs"] = 1
    with pytest.raises(
        megablend.ConfigError, match="the share of 's0' is given by epochs; use weights"
    ):
        megablend.load_config(config | {"temperature": 2})


def test_stages_keep_full_shares_until_sources_run_out(config: dict[str, Any]) -> None:
    for source in config["sources"][:2]:
        source["max_epochs"] = 1
    assert counts(config | {"on_exhausted": "redistribute"}) == {"s0": 49, "s1": 99, "s2": 52}
    stages = [
        {"samples": 80},
        {"samples": 180, "sources": {"s0": {"weight": 0}}},
        {"sources": {"s1": {"weight": 0}}},
    ]
    assert counts(config | {"stages": stages, "run": "staged"}) == {"s0": 48, "s1": 99, "s2": 53}

"""Mistakes that people make with blends, message by message: what is printed before it costs a run.

Where users of another project asked for it, `thread` names the project and the number of the issue.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import pytest

import megablend


class Mistake(NamedTuple):
    """A config that is not what was meant, and what is said of it."""

    name: str
    change: dict[str, Any]
    """Keys of the config; `s0`, `s1`, `s2` and `tiny` are keys of these sources, None removes a key."""
    message: str
    """A part of the error, or of a note or a warning of `describe`."""
    thread: str = ""


EPOCHS = {name: {"weight": None, "epochs": 1} for name in ("s0", "s1", "s2")} | {"tiny": {"weight": None, "epochs": 0}}
TOKENS = {name: {"weight": None, "tokens": 400} for name in ("s0", "s1", "s2")} | {
    "tiny": {"weight": None, "tokens": 0}
}
COUNTS = {name: {"weight": None, "samples": 5} for name in ("s0", "s1", "s2")} | {
    "tiny": {"weight": None, "samples": 0}
}
ONCE = {name: {"max_epochs": 1} for name in ("s0", "s1", "s2")}

CONFIG_ERRORS = [
    Mistake(
        "weights, but no length",
        {"samples": None},
        "weights are relative and do not set a length; add samples, tokens or epochs",
        "EleutherAI/gpt-neox#992",
    ),
    Mistake(
        "two lengths",
        {"epochs": 1},
        "epochs: the length of train is given by samples already; keep one",
        "NVIDIA/Megatron-LM#1127",
    ),
    Mistake(
        "shares in different units",
        {"s1": {"weight": None, "epochs": 1}},
        "mixed units ('s0' weight, 's1' epochs",
        "NVIDIA-NeMo/Megatron-Bridge#5438",
    ),
    Mistake(
        "two shares of one source",
        {"s0": {"epochs": 2}},
        "source 's0' has weight and epochs; expected one of",
        "microsoft/ltp-megatron-lm#15",
    ),
    Mistake(
        "a source without a share",
        {"s1": {"weight": None}},
        "'s1' has no share; expected one of weight, tokens, samples, epochs",
        "NVIDIA-NeMo/Nemotron#78",
    ),
    Mistake(
        "no share at all",
        {name: {"weight": 0} for name in ("s0", "s1", "s2")},
        "every weight of train is 0; expected at least one above 0",
        "huggingface/datasets#7147",
    ),
    Mistake("a negative weight", {"s0": {"weight": -1}}, "weight: found -1, expected 0 or more"),
    Mistake(
        "a weight that is no number",
        {"s0": {"weight": "nan"}},
        "weight: found 'nan', expected a finite number, or `size`",
    ),
    Mistake("an infinite weight", {"s0": {"weight": "inf"}}, "weight: found 'inf', expected a finite number"),
    Mistake("a percentage", {"s0": {"weight": "50%"}}, "weight: found '50%', expected a finite number, or `size`"),
    Mistake(
        "a weight for each stage",
        {"s0": {"weight": [1, 2]}},
        "weight: found [1, 2], expected a finite number",
        "huggingface/nanotron#113",
    ),
    Mistake("a misspelt key", {"s0": {"wieght": 1}}, "wieght: unknown key; did you mean 'weight'?"),
    Mistake(
        "a key of torchtitan",
        {"s0": {"ratio": 1}},
        "ratio: unknown key; did you mean 'weight'?",
        "pytorch/torchtitan#3063",
    ),
    Mistake(
        "a key of datasets",
        {"s0": {"probability": 1}},
        "probability: unknown key; did you mean 'weight'?",
        "huggingface/datasets#4893",
    ),
    Mistake(
        "a key of Streaming",
        {"s0": {"repeat": 2}},
        "repeat: unknown key; did you mean 'epochs'?",
        "mosaicml/streaming#342",
    ),
    Mistake(
        "weights apart from the sources",
        {"weights": [6, 3, 1]},
        "weights: unknown key; each source has its own `weight`",
        "NVIDIA/Megatron-LM#547",
    ),
    Mistake(
        "a blend as Megatron's argument has it",
        {"sources": ["0.3", "a", "0.7", "b"]},
        "found '0.3', expected keys such as name, path and weight",
        "NVIDIA-NeMo/Megatron-Bridge#117",
    ),
    Mistake(
        "a blend of pairs",
        {"sources": [["a", 0.3]]},
        "found ['a', 0.3], expected keys such as name, path and weight",
        "NVIDIA-NeMo/Megatron-Bridge#117",
    ),
    Mistake(
        "sources by their names",
        {"sources": {"web": {"path": "x"}}},
        "sources: found 'web', expected a list of sources; begin each with a dash, as in `- name: web`",
    ),
    Mistake(
        "the length in training steps",
        {"samples": None, "train_iters": 10},
        "train_iters: unknown key; runs are as long as their `samples`: steps x the global batch size",
        "modelscope/ms-swift#10099",
    ),
    Mistake(
        "two sources of one name",
        {"s1": {"name": "s0"}},
        "two sources of train are named 's0'; names must differ",
        "PaddlePaddle/PaddleNLP#8823",
    ),
    Mistake(
        "exhaustion as datasets calls it",
        {"on_exhausted": "first_exhausted"},
        "on_exhausted: found 'first_exhausted', expected 'error' or 'redistribute'",
        "swiss-ai/Megatron-LM#6",
    ),
    Mistake(
        "exhaustion without a cap",
        {"on_exhausted": "redistribute"},
        "without a cap a source repeats, and is never exhausted; give max_epochs",
        "swiss-ai/Megatron-LM#6",
    ),
    Mistake(
        "a cap of 0 to leave a source out",
        {"s0": {"max_epochs": 0}},
        "max_epochs: found 0, expected more than 0",
        "marin-community/marin#7130",
    ),
    Mistake(
        "sizes and numbers as weights",
        {"s0": {"weight": "size"}},
        "'s1' has weight 3, other sources `weight: size`; expected `size` for all",
        "NVIDIA-NeMo/Nemotron#78",
    ),
    Mistake(
        "a temperature for epochs",
        {**EPOCHS, "temperature": 2},
        "temperature: it changes weights, but the share of 's0' is given by epochs",
        "NVIDIA-NeMo/Automodel#3303",
    ),
    Mistake(
        "a temperature of 0",
        {"temperature": 0},
        "temperature: found 0, expected 0.1 or more: above 1 evens weights out",
    ),
    Mistake(
        "a validation split of nothing",
        {"valid_samples": 10},
        "valid_samples: there is no valid; give it a share in `split`, or its own sources",
    ),
    Mistake(
        "a split of nothing",
        {"split": "0,0,0"},
        "split: found '0,0,0', expected up to three numbers train,valid,test, not all 0",
    ),
    Mistake(
        "a stage of a source that is not listed",
        {"stages": [{"samples": 100, "sources": {"s9": {"weight": 1}}}, {}]},
        "train has no source 's9'; list it in `sources` too, with `weight: 0`",
        "mosaicml/llm-foundry#1256",
    ),
    Mistake(
        "another seed in a stage",
        {"stages": [{"samples": 100}, {"seed": 3}]},
        "seed cannot change within a run, which its order depends on",
        "marin-community/levanter#698",
    ),
    Mistake(
        "a stage without an end",
        {"stages": [{"sources": {"s0": {"weight": 1}}}, {}]},
        "weights are relative, so the stage needs an end",
        "huggingface/nanotron#380",
    ),
    Mistake(
        "a stage longer than the run",
        {"stages": [{"share": 1.5}, {}]},
        "share: found 1.5, expected a share of the run, more than 0 and at most 1",
    ),
    Mistake(
        "a stage's end in training steps",
        {"stages": [{"iterations": 100}, {}]},
        "iterations: unknown key; runs are as long as their `samples`: steps x the global batch size",
        "huggingface/nanotron#113",
    ),
]
PLAN_ERRORS = [
    Mistake(
        "more of a source than its cap",
        {"s0": {"max_epochs": 1}},
        "2.40 times (120 samples of 8 tokens from its 400 tokens), more than its max_epochs 1 (49 samples). At most 81 samples",
        "NVIDIA/Megatron-LM#705",
    ),
    Mistake(
        "the same, in tokens",
        {"s0": {"max_tokens": 400}},
        "more than its max_tokens 400 (50 samples). At most 83 samples fit all caps: set `samples: 83` or less",
        "NVIDIA/Model-Optimizer#1888",
    ),
    Mistake(
        "no blend that fits is known",
        {"s0": {"max_epochs": 1}},
        "the nearest shares that fit all caps, which `on_exhausted: redistribute` gives: s0 0.245, s1 0.56625, s2 0.18875",
        "swiss-ai/Megatron-LM#6",
    ),
    Mistake(
        "more than all sources together",
        {**ONCE, "samples": 5000},
        "with `on_exhausted: redistribute` at most 347 samples fit all caps",
        "NVIDIA/Megatron-LM#705",
    ),
    Mistake(
        "more than all, redistributed",
        {**ONCE, "samples": 5000, "on_exhausted": "redistribute"},
        "its sources' caps together allow 347: set `samples: 347` or less",
        "NVIDIA/Megatron-LM#705",
    ),
    Mistake(
        "more epochs than the cap",
        {**EPOCHS, "samples": None, "s0": {"weight": None, "epochs": 3, "max_epochs": 2}},
        "more than its max_epochs 2 (99 samples)",
        "EleutherAI/gpt-neox#1018",
    ),
    Mistake(
        "a share too small for a sample",
        {"s1": {"weight": 1e-9}},
        "'s1' gets none of 200 samples: its share is 1.43e-10. All sources get at least one from 7,000,000,001 samples on",
        "NVIDIA/Megatron-LM#705",
    ),
    Mistake(
        "an amount less than a sample",
        {**TOKENS, "samples": None, "s0": {"weight": None, "tokens": 3}},
        "'s0' would give train 3 tokens, fewer than one sample of 8: set `tokens: 8` or more",
        "NVIDIA/Model-Optimizer#1888",
    ),
    Mistake(
        "half a sample",
        {**COUNTS, "samples": None, "s0": {"weight": None, "samples": 1.5}},
        "without a length in the config, `samples` of sources are counts: expected integers",
    ),
    Mistake(
        "a run shorter than a sample",
        {"samples": None, "tokens": 5},
        "train would have fewer tokens than one sample of 8 tokens: set `tokens: 80` or more",
        "huggingface/nanotron#144",
    ),
    Mistake(
        "a split that leaves train nothing",
        {"split": "0,100,0"},
        "'s0' has no tokens in train: give train a share of `split`",
    ),
    Mistake(
        "a split that rounds to nothing",
        {"split": "10,90,0"},
        "'s0' has no tokens in train: add files with tokens to it, or give train a larger share of `split`",
    ),
    Mistake(
        "tokens where samples are meant",
        {"samples": "1e18"},
        "train would have 1,000,000,000,000,000,000 samples; a plan can have at most",
        "modelscope/ms-swift#10099",
    ),
    Mistake(
        "a stage that ends before it begins",
        {"stages": [{"samples": 100}, {"samples": 48}, {}]},
        "it ends at sample 48, but begins at sample 100; end it later",
        "mosaicml/llm-foundry#954",
    ),
]
NOTES = [
    Mistake(
        "a stage that ends within a step of lanes",
        {"run": "off", "stages": [{"samples": 101}, {"sources": {"s0": {"weight": 1}}}]},
        "stages[0]: ends at sample 101, 1 of its 4 lanes further than the others, so loaders go on in other lanes, which costs "
        "reads: 100 or 104 would end with all lanes",
        "huggingface/nanotron#113",
    ),
    Mistake(
        "another mix in the middle of a run",
        {"run": "built", "s0": {"weight": 7}},
        "share of source 's0' was 3/5, is now 7/11",
        "NVIDIA/Megatron-LM#457",
    ),
    Mistake(
        "the way to another mix",
        {"run": "built", "s0": {"weight": 7}},
        "to change it from where training is, restore it, add `stages: [{samples: 200}, {sources: {NAME: {weight: NUMBER}}}]` "
        "and run `megablend amend CONFIG --at SAMPLE`",
        "NVIDIA/Megatron-LM#457",
    ),
    Mistake(
        "a source withdrawn from a run",
        {"run": "built", "sources": 3},
        "source 'tiny' was removed",
        "allenai/OLMo-core#435",
    ),
    Mistake(
        "another sequence length in a run",
        {"run": "built", "sequence_length": 16},
        "sequence_length was 8, is now 16",
        "NVIDIA/Megatron-LM#1002",
    ),
    Mistake("another seed on resuming", {"run": "built", "seed": 8}, "seed was 7, is now 8", "allenai/OLMo-core#617"),
    Mistake(
        "another split on resuming",
        {"run": "built", "split": "90,10,0"},
        "split was train of 1,0,0, is now train of 9/10,1/10,0",
    ),
    Mistake(
        "a run that gets shorter",
        {"run": "built", "samples": 100},
        "was built for 200 samples, now 100 are requested; a run can only be extended",
        "ServiceNow/Fast-LLM#130",
    ),
    Mistake(
        "a source read far too often",
        {"samples": 5000},
        "most often 's0', 60.0 times (400 tokens, 3,000 samples)",
        "NVIDIA/Megatron-LM#1127",
    ),
    Mistake(
        "a source of 3 tokens",
        {"tiny": {"weight": 1}, "samples": 20},
        "fewer than 1 sample of 8 tokens; the smallest is 'tiny' with 3 tokens",
        "EleutherAI/gpt-neox#377",
    ),
    Mistake(
        "one file in two sources",
        {"s1": {"path": "s0"}, "run": "twice"},
        "sources 's0' and 's1' both read ",
        "mosaicml/streaming#432",
    ),
    Mistake(
        "a validation split smaller than a step",
        {"split": "50,50,0", "run": "split", "sequence_length": 200},
        "samples are fewer than a step needs (16): a loader yields no batch",
    ),
    Mistake(
        "lanes that no loader fits",
        {"lanes": 5, "shuffle_window": 3},
        "lanes: 5 is not a multiple of micro batch 4 x 4 ranks",
        "mosaicml/streaming#476",
    ),
]


def apply(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The config with a mistake in it."""
    config = copy.deepcopy(base)
    by_name = {source["name"]: source for source in config["sources"]}
    for key, value in change.items():
        if key in by_name:
            by_name[key].update({name: new for name, new in value.items() if new is not None})
            for name in [name for name, new in value.items() if new is None]:
                by_name[key].pop(name, None)
        elif value is None:
            config.pop(key, None)
        else:
            config[key] = config["sources"][:value] if key == "sources" and isinstance(value, int) else value
    for source in by_name.values():
        if source["path"] in by_name:
            source["path"] = by_name[source["path"]]["path"]
    return config


@pytest.mark.parametrize("mistake", CONFIG_ERRORS, ids=lambda mistake: mistake.name)
def test_mistakes_that_the_config_shows(base: dict[str, Any], mistake: Mistake) -> None:
    with pytest.raises(megablend.ConfigError, match=re.escape(mistake.message)):
        megablend.load_config(apply(base, mistake.change))


@pytest.mark.parametrize("mistake", PLAN_ERRORS, ids=lambda mistake: mistake.name)
def test_mistakes_that_the_data_shows(base: dict[str, Any], mistake: Mistake) -> None:
    with pytest.raises(megablend.PlanError, match=re.escape(mistake.message)):
        megablend.describe(apply(base, mistake.change))


@pytest.mark.parametrize("mistake", NOTES, ids=lambda mistake: mistake.name)
def test_mistakes_that_are_noted(base: dict[str, Any], mistake: Mistake) -> None:
    config = apply(base, mistake.change)
    if config.get("run") not in (None, "built"):
        megablend.build_index(config)
    described = megablend.describe(config, micro_batch_size=4, data_parallel_size=4)
    assert any(mistake.message in line for line in (str(described["note"]), *described["warnings"]))
    sound = megablend.describe(base | {"run": "built", "lanes": 4})
    assert not any(mistake.message in line for line in (str(sound["note"]), *sound["warnings"]))


def test_weights_are_relative_whatever_they_sum_to(base: dict[str, Any]) -> None:
    """`1 A 1 B` and `10 A 10 B` are the same blend (NVIDIA/Megatron-LM#547)."""
    megablend.build_index(base)  # tests before this one may have indexed other files
    plans = set()
    for scale in (1, 10, "1e-3"):
        change = {name: {"weight": scale} for name in ("s0", "s1")}
        described = megablend.describe(apply(base, change | {"s2": {"weight": 0}}))
        shares = [source["requested_share"] for source in described["splits"]["train"]["sources"]]
        assert shares == [0.5, 0.5, 0, 0]
        plans.add(described["plan"])
    assert len(plans) == 1


def test_a_position_beyond_the_run(base: dict[str, Any]) -> None:
    """A position in another unit, such as tokens or steps of another batch, is refused (modelscope/ms-swift#10099)."""
    with pytest.raises(megablend.StateError, match="consumed_samples is 1,600; this run has 0 to 200 samples"):
        megablend.open(base | {"run": "built"}, consumed_samples=1600)


def test_the_table_is_long_enough() -> None:
    mistakes = [*CONFIG_ERRORS, *PLAN_ERRORS, *NOTES]
    assert len({mistake.name for mistake in mistakes}) == len(mistakes) >= 40

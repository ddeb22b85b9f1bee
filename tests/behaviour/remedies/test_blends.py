"""Mistakes that people make with blends and stages: what is printed before they cost a run, and what it says to do.

Where users of another project asked for it, a comment names the project and the number of the issue.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import megablend
from megablend.cli.main import cli
from tests.behaviour.remedies.driver import Bench, Fault, fault, table
from tests.runs import make_config, write_source

Change = dict[str, Any]
NAMES = ("s0", "s1", "s2")


class Blend(Bench):
    """An indexed config of sources of 400, 800, 1,600 and 3 tokens, with weights 6, 3, 1 and 0; run `built` is committed."""

    def __init__(self, base: Change) -> None:
        self.base = base
        self.changes: Change = {}

    def change(self, settings: Mapping[str, Any]) -> None:
        """Keys of the config; `s0`, `s1`, `s2` and `tiny` are keys of these sources, None removes a key.

        They take the place of what was changed before under the same key.
        """
        self.changes |= settings

    @property
    def config(self) -> Change:
        config = copy.deepcopy(self.base)
        by_name = {source["name"]: source for source in config["sources"]}
        for key, value in self.changes.items():
            if key in by_name:
                by_name[key] |= value
                for name in [name for name, new in value.items() if new is None]:
                    del by_name[key][name]
            elif value is None:
                config.pop(key, None)
            else:
                config[key] = (
                    config["sources"][:value]
                    if key == "sources" and isinstance(value, int)
                    else value
                )
        for source in by_name.values():
            if source["path"] in by_name:
                source["path"] = by_name[source["path"]]["path"]
        return config

    def load(self) -> None:
        """Load the config, whose sources have a path; the data is not looked at."""
        config = self.config
        sources = config["sources"]
        for source in (
            sources
            if isinstance(sources, list)
            else [each for split in sources.values() for each in split]
        ):
            if isinstance(source, dict):
                source.setdefault("path", self.base["sources"][0]["path"])
        megablend.load_config(config)

    def use(self) -> str:
        """What `describe` notes, and warns of."""
        described = megablend.describe(self.config, micro_batch_size=4, data_parallel_size=4)
        return "\n".join((str(described.to_dict()["note"]), *described.to_dict()["warnings"]))

    def index(self) -> None:
        megablend.build_index(self.config)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Change:
    folder = tmp_path_factory.mktemp("blends")
    sources = []
    for d, (name, size, weight) in enumerate(
        (("s0", 400, 6), ("s1", 800, 3), ("s2", 1600, 1), ("tiny", 3, 0))
    ):
        pieces = 4 if size > 3 else 1
        documents = [[d * 10**5 + i for i in range(size // pieces)] for _ in range(pieces)]
        source = write_source(folder, d, "arrow", documents, num_files=1)
        sources.append(source | {"name": name, "weight": weight})
    config = make_config(folder, sources, samples=200)
    megablend.build(config | {"run": "built"})
    return config


@pytest.fixture
def bench(base: Change) -> Blend:
    return Blend(base)


@pytest.fixture
def committed(base: Change, tmp_path: Path) -> Change:
    """Run `built` of 200 samples in a cache of its own."""
    shutil.copytree(base["cache"], tmp_path / "cache")
    return base | {"cache": str(tmp_path / "cache"), "run": "built"}


def in_units(unit: str, most: float, tiny: float = 0) -> Change:
    """Amounts in place of weights."""
    return {name: {"weight": None, unit: most} for name in NAMES} | {
        "tiny": {"weight": None, unit: tiny}
    }


def weights(*values: object) -> Change:
    return {name: {"weight": value} for name, value in zip(NAMES, values, strict=False)}


def stages(*listed: Change, **more: Any) -> Change:
    return {"stages": list(listed), **more}


def ending(*listed: Change, **more: Any) -> Change:
    """Stages of which the last one says where the run ends."""
    return stages(*listed, samples=None, **more)


def to_end(**settings: Any) -> Change:
    """A first stage of 40 samples, and one to sample 200 with these settings."""
    return ending({"samples": 40}, {"samples": 200, **settings})


EPOCHS = in_units("epochs", 1)
TOKENS = in_units("tokens", 400)
COUNTS = in_units("samples", 5)
ONCE = {name: {"max_epochs": 1} for name in NAMES}
SIZES = weights("size", "size", "size")
WEB = {"name": "s0", "weight": 1}
STAGE: Change = {"sources": {"s0": {"weight": 1}}}
CAP: Change = {"s0": {"max_epochs": 1}}
HEAVY: Change = {"sources": {"s0": {"weight": 9}}}
FITTING = weights("0.245", "0.56625", "0.18875")
SHORT: Change = {"samples": 80, "schedule": "linear", **HEAVY}
CAPPED: Change = {"on_exhausted": "redistribute", "sources": {"s0": {"max_epochs": 3}}}
OTHER_RUN: Change = {"run": "next"}


def said_by(use: Callable[[Blend], Any]) -> Callable[..., Fault]:
    """Faults with messages in full, not patterns."""
    return lambda name, change, says, *remedies: fault(
        name, change, re.escape(says), *remedies, fails=use
    )


config = said_by(Blend.load)
plan = said_by(Blend.use)

# fmt: off
test_what_the_config_shows = table(
    config("weights, but no length", {"samples": None},
           "weights do not say how many samples the run has: add samples, tokens or epochs",
           {"samples": 9}, {"tokens": 80}, {"epochs": 1}),  # EleutherAI/gpt-neox#992
    config("two lengths", {"epochs": 1}, "epochs: the number of training samples is already set by samples; keep only one",
           {"epochs": None}, {"samples": None}),  # NVIDIA/Megatron-LM#1127
    config("shares in different units", {"s1": {"weight": None, "epochs": 1}}, "mixed units ('s0' weight, 's1' epochs",
           {"s1": {"weight": 3}}, EPOCHS),  # NVIDIA-NeMo/Megatron-Bridge#5438
    config("two shares of one source", {"s0": {"epochs": 2}},
        "source 's0' has weight and epochs; expected only one of",
           {"s0": {"weight": 1}}, {**EPOCHS, "s0": {"weight": None, "epochs": 2}},
           {"samples": None, **TOKENS, "s0": {"weight": None, "tokens": 8}},
           {"samples": None, **COUNTS, "s0": {"weight": None, "samples": 8}}),  # microsoft/ltp-megatron-lm#15
    config("a source without a share", {"s1": {"weight": None}},
           "'s1' has no share; expected exactly one of weight, tokens, samples, epochs",
           {"s1": {"weight": 1}}, TOKENS, COUNTS, EPOCHS),  # NVIDIA-NeMo/Nemotron#78
    config("no share at all", weights(0, 0, 0),
        "`weight` is 0 for every source of train; expected at least one above 0",
           {"s1": {"weight": 1}}),  # huggingface/datasets#7147
    config("a negative weight", weights(-1), "weight: found -1, expected 0 or more", weights(0), weights(1)),
    config("a weight that is no number", weights("nan"), "weight: found 'nan', expected a finite number",
           weights(0.5), SIZES),
    config("an infinite weight", weights("inf"), "weight: found 'inf', expected a finite number",
           {**weights(1e9), "samples": "1e10"}, SIZES),
    config("a percentage", weights("50%"), "weight: found '50%', expected a finite number", weights(0.5), SIZES),
    config("a weight for each stage", weights([1, 2]), "weight: found [1, 2], expected a finite number",
           weights(1)),  # huggingface/nanotron#113
    config("a misspelt key", {"s0": {"wieght": 1}}, "wieght: unknown key; did you mean 'weight'?", weights(1)),
    config("a key of torchtitan", {"s0": {"ratio": 1}}, "ratio: unknown key; did you mean 'weight'?",
           weights(1)),  # pytorch/torchtitan#3063
    config("a key of datasets", {"s0": {"probability": 1}}, "probability: unknown key; did you mean 'weight'?",
           weights(1)),  # huggingface/datasets#4893
    config("a key of Streaming", {"s0": {"repeat": 2}}, "repeat: unknown key; did you mean 'epochs'?",
           {**EPOCHS, "s0": {"weight": None, "epochs": 2}}),  # mosaicml/streaming#342
    config("weights apart from the sources", {"weights": [6, 3, 1]}, "each source has its own `weight`, below `sources`",
           {"weights": None, **weights(6, 3, 1)}),  # NVIDIA/Megatron-LM#547
    config("a blend as Megatron's argument has it", {"sources": ["0.3", "a", "0.7", "b"]},
           "found '0.3', expected keys such as name, path and weight", {"sources": [WEB]}),  # NVIDIA-NeMo/Megatron-Bridge#117
    config("a blend of pairs", {"sources": [["a", 0.3]]}, "found ['a', 0.3], expected keys such as name, path and weight",
           {"sources": [WEB]}),  # NVIDIA-NeMo/Megatron-Bridge#117
    config("sources by their names", {"sources": {"web": {"path": "x"}}},
           "sources: found 'web', expected a list of sources; begin each with a dash, as in `- name: web`", {"sources": [WEB]}),
    config("the length in training steps", {"samples": None, "train_iters": 10},
           "train_iters: unknown key; set the length of the run with `samples`: steps x global batch size",
           {"samples": 10, "train_iters": None}),  # modelscope/ms-swift#10099
    config("two sources of one name", {"s1": {"name": "s0"}}, "two sources of train are named 's0'; rename one of them",
           {"s1": {"name": "s9"}}),  # PaddlePaddle/PaddleNLP#8823
    config("exhaustion as datasets calls it", {"on_exhausted": "first_exhausted"},
           "on_exhausted: found 'first_exhausted', expected 'error' or 'redistribute'",
           *({"on_exhausted": kind, "s1": {"max_epochs": 1}} for kind in ("error", "redistribute"))),  # swiss-ai/Megatron-LM#6
    config("exhaustion without a cap", {"on_exhausted": "redistribute"},
           "no source can be exhausted, since none has a cap; give max_epochs",
           CAP, {"s0": {"max_tokens": 80}}, {"on_exhausted": None}),  # swiss-ai/Megatron-LM#6
    config("a cap of 0 to leave a source out", {"s0": {"max_epochs": 0}}, "max_epochs: found 0, expected more than 0",
           {"s0": {"max_epochs": 3}}),  # marin-community/marin#7130
    config("sizes and numbers as weights", weights("size"),
           "'s1' has weight 3, but other sources have `weight: size`; expected `size` for all",
           SIZES, weights(6), weights("size", 0, 0)),  # NVIDIA-NeMo/Nemotron#78
    config("a temperature for epochs", {**EPOCHS, "temperature": 2},
           "temperature: only applies to weights, but the share of 's0' is given by epochs",
           {"samples": 200, **SIZES, "tiny": {"weight": 0}}, {"temperature": None}),  # NVIDIA-NeMo/Automodel#3303
    config("a temperature of 0", {"temperature": 0}, "temperature: found 0, expected 0.1 or more: above 1 evens weights out",
           *({"temperature": value} for value in (0.1, 0.5, 2))),
    config("a validation split of nothing", {"valid_samples": 10},
           "valid_samples: there is no valid split; give it a share in `split`, or list sources for it",
           {"split": "90,10,0"}, {"sources": {"train": [WEB], "valid": [WEB | {"name": "v"}]}}),
    config("a split of nothing", {"split": "0,0,0"},
           "split: found '0,0,0', expected up to three numbers train,valid,test, not all 0", {"split": "95,5,0"}),
    config("a stage of a source that is not listed", stages({"samples": 100, "sources": {"s9": {"weight": 1}}}, {}),
           "train has no source 's9'; list it in `sources` too, with `weight: 0`",
           {"sources": [WEB, WEB | {"name": "s9", "weight": 0}], "samples": 160}),  # mosaicml/llm-foundry#1256
    config("another seed in a stage", stages({"samples": 100}, {"seed": 3}),
           "seed cannot change within a run, whose order depends on it",
           stages({"samples": 100}, {}, seed=3, run="next")),  # marin-community/levanter#698
    config("a stage without an end", stages(STAGE, {}), "has no end, and weights do not say where it ends",
           *(stages(STAGE | end, {}) for end in ({"samples": 80}, {"tokens": 800}, {"share": 0.5}))),  # huggingface/nanotron#380
    config("a stage longer than the run", stages({"share": 1.5}, {}),
           "share: found 1.5, expected a share of the run, more than 0 and at most 1",
           stages({"share": 0.5}, {}), stages({"share": 1})),
    config("a stage's end in training steps", stages({"iterations": 100}, {}),
           "iterations: unknown key; set the length of the run with `samples`: steps x global batch size",
           stages({"samples": 100}, {})),  # huggingface/nanotron#113
)

test_what_the_data_shows = table(
    plan("more of a source than its cap", CAP,
         "2.40 times (120 samples of 8 tokens from its 400 tokens), more than its max_epochs 1 (49 samples). At most 81 samples",
         {"samples": 81}, {"s0": {"max_epochs": "2.4025"}}, {"s0": {"max_epochs": 1, "weight": 1}},
         {"on_exhausted": "redistribute"}),  # NVIDIA/Megatron-LM#705
    plan("shares that fit", CAP,
         "the nearest shares that fit all caps, which `on_exhausted: redistribute` gives: s0 0.245, s1 0.56625, s2 0.18875",
         FITTING | {"s0": {"weight": "0.245", "max_epochs": 1}}),  # swiss-ai/Megatron-LM#6
    plan("the same, in tokens", {"s0": {"max_tokens": 400}},
         "more than its max_tokens 400 (50 samples). At most 83 samples fit all caps: set `samples: 83` or less",
         {"samples": 83}, {"s0": {"max_tokens": 960}}, {"s0": {"max_tokens": 400, "weight": 1}},
         {"on_exhausted": "redistribute"}),  # NVIDIA/Model-Optimizer#1888
    plan("more than all sources together", {**ONCE, "samples": 5000},
         "with `on_exhausted: redistribute` at most 347 samples fit all caps",
         {"samples": 81}, {"on_exhausted": "redistribute", "samples": 347},
         {name: {"max_epochs": 99} for name in NAMES}),  # NVIDIA/Megatron-LM#705
    plan("more than all, redistributed", {**ONCE, "samples": 5000, "on_exhausted": "redistribute"},
         "the caps of its sources together allow only 347: set `samples: 347` or less", {"samples": 347},
         {"s0": {"max_epochs": 99}, "s1": {"max_epochs": 1}}, {"s0": {}}),  # NVIDIA/Megatron-LM#705
    plan("more epochs than the cap", {**EPOCHS, "samples": None, "s0": {"weight": None, "epochs": 3, "max_epochs": 2}},
         "more than its max_epochs 2 (99 samples)", {"samples": 297},
         *({"s0": {"weight": None, "epochs": epochs, "max_epochs": most}} for epochs, most in ((3, "2.9825"), (1, 2))),
         {"on_exhausted": "redistribute"}),  # EleutherAI/gpt-neox#1018
    plan("a share too small for a sample", {"s1": {"weight": 1e-9}},
         "'s1' gets none of the 200 samples: its share is 1.43e-10. A run of 7,000,000,001 samples or more has",
         {"samples": 7_000_000_001}, {"s1": {"weight": 1}}, {"s1": {"weight": 0}}),  # NVIDIA/Megatron-LM#705
    plan("an amount less than a sample", {**TOKENS, "samples": None, "s0": {"weight": None, "tokens": 3}},
         "'s0' would give train 3 tokens, fewer than one sample of 8: set `tokens: 8` or more",
         *({"s0": {"weight": None, "tokens": tokens}} for tokens in (8, 0))),  # NVIDIA/Model-Optimizer#1888
    plan("half a sample", {**COUNTS, "samples": None, "s0": {"weight": None, "samples": 1.5}},
         "`samples` of sources are counts if the config sets no length; expected whole numbers",
         {"s0": {"weight": None, "samples": 2}}, {"samples": 9}),
    plan("a run shorter than a sample", {"samples": None, "tokens": 5},
         "train would have fewer tokens than one sample of 8 tokens: set `tokens: 80` or more",
         {"tokens": 80}),  # huggingface/nanotron#144
    plan("a split that leaves train nothing", {"split": "0,100,0"},
        "'s0' has no tokens in train: give train a share in `split`",
         {"split": "50,50,0"}),
    plan("a split that rounds to nothing", {"split": "10,90,0"},
         "'s0' has no tokens in train: add files with tokens to it, or give train a larger share in `split`",
         {"split": "50,50,0"}),
    plan("tokens where samples are meant", {"samples": "1e18"},
         "train would have 1,000,000,000,000,000,000 samples; a plan can have at most",
         {"samples": 1_125_899_906_842_623}),  # modelscope/ms-swift#10099
    plan("a stage that ends before it begins", stages({"samples": 100}, {"samples": 48}, {}),
         "ends at sample 48, but begins at sample 100; let it end later",
         stages({"samples": 100}, {"samples": 148}, {})),  # mosaicml/llm-foundry#954
    fault("a share of nothing", {**to_end(sources={"s0": {"weight": 7}}), "s2": {"weight": 1e-6}},
          "source 's2' gets none of the 200 samples: .*; give it a larger share, or a share of 0 in every stage$",
          {"s2": {"weight": 1}}, {"s2": {"weight": 0}}),
    plan("a cap of a stage", to_end(sources=CAP),
         "96 samples of 8 tokens are requested, 25 are left; end the stage at sample 81 or before, raise "
         "the cap, give the source a smaller share, or set `on_exhausted: redistribute`",
         ending({"samples": 40}, {"samples": 81, "sources": CAP}), to_end(sources={"s0": {"max_epochs": 3}}),
         to_end(sources={"s0": {"max_epochs": 1, "weight": 0.1}}), {"on_exhausted": "redistribute"},
         to_end(sources=CAP, on_exhausted="redistribute")),
    fault("redistribution without a cap", to_end(on_exhausted="redistribute"),
          r"stages\[1\]: on_exhausted: no source can be exhausted, .*; give max_epochs or max_tokens to at least one",
          *(to_end(on_exhausted="redistribute", sources={"s0": cap}) for cap in ({"max_epochs": 1}, {"max_tokens": 400})),
          to_end(sources={"s0": {"weight": 7}})),
    fault("a schedule without steps", ending({"samples": 64}, {"samples": 80, "schedule": "linear", **HEAVY}),
          r"^stages\[1\]: schedule: .* has 16 samples, fewer than two cycles of 16 .*; let the stage end later, or leave out "
          "`schedule`$",
          ending({"samples": 64}, {"samples": 96, "schedule": "linear", **HEAVY}),
          ending({"samples": 64}, {"samples": 80, **HEAVY})),
    fault("a schedule without steps, before a stage with caps", ending({"samples": 64}, SHORT, {"samples": 200, **CAPPED}),
          r"^stages\[1\]: schedule: .* has 16 samples, fewer than two cycles of 16 .*; let the stage end later, or leave out "
          "`schedule`$",
          ending({"samples": 64}, SHORT | {"samples": 96}, {"samples": 200, **CAPPED}),
          ending({"samples": 64}, {"samples": 80, **HEAVY}, {"samples": 200, **CAPPED})),
    fault("a beginning outside the stage before", ending({"samples": 100}, {"samples": 200, "from": 120, **HEAVY}),
          r"from: found 120, expected a sample within the previous stage, 1 to 100$",
          ending({"samples": 100}, {"samples": 200, "from": 100, **HEAVY})),
    plan("a beginning within a cycle", ending({"samples": 100}, {"samples": 200, "from": 50, **HEAVY}),
         "from: found 50, expected 64, the end of a cycle of lanes x shuffle_window samples; "
         "`megablend amend CONFIG --at SAMPLE`",
         ending({"samples": 100}, {"samples": 200, "from": 64, **HEAVY})),
    fault("an end before the beginning", {**ending({"share": 0.001}, HEAVY), "tokens": 1600},
          r"stages\[0\]: ends at sample 0, but begins at sample 0; let it end later$", ending({"share": 0.5}, HEAVY)),
    fault("an interleaving", {"interleaving": "x"}, "interleaving: found 'x', expected one of lanes, sequential$",
          *({"interleaving": name} for name in ("lanes", "sequential"))),
)

test_what_is_noted = table(
    plan("a stage that ends within a step of lanes", (stages({"samples": 101}, STAGE, run="off"), Blend.index),
         "stages[0]: ends at sample 101, with 101 samples, which is not a multiple of its 4 lanes, so loaders read more "
         "data than they need; end the stage at sample 100 or 104",
         *(stages({"samples": end}, STAGE) for end in (100, 104))),  # huggingface/nanotron#113
    plan("another mix in the middle of a run", {"run": "built", **weights(7)}, "share of source 's0' was 3/5 and is now 7/11",
         OTHER_RUN, {"s0": {}}),  # NVIDIA/Megatron-LM#457
    plan("the way to another mix", {"run": "built", **weights(7)},
         "to change it during training, restore the config, add `stages: [{samples: 200}, "
         "{sources: {NAME: {weight: NUMBER}}}]` "
         "and run `megablend amend CONFIG --at SAMPLE`", {"s0": {}}),  # NVIDIA/Megatron-LM#457
    plan("a source withdrawn from a run", {"run": "built", "sources": 3}, "source 'tiny' was removed",
         OTHER_RUN, {"sources": 4}),  # allenai/OLMo-core#435
    plan("another sequence length in a run", {"run": "built", "sequence_length": 16}, "sequence_length was 8 and is now 16",
         OTHER_RUN, {"sequence_length": 8}),  # NVIDIA/Megatron-LM#1002
    plan("another seed on resuming", {"run": "built", "seed": 8}, "seed was 7 and is now 8",
         OTHER_RUN, {"seed": 7}),  # allenai/OLMo-core#617
    plan("another split on resuming", {"run": "built", "split": "90,10,0"},
         "split was train of 1,0,0 and is now train of 9/10,1/10,0",
         OTHER_RUN, {"split": None}),
    plan("a run that gets shorter", {"run": "built", "samples": 100},
         "was built for 200 samples, but 100 are now requested; a run can only be extended",
         OTHER_RUN, {"samples": 200}),  # ServiceNow/Fast-LLM#130
    plan("a source read far too often", {"samples": 5000}, "most often 's0', 60.0 times (400 tokens, 3,000 samples)",
         {"warnings": {"max_epochs": 61}}, {name: {"max_epochs": 61} for name in NAMES}),  # NVIDIA/Megatron-LM#1127
    plan("a source of 3 tokens", {"tiny": {"weight": 1}, "samples": 20},
         "fewer than 1 sample of 8 tokens; the smallest is 'tiny' with 3 tokens",
         {"warnings": {"min_source_samples": None}}),  # EleutherAI/gpt-neox#377
    plan("one file in two sources", ({"s1": {"path": "s0"}, "run": "twice"}, Blend.index), "sources 's0' and 's1' both read ",
         ({"s1": {}}, Blend.index)),  # mosaicml/streaming#432
    plan("a validation split smaller than a step", ({"split": "50,50,0", "run": "split", "sequence_length": 200}, Blend.index),
         "samples are fewer than a step needs (16): a loader yields no batch", {"sequence_length": 8}),
    plan("lanes that no loader fits", {"lanes": 5, "shuffle_window": 3}, "lanes: 5 is not a multiple of micro batch 4 x 4 ranks",
         {"lanes": 16}),  # mosaicml/streaming#476
)
# fmt: on


def test_weights_are_relative_whatever_they_sum_to(bench: Blend) -> None:
    """`1 A 1 B` and `10 A 10 B` are the same blend (NVIDIA/Megatron-LM#547)."""
    bench.index()  # tests before this one may have indexed other files
    plans = set()
    for scale in (1, 10, "1e-3"):
        bench.change(weights(scale, scale, 0))
        described = megablend.describe(bench.config)
        shares = [
            source["requested_share"]
            for source in described.to_dict()["splits"]["train"]["sources"]
        ]
        assert shares == [0.5, 0.5, 0, 0]
        plans.add(described.to_dict()["plan"])
    assert len(plans) == 1


def test_a_position_beyond_the_run(base: Change) -> None:
    """A position in another unit, such as tokens or steps of another batch, is refused (modelscope/ms-swift#10099)."""
    with pytest.raises(
        megablend.StateError, match="consumed_samples is 1,600; expected 0 to 200, the samples"
    ):
        megablend.open(base | {"run": "built"}, consumed_samples=1600)
    assert megablend.open(base | {"run": "built"}, consumed_samples=160).consumed_samples == 160


def test_a_number_for_a_beginning_is_printed(committed: Change, tmp_path: Path) -> None:
    """By `amend`, whose number the config of a new run takes."""
    path = tmp_path / "run.json"
    edited = committed | ending({"samples": 200}, {"samples": 240, **HEAVY})
    del edited["samples"]
    path.write_text(json.dumps(edited))
    printed = CliRunner().invoke(cli, ["amend", str(path), "--at", "50"])
    written = re.search(r"write `from: (\d+)` into the stage", printed.output)
    assert written, printed.output
    second = edited["stages"][1] | {"from": int(written[1])}
    alone = edited | {"run": "alone", "stages": [edited["stages"][0], second]}
    assert megablend.build(alone).ledger.digest == megablend.open(edited).run.ledger.digest


def test_a_stage_that_was_built_keeps_its_end(committed: Change) -> None:
    """Its end is restored; or `amend` lets the next one begin earlier."""
    rest = {key: value for key, value in committed.items() if key != "samples"}
    two = rest | {"stages": [{"samples": 200}, {"samples": 240, **HEAVY}]}
    megablend.build(two)
    early = rest | {"stages": [{"samples": 96}, {"samples": 240, **HEAVY}]}
    says = r"its stage 0 ends at sample 200, .*; restore .*`samples: 200`, or .* with `megablend amend CONFIG --at SAMPLE`"
    with pytest.raises(megablend.PlanError, match=says):
        megablend.build(early)
    megablend.build(rest | {"stages": [{"samples": 200}, early["stages"][1]]})
    assert megablend.amend(two, at=96).at == 96


def test_a_state_of_a_stage_that_is_gone(committed: Change) -> None:
    """Amended twice; the state is of what the second amendment replaced."""
    rest = {key: value for key, value in committed.items() if key != "samples"}
    edited = rest | {"stages": [{"samples": 200}, {"samples": 240, **HEAVY}]}
    megablend.amend(edited, at=96)
    dataset = megablend.open(edited)
    states = {k: dataset.state_dict(k) for k in (64, 96, 120)}
    other = rest | {"stages": [{"samples": 200}, {"samples": 240, "lanes": 2}]}
    megablend.amend(other, at=64)
    says = "it was amended from sample 64 on; give a state saved at sample 96 or earlier"
    with pytest.raises(megablend.StateError, match=says):
        megablend.amend(other, state=states[120])
    assert megablend.amend(other, state=states[96], dry_run=True).at == 96
    says = "this state is at sample 96 .*: resume from a state saved at sample 64 or earlier, or amend the run from this state on"
    with pytest.raises(megablend.StateError, match=says):
        megablend.open(other, state=states[96])
    assert megablend.open(other, state=states[64]).consumed_samples == 64
    megablend.amend(other, state=states[96])
    assert megablend.open(other, state=states[96]).consumed_samples == 96


def test_a_split_of_one_pass_that_is_too_short(committed: Change) -> None:
    config = committed | {"run": "split", "sequence_length": 900, "split": "50,25,25"}
    megablend.build(config)
    says = r"'valid' has fewer tokens than one sample of 900 tokens \(703 tokens in all\): give it a larger share in `split`"
    with pytest.raises(megablend.PlanError, match=says):
        megablend.open(config, "valid")
    each = config | {"run": "each", "sequence_length": 700}
    megablend.build(each)
    with pytest.raises(
        megablend.PlanError,
        match=r"one sample of 700 tokens in each of its sources \(703 tokens in all\)",
    ):
        megablend.open(each, "valid")
    larger = config | {"split": "25,75,0", "run": "larger"}
    megablend.build(larger)
    assert len(megablend.open(larger, "valid")) > 0
    first, second = (
        {key: config["sources"][i][key] for key in ("name", "path", "column")} for i in (0, 2)
    )
    listed = config | {
        "run": "listed",
        "sources": {"train": [second | {"weight": 1}], "valid": [first]},
    }
    del listed["split"]
    megablend.build(listed)
    with pytest.raises(
        megablend.PlanError, match=r"'valid' .* \(400 tokens in all\): add data to its sources"
    ):
        megablend.open(listed, "valid")
    more = listed | {
        "run": "more",
        "sources": listed["sources"]
        | {"valid": [first | {"path": [first["path"], second["path"]]}]},
    }
    megablend.build(more)
    assert len(megablend.open(more, "valid")) == 2

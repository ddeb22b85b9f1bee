"""Remedies in messages about configs: the change that a message asks for is made, and then the config loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megablend.config import load_config
from megablend.errors import ConfigError

WEB: dict[str, Any] = {"name": "web", "path": "/w.arrow", "weight": 3}
CODE: dict[str, Any] = {"name": "code", "path": "/c.arrow", "weight": 1}
BOOKS: dict[str, Any] = {"name": "books", "path": "/b.arrow", "weight": 0}
BASE: dict[str, Any] = {"cache": "c", "sequence_length": 8, "samples": 192, "sources": [WEB, CODE]}
STAGES: list[dict[str, Any]] = [{"samples": 64}, {"samples": 128, "withdraw": ["books"]}, {"lanes": 4}]
BY_SPLIT = {"train": [WEB], "valid": [CODE]}
Settings = dict[str, Any]


def with_stage(**settings: Any) -> list[Settings]:
    """Stages of which the second one also has these settings; None removes one."""
    second = {key: value for key, value in {**STAGES[1], **settings}.items() if value is not None}
    return [STAGES[0], second, STAGES[2]]


REMEDIES: list[tuple[Settings, str, list[Settings]]] = [
    # (settings that are refused, what is said, changes that do what it says; None removes a setting)
    ({"memory": "lots"}, r"memory: found 'lots', expected a size such as 512MiB$", [{"memory": "512MiB"}]),
    (
        {"local_cache": ""},
        r"local_cache: found '', expected a path; use `\.` for the current folder",
        [{"local_cache": "."}],
    ),
    (
        {"sources": BY_SPLIT, "split": "80,20,0"},
        "split: sources are already listed for each split; remove one of the two",
        [{"split": None}, {"sources": [WEB, CODE]}],
    ),
    (
        {"sources": [WEB | {"path": []}]},
        r"path: found \[\], expected a path, a glob or a list of them",
        [{"sources": [WEB | {"path": path}]} for path in ("/w.arrow", "/*.arrow", ["/v.arrow", "/w.arrow"])],
    ),
    (
        {"stages": STAGES},
        r"stages\[1\]: withdraw: train has no source 'books'; keep it in `sources`, since the stages before read it",
        [{"sources": [WEB, CODE, BOOKS | {"weight": 1}]}],
    ),
    (
        {"sources": [WEB, CODE, BOOKS], "stages": with_stage(sources={"books": {"weight": 1}})},
        r"stages\[1\]: source 'books' is withdrawn, and changed in `sources`; keep one of them",
        [
            {"stages": STAGES, "sources": [WEB, CODE, BOOKS | {"weight": 1}]},
            {"stages": with_stage(withdraw=None, sources={"books": {"weight": 1}})},
        ],
    ),
    (
        {"sources": [WEB, CODE, BOOKS], "stages": [*STAGES[:2], {"sources": {"books": {"weight": 1}}}]},
        r"stages\[2\]: source 'books' was withdrawn in stages\[1\]; remove it here",
        [{"sources": [WEB, CODE, BOOKS | {"weight": 1}], "stages": STAGES}],
    ),
    (
        {"cycle": 4, "shuffle_window": 4},
        "cycle: duplicate key: cycle is the old name of shuffle_window; remove cycle",
        [{"cycle": None}],
    ),
    (
        {"inter_document_masking": True, "create_attention_mask": True},
        "inter_document_masking: gives cu_seqlens, not an attention mask; set create_attention_mask: false",
        [{"create_attention_mask": False}],
    ),
    (
        {
            "on_exhausted": "redistribute",
            "sources": [WEB | {"max_epochs": 2}, CODE],
            "stages": [{"samples": 64}, {"schedule": "linear", "sources": {"web": {"weight": 1}}}],
        },
        r"stages\[1\]: schedule: its shares are given step by step.*; set `on_exhausted: error`, or list stages of constant",
        [{"on_exhausted": "error"}, {"stages": [{"samples": 64}, {"sources": {"web": {"weight": 1}}}]}],
    ),
    (
        {"sources": [WEB | {"weight": "size"}, CODE]},
        "'code' has weight 1, other sources `weight: size`; expected `size` for all sources of a blend, or numbers for all; 0",
        [
            {"sources": [WEB | {"weight": "size"}, CODE | {"weight": "size"}]},
            {"sources": [WEB, CODE]},
            {"sources": [WEB | {"weight": "size"}, CODE | {"weight": 0}]},
        ],
    ),
    (
        {"temperature": 2, "samples": None, "sources": [{**WEB, "weight": None, "epochs": 1}]},
        "temperature: it changes weights, but the share of 'web' is given by epochs; use weights .* or remove temperature",
        [{"sources": [WEB | {"weight": "size"}], "samples": 9}, {"temperature": None}],
    ),
    (
        {"stages": [{"lanes": 4, "sources": [{"name": "web", "weight": 2}]}]},
        r"found a list, expected the changes of each source, as in `sources: \{web: \{weight: 2\}\}`",
        [{"stages": [{"lanes": 4, "sources": {"web": {"weight": 2}}}]}],
    ),
    (
        {"stages": [{"samples": 64}, {"steps": 4, "sources": {"web": {"weight": 2}}}]},
        "steps apply to a schedule only; add `schedule: linear` or `cosine`, or remove steps",
        [
            {"stages": [{"samples": 64}, {"schedule": kind, "steps": 4, "sources": {"web": {"weight": 2}}}]}
            for kind in ("linear", "cosine")
        ]
        + [{"stages": [{"samples": 64}, {"sources": {"web": {"weight": 2}}}]}],
    ),
    (
        {"stages": [{"samples": 64, "tokens": 512}, {"lanes": 4}]},
        "the stage's end is given by samples and tokens; keep one of them",
        [{"stages": [{"samples": 64}, {"lanes": 4}]}, {"stages": [{"tokens": 512}, {"lanes": 4}]}],
    ),
    (
        {"stages": [{"lanes": 8}, {"lanes": 4}]},
        r"stages\[0\]: weights are relative, so the stage needs an end; add samples, tokens or share",
        [{"stages": [{"lanes": 8, **end}, {"lanes": 4}]} for end in ({"samples": 64}, {"tokens": 512}, {"share": 0.5})],
    ),
    (
        {"stages": [{"samples": 64}, {"samples": 192}]},
        "samples: the last stage already says where the run ends; remove one of the two",
        [{"samples": None}, {"stages": [{"samples": 64}, {"lanes": 4}]}],
    ),
    (
        {"stages": [{"from": 3, "lanes": 4}]},
        r"stages\[0\]: found `from`, but the first stage begins with the run; list the stage that it cuts before it, or "
        "remove it$",
        [{"stages": [{"samples": 64}, {"from": 3, "lanes": 4}]}, {"stages": [{"lanes": 4}]}],
    ),
    (
        {"samples": None, "stages": [{"share": 0.5}, {"lanes": 4, "samples": 192}]},
        r"stages\[0\]: share is a fraction of the run's length, which is not set; add samples, tokens or epochs$",
        [
            {"stages": [{"share": 0.5}, {"lanes": 4}], **length}
            for length in ({"samples": 192}, {"tokens": 999}, {"epochs": 1})
        ],
    ),
    (
        {"stages": [{"samples": 64}, {"seed": 3}]},
        r"stages\[1\]: seed cannot change within a run, .*; set it at the top level for a new run \(`run:`\)$",
        [{"stages": [{"samples": 64}, {"lanes": 4}], "seed": 3, "run": "new"}],
    ),
    (
        {"stages": [{"samples": 64}, {"lanes": 4, "sources": {"books": {"weight": 1}}}]},
        r"stages\[1\]: train has no source 'books'; list it in `sources` too, with `weight: 0`$",
        [{"sources": [WEB, CODE, BOOKS]}],
    ),
    (
        {"tokens": 512},
        "tokens: the length of train is given by samples already; keep one of them",
        [{"tokens": None}, {"samples": None}],
    ),
    (
        {"sources": [WEB | {"path": "file:///w.arrow"}]},
        r"found 'file:///w\.arrow'; write it as a plain path: `/w\.arrow`",
        [{"sources": [WEB]}],
    ),
]


@pytest.mark.parametrize(("settings", "says", "changes"), REMEDIES, ids=[says[:40] for _, says, _ in REMEDIES])
def test_a_setting(settings: Settings, says: str, changes: list[Settings]) -> None:
    given = BASE | settings
    with pytest.raises(ConfigError, match=says):
        load(given)
    for change in changes:
        load({**given, **change})


def load(given: Settings) -> None:
    """Load a config without the settings that are None, in its sources too."""
    sources = given["sources"]
    if isinstance(sources, list):
        sources = [{key: value for key, value in source.items() if value is not None} for source in sources]
    load_config({key: value for key, value in (given | {"sources": sources}).items() if value is not None})


def test_a_duplicate_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    lines = ["cache: c", "sequence_length: 8", "samples: 9", "samples: 8", "sources: [{name: a, path: /a.arrow}]"]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"run\.yaml:4: samples: duplicate key; keep one$") as caught:
        load_config(path)
    line = re.search(r"yaml:(\d+):", str(caught.value))
    assert line
    del lines[int(line[1]) - 1]
    path.write_text("\n".join(lines))
    assert load_config(path).samples == 9

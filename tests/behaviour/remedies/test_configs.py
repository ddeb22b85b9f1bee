"""Settings of a config and of storages: the change that a message asks for is made, and then the config loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megablend.config import load_config
from megablend.megatron.request.address import parse_address
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.behaviour.remedies.driver import Bench, fault, misuse, table

WEB: dict[str, Any] = {"name": "web", "path": "/w.arrow", "weight": 3}
CODE: dict[str, Any] = {"name": "code", "path": "/c.arrow", "weight": 1}
BOOKS: dict[str, Any] = {"name": "books", "path": "/b.arrow", "weight": 0}
READ: dict[str, Any] = BOOKS | {"weight": 1}
WITHDRAWN: list[dict[str, Any]] = [
    {"samples": 64},
    {"samples": 128, "withdraw": ["books"]},
    {"lanes": 4},
]
TWO = {"sources": {"web": {"weight": 2}}}


class Config(Bench):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "run.yaml"
        self.given: dict[str, Any] = {
            "cache": "c",
            "sequence_length": 8,
            "samples": 192,
            "sources": [WEB, CODE],
        }

    def change(self, settings: Mapping[str, Any]) -> None:
        self.given |= settings

    def use(self) -> None:
        """Load the config without the settings that are None, in its sources too."""
        sources = self.given["sources"]
        if isinstance(sources, list):
            sources = [
                {key: value for key, value in source.items() if value is not None}
                for source in sources
            ]
        self.loaded = load_config(
            {k: v for k, v in (self.given | {"sources": sources}).items() if v is not None}
        )

    def read_file(self) -> None:
        self.loaded = load_config(self.path)


@pytest.fixture
def bench(tmp_path: Path) -> Config:
    return Config(tmp_path)


def changed(change: dict[str, Any], *stages: dict[str, Any]) -> dict[str, Any]:
    """Settings, with 64 samples before these stages."""
    return {**change, "stages": [{"samples": 64}, *stages]}


def listed(*sources: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"sources": list(sources), **settings}


def write_twice(bench: Config) -> None:
    lines = [
        "cache: c",
        "sequence_length: 8",
        "samples: 9",
        "samples: 8",
        "sources: [{name: a, path: /a.arrow}]",
    ]
    bench.path.write_text("\n".join(lines))


def remove_line(bench: Config) -> None:
    lines = bench.path.read_text().splitlines()
    del lines[int(bench.said[1]) - 1]
    bench.path.write_text("\n".join(lines))


# fmt: off
test_settings = table(
    fault("a size", {"memory": "lots"}, r"memory: found 'lots', expected a size such as (512MiB)$", {"memory": "{1}"}),
    fault("an empty path", {"local_cache": ""}, r"local_cache: found '', expected a path; use `(\.)` for the current folder",
          {"local_cache": "{1}"}),
    fault("sources by split", {"sources": {"train": [WEB], "valid": [CODE]}, "split": "80,20,0"},
          "split: `sources` already lists the sources of each split; keep only one of the two",
          {"split": None}, listed(WEB, CODE)),
    fault("no path", listed(WEB | {"path": []}), r"path: found \[\], expected a path, a glob or a list of them",
          *(listed(WEB | {"path": path}) for path in ("/w.arrow", "/*.arrow", ["/v.arrow", "/w.arrow"]))),
    fault("withdrawn, not listed", {"stages": WITHDRAWN},
          r"stages\[1\]: withdraw: train has no source 'books'; put it back in `sources`, since earlier stages read it",
          listed(WEB, CODE, READ)),
    fault("withdrawn and changed",
          changed(listed(WEB, CODE, BOOKS), WITHDRAWN[1] | {"sources": {"books": {"weight": 1}}}, {"lanes": 4}),
          r"stages\[1\]: source 'books' is both withdrawn and changed in `sources`; keep only one of the two",
          listed(WEB, CODE, READ, stages=WITHDRAWN),
          changed({}, {"samples": 128, "sources": {"books": {"weight": 1}}}, {"lanes": 4})),
    fault("withdrawn before", listed(WEB, CODE, BOOKS, stages=[*WITHDRAWN[:2], {"sources": {"books": {"weight": 1}}}]),
          r"stages\[2\]: source 'books' was withdrawn in stages\[1\]; remove it here",
          listed(WEB, CODE, READ, stages=WITHDRAWN)),
    fault("an old name", {"cycle": 4, "shuffle_window": 4},
          "cycle: unknown key; it is the old name of `shuffle_window`; write that instead", {"cycle": None}),
    fault("two kinds of masks", {"inter_document_masking": True, "create_attention_mask": True},
          "inter_document_masking: provides cu_seqlens instead of an attention mask; set `create_attention_mask: false`",
          {"create_attention_mask": False}),
    fault("a schedule that is redistributed",
          changed(listed(WEB | {"max_epochs": 2}, CODE, on_exhausted="redistribute"), {"schedule": "linear", **TWO}),
          r"stages\[1\]: schedule: shares that .* cannot be redistributed; set `on_exhausted: error`, or list stages "
          r"with constant",
          {"on_exhausted": "error"}, changed({}, TWO)),
    fault("sizes and numbers", listed(WEB | {"weight": "size"}, CODE),
          "'code' has weight 1, but other sources have `weight: size`; expected `size` for all sources of a blend, "
          "or numbers for all",
          listed(WEB | {"weight": "size"}, CODE | {"weight": "size"}), listed(WEB, CODE),
          listed(WEB | {"weight": "size"}, CODE | {"weight": 0})),
    fault("a temperature of epochs", listed({**WEB, "weight": None, "epochs": 1}, temperature=2, samples=None),
          "temperature: only applies to weights, but the share of 'web' is given by epochs; use weights .* or remove temperature",
          listed(WEB | {"weight": "size"}, samples=9), {"temperature": None}),
    fault("a list of changes", {"stages": [{"lanes": 4, "sources": [{"name": "web", "weight": 2}]}]},
          r"found a list, expected the changes for each source, as in `sources: \{web: \{weight: 2\}\}`",
          {"stages": [{"lanes": 4, **TWO}]}),
    fault("steps without a schedule", changed({}, {"steps": 4, **TWO}),
          "steps apply to a schedule only; add `schedule: linear` or `cosine`, or remove steps", changed({}, TWO),
          *(changed({}, {"schedule": kind, "steps": 4, **TWO}) for kind in ("linear", "cosine"))),
    fault("two ends of a stage", {"stages": [{"samples": 64, "tokens": 512}, {"lanes": 4}]},
          "the stage's end is given by samples and tokens; keep only one",
          {"stages": [{"samples": 64}, {"lanes": 4}]}, {"stages": [{"tokens": 512}, {"lanes": 4}]}),
    fault("no end of a stage", {"stages": [{"lanes": 8}, {"lanes": 4}]},
          r"stages\[0\]: has no end, and weights do not say where it ends; add samples, tokens or share",
          *({"stages": [{"lanes": 8, **end}, {"lanes": 4}]} for end in ({"samples": 64}, {"tokens": 512}, {"share": 0.5}))),
    fault("two ends of a run", changed({}, {"samples": 192}),
          "samples: the last stage already sets the end of the run; remove one of the two",
          {"samples": None}, changed({}, {"lanes": 4})),
    fault("a beginning of the first stage", {"stages": [{"from": 3, "lanes": 4}]},
          r"stages\[0\]: found `from`, but the first stage begins at sample 0 and has no earlier stage to cut short; "
          r"list the earlier stage before this one, or remove `from`$",
          changed({}, {"from": 3, "lanes": 4}), {"stages": [{"lanes": 4}]}),
    fault("a share of no length", {"samples": None, "stages": [{"share": 0.5}, {"lanes": 4, "samples": 192}]},
          r"stages\[0\]: share is a fraction of the run's length, which is not set; add samples, tokens or epochs$",
          *({"stages": [{"share": 0.5}, {"lanes": 4}], **end} for end in ({"samples": 192}, {"tokens": 999}, {"epochs": 1}))),
    fault("another seed", changed({}, {"seed": 3}),
          r"stages\[1\]: seed cannot change within a run, .*; set it at the top level for a new run \(`run:`\)$",
          changed({"seed": 3, "run": "new"}, {"lanes": 4})),
    fault("a source of a stage", changed({}, {"lanes": 4, "sources": {"books": {"weight": 1}}}),
          r"stages\[1\]: train has no source 'books'; list it in `sources` too, with `weight: 0`$", listed(WEB, CODE, BOOKS)),
    fault("two lengths", {"tokens": 512},
        "tokens: the number of training samples is already set by samples; keep only one of the two",
          {"tokens": None}, {"samples": None}),
    fault("a URL of a file", listed(WEB | {"path": "file:///w.arrow"}),
          r"found 'file:///w\.arrow'; write it as a plain path: `(/w\.arrow)`", listed(WEB | {"path": "{1}"})),
    fault("two storages", listed(WEB | {"path": ["/data/a.parquet", "s3://b/a.parquet"]}),
          r"different storage systems \(plain paths, s3://\); use a separate source for each",
          listed(WEB | {"path": "/data/a.parquet"}, CODE | {"path": "s3://b/a.parquet"})),
    fault("a key twice", write_twice, r"run\.yaml:(4): samples: duplicate key; keep one$", remove_line,
          fails=Config.read_file),
    fault("a pattern of URLs", listed(WEB | {"path": "https://h/part-*.parquet"}),
          r"with braces \(\{00\.\.12\}\), or in a text file of URLs, one per line, .* \.urls",
          (listed(WEB | {"path": "https://h/part-{00..12}.parquet"}), lambda bench: expect_urls(bench, 13)),
          (lambda bench: write_urls(bench, "https://h/0.parquet", "https://h/1.parquet"), lambda bench: expect_urls(bench, 2)),
          fails=lambda bench: make_storage().find(bench.given["sources"][0]["path"]), works=Config.use),
    fault("no URLs", lambda bench: write_urls(bench, ""), "contains no URLs; expected one per line",
          lambda bench: write_urls(bench, "https://h/0.parquet")),
    fault("a path among URLs", lambda bench: write_urls(bench, "/local"),
          r"entry 1 is '/local', expected a URL \(http:// or https://\)", lambda bench: write_urls(bench, "https://h/0.parquet")),
    fault("too many URLs", listed(WEB | {"path": "https://h/{0..999999}-{a,b}.parquet"}),
          r"its braces stand for 2,000,000 URLs, expected at most (1,000,000)",
          listed(WEB | {"path": "https://h/{0..9}-{a,b}.parquet"})),
    *(misuse(lambda _, query=query: parse_address(f"parquet:/data/*.parquet?{query}"), f"option 'column' has {found}; give one$",
             lambda _: parse_address("parquet:/data/*.parquet?column=a"), name=f"an option that has {found}")
      for query, found in (("column=a&column=b", "two values"), ("column=", "no value"))),
)


def storage(name: str, wrong: Any, says: str, instead: Any, prefix: str = "s3://b") -> Any:
    """Settings of a prefix of URLs, and others that are taken."""
    return misuse(lambda _: parse_options({prefix: wrong}), says, lambda bench: parse_options({"s3://b": bench.fill(instead)}),
                  name=name)


def mirror(name: str, wrong: Any, says: str, instead: Any) -> Any:
    """Settings of a mirror, and others that are taken."""
    return misuse(lambda _: parse_options({"mirror": {"folder": "/m"} | wrong}), says,
                  lambda bench: parse_options({"mirror": {"folder": "/m"} | bench.fill(instead)}), name=f"mirror: {name}")


test_settings_of_a_storage = table(
    storage("no scheme", {"endpoint": "h:80"}, "expected a URL such as (http)s://host:port", {"endpoint": "{1}://h:80"}),
    storage("a user", {"endpoint": "http://u:p@h"}, "contains a user or password; set it in the environment",
            {"endpoint": "http://h"}),
    storage("a slip", {"endpont": "http://h"}, "unknown setting; did you mean '(endpoint)'", {"endpoint": "http://h"}),
    storage("a secret", {"secret_access_key": "x"},
            "credentials do not belong in configs; use environment variables or a profile", {"profile": "x"}),
    storage("a number", {"region": 3}, "expected text", {"region": "3"}),
    *(storage(f"a region {wrong}", {"region": wrong}, "expected the name of a region such as (us-east-1)", {"region": "{1}"})
      for wrong in ("eu west 1", "us-east-1/", "us-east-1.example.com/", "us:1", "us?1", "u@h", "é", "-")),
    storage("no time", {"read_timeout": 0}, "expected a number above 0", {"read_timeout": 1}),
    storage("no truth", {"anonymous": "yes"}, "expected true or false", {"anonymous": True}),
    storage("no settings", [], "expected settings such as `endpoint: (https://...)`", {"endpoint": "{1}"}),
    storage("no prefix", {}, r"b: expected a URL prefix such as (s3://bucket/)", {}, prefix="b"),
    misuse(lambda _: parse_options("s3://b"), "found 's3://b', expected URL prefixes, each with its settings",
           lambda _: parse_options({"s3://b": {}}), name="no mapping"),
    mirror("a size", {"size": "5i"}, "size: found '5i', expected a size such as (512MiB)$", {"size": "{1}"}),
    mirror("a URL", {"folder": "s3://b"}, "expected a path on this machine, without a scheme", {"folder": "b"}),
    mirror("a prefix", {"prefixes": ["b"]}, "expected a URL prefix such as (s3://bucket/), or the absolute path",
           {"prefixes": ["{1}"]}),
    mirror("no nodes", {"copies": 2}, "copies: needs `nodes`; set `nodes`, or remove `copies`",
           {"copies": 2, "nodes": ["a:1", "b:1"]}),
    mirror("copies", {"copies": 2, "nodes": ["a:1"]},
           "copies: found 2, expected at most 1, the number of `nodes`, or `(all)`",
           {"copies": "{1}", "nodes": ["a:1"]}),
    mirror("no list", {"nodes": "a:1"}, r"expected a list of nodes: \[(a:1), ...\]", {"nodes": ["{1}"]}),
    mirror("two ways", {"nodes": ["a:1"], "secret_file": "s", "tls": {"certificate": "c", "key": "k", "ca": "a"}},
           "secret_file: found together with `tls`; keep one of them", {"nodes": ["a:1"], "secret_file": "s"}),
)
# fmt: on


def write_urls(bench: Config, *urls: str) -> None:
    (bench.folder / "parts.urls").write_text("\n".join(urls))
    bench.change(listed(WEB | {"path": str(bench.folder / "parts.urls")}))


def expect_urls(bench: Config, count: int) -> None:
    bench.use()
    assert len(bench.loaded.sources["train"][0].path) == count

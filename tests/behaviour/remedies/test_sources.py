"""Sources and their shares: what messages say to do is done, word for word; and then the run is built and read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import megablend
from megablend.operations.build import build
from tests.behaviour.remedies.driver import Bench, Fault, Step, attempt, fault, table
from tests.behaviour.remedies.files import ROWS, arrow, pair, parquet, raw

Source = dict[str, Any]


class Sources(Bench):
    """A run; the settings that change are those of the config."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self.config: dict[str, Any] = {
            "cache": str(folder / "cache"),
            "sequence_length": 8,
            "samples": 20,
        }
        self.data("a.parquet")
        self.change({"sources": [{"path": f"{folder}/a.parquet"}]})

    def data(self, name: str, columns: Any = None) -> Path:
        """A file of data, or an empty file if its name is of another kind."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = {"ids": pa.array(ROWS, pa.list_(pa.int32()))} if columns is None else columns
        kinds = {
            ".parquet": parquet(columns),
            ".arrow": arrow(columns),
            ".bin": pair([len(row) for row in ROWS]),
        }
        kinds.get(path.suffix, raw(b""))(path)
        return path

    def change(self, settings: Mapping[str, Any]) -> None:
        """Sources are named s0, s1 and so on."""
        given = {
            key: value for key, value in {**self.config, **settings}.items() if value is not None
        }
        given["sources"] = [
            {"name": f"s{i}", **source} if isinstance(source, dict) else source
            for i, source in enumerate(given["sources"])
        ]
        self.config = given

    def use(self) -> None:
        build(self.config)
        assert len(megablend.open(self.config)[0]["tokens"]) == 8


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    return Sources(tmp_path, monkeypatch)


def path(*paths: str, **source: Any) -> Step:
    """Sources of these paths."""
    shares = {} if len(paths) == 1 else {"weight": 1}
    return {"sources": [{"path": each, **shares, **source} for each in paths]}


def data(*names: str, columns: Any = None) -> Step:
    return lambda bench: [bench.data(name, columns) for name in names]


def shares(*shares: Source, **settings: Any) -> Step:
    """Sources of one file with these shares."""
    return {"sources": [{"path": "{folder}/a.parquet", **share} for share in shares], **settings}


def move(name: str, to: str) -> Step:
    return lambda bench: (bench.folder / name).rename(bench.folder / to)


def link_to_nothing(bench: Sources) -> None:
    (bench.folder / "b.parquet").symlink_to("gone")


def skips(bench: Sources) -> None:
    bench.use()
    found = f"{bench.folder}/b.parquet: a broken symbolic link (to gone)"
    assert build(bench.config).index.skipped == (f"source 's0': {found}",)
    assert megablend.describe(bench.config).to_dict()["index"]["sources"][0]["skipped"] == [found]


FOLDERS = {
    "files": ["x/a.parquet"],
    "files and _SUCCESS": ["x/_SUCCESS", "x/a.parquet"],
    "folders": ["x/_SUCCESS", "x/deep/er/a.arrow"],
    "pairs": ["x/x.bin"],
    "files beside others": ["x/dataset_info.json", "x/a.parquet"],
    "files, and brackets in its name": ["odd [x]/a.parquet"],
}
WITH_ADVICE = ("files and _SUCCESS", "files beside others")
"""For their `*`: the others are found, or are a folder of nothing but _SUCCESS."""


def folders() -> list[Fault]:
    """Each folder by its name, with a slash, and by `*`."""
    return [
        fault(
            f"a folder of {kind}{end}",
            (data(*names), path(f"{{folder}}/{names[0].partition('/')[0]}{end}")),
            "specify its files as `([^`]+)`",
            path("{1}"),
        )
        for kind, names in FOLDERS.items()
        for end in ("", "/", "/*")
        if end != "/*" or kind in WITH_ADVICE
    ]


def says_of(name: str) -> str:
    """Of a pair that lacks its `.bin`."""
    return rf"(?s)^(?!.*did you mean).*/{name}\.bin.*restore the \.bin next to the \.idx"


INT32 = pa.array(ROWS, pa.list_(pa.int32()))
SLIPS: tuple[Source, ...] = ({}, {"format": "arrow"})
CAPS = [{"weight": 1, "max_epochs": cap} for cap in (10, 2, 1.5, 1)]
UNITS: dict[str, Any] = {
    "samples": {},
    "tokens": {"samples": None, "tokens": 160},
    "epochs": {"samples": None, "epochs": 0.05},
}
MANY: dict[str, Any] = {
    "samples": {"samples": 1_000_000},
    "tokens": {"samples": None, "tokens": 8_000_000},
    "epochs": {"samples": None, "epochs": 300},
}
NO_EOD = "reset_attention_mask and eod_mask_loss need to know.*the sources append different ones"
PLAIN = r"^(?!.*(instance of|\^|\[\^|valid (dictionary|string|integer)|pattern|Input)).*expected"


def setting(wrong: dict[str, Any], says: str, value: Any) -> Fault:
    """A setting with a value that is refused, and one that its message allows."""
    ((key, _),) = wrong.items()
    return fault(f"{wrong}", wrong, re.escape(says), {key: value})


def raise_caps(bench: Sources) -> None:
    """Each cap by itself, as its own message says."""
    bench.change({"samples": 4000, "run": "caps"})
    for _ in CAPS:
        if found := re.search(
            "source 's(.)'.*`max_epochs: ([^`]+)`", attempt(bench, Sources.use), re.DOTALL
        ):
            bench.config["sources"][int(found[1])]["max_epochs"] = found[2]


# fmt: off
test_paths = table(
    *folders(),
    fault("a folder of shards that are not read", (data("x/shard.00000.mds", "x/index.json"), path("{folder}/x")),
          "contains MosaicML MDS shards, which megablend cannot read: write the tokens to Parquet",
          (data("x/a.parquet"), path("{folder}/x/*.parquet"))),
    fault("a folder of Lance files", (data("x/data/0.lance", "x/_versions/hint.json"), path("{folder}/x")),
          "contains Lance files, which megablend cannot read: write the tokens to Parquet",
          (data("x/a.parquet"), path("{folder}/x/*.parquet"))),
    fault("an empty folder", (lambda bench: (bench.folder / "x").mkdir(), path("{folder}/x")),
          r"it contains no files that megablend reads \(.parquet,", (data("x/a.parquet"), path("{folder}/x/*.parquet"))),
    *(fault(f"a URL of a file {host}", path(f"file://{host}{{folder}}/a.parquet"), "write it as a plain path: `([^`]+)`",
            path("{1}"))
      for host in ("", "localhost")),
    fault("a URL of a relative path",
          (data("spark/0.parquet"), lambda bench: bench.patch.chdir(bench.folder), path("file://spark/0.parquet")),
          "write it as a plain path: `(spark/0.parquet)`$", path("{1}")),
    *(fault(f"a pair without its .bin, {name}", (data("meg1.bin"), move("meg1.bin", "aside"), path(f"{{folder}}/{name}")),
            says_of("meg1"),
            (move("aside", "meg1.bin"), path("{folder}/meg1")))
      for name in ("meg1", "meg1.bin", "meg1.idx", "meg1.*")),
    fault("a pair without its .idx", (data("meg1.bin"), move("meg1.idx", "aside"), path("{folder}/meg1")),
          "meg1 stands for two files, and .*/meg1.idx does not exist: restore the .idx"
          "(?=.*`path: ([^`]+)`)(?=.*`format: ([^`]+)`)",
          path("{1}", format="{2}", format_options={"dtype": "uint16"}), move("aside", "meg1.idx")),
    *(fault(f"a slip where no data has such a name {more}", (data("x/book.yaml", "x/book.json"), path("{folder}/x/book.arow",
            **more)),
            "book.arow matches no file$", (data("x/book.arrow"), path("{folder}/x/book.arrow", **more))) for more in SLIPS),
    *(fault(f"a slip in a name {more}", (data("book.yaml", "boook.arrow"), path("{folder}/book.arow", **more)),
            r"did you mean '(.*/boook.arrow)'\?$", path("{1}", **more)) for more in SLIPS),
    fault("a slip in a name of Parquet", path("{folder}/aa.parquet"), r"did you mean '(.*)'\?", path("{1}")),
    fault("what cannot be read", (link_to_nothing, path("{folder}/*.parquet")), "remove broken links.*`on_unreadable: (skip)`",
          ({"on_unreadable": "{1}"}, skips), lambda bench: (bench.folder / "b.parquet").unlink()),
    fault("files with different columns",
          (data("a.parquet", columns={"input_ids": INT32}), data("b.parquet", columns={"tokens": INT32}),
          path("{folder}/*.parquet")),
          "are in column 'input_ids' of .*/a.parquet, but in 'tokens' of .*/b.parquet; list the files as separate sources, or "
          "set `column:` to a column that all of them have$",
          path("{folder}/a.parquet", "{folder}/b.parquet"),
          (data("a.parquet", "b.parquet", columns={"input_ids": INT32, "both": INT32}),
          path("{folder}/*.parquet", column="both")),
          data("b.parquet", columns={"tokens": INT32, "input_ids": INT32})),
)

test_shares = table(
    # the number that is said fits all sources at once
    *(fault(f"too few {unit} for some sources", shares(*({"weight": weight} for weight in (1, 0.01, 0.003, 0.0007)), **length),
            f"samples or more has at least one of each.*`{unit}: ([^`]+)`", {unit: "{1}"}) for unit, length in UNITS.items()),
    *(fault(f"more {unit} than caps allow", shares(*CAPS, **length), f"`{'tokens' if unit == 'tokens' else 'samples'}: ([^`]+)`",
            {unit: None, "tokens" if unit == "tokens" else "samples": "{1}"}, ({unit: None}, raise_caps)) for unit,
            length in MANY.items()),
    fault("no length that fits", shares({"weight": 1, "max_epochs": 1}, {"weight": 0.00001}),
          "No length fits: a run needs at least 100,001 samples to include one of each source, but the caps allow only",
          *(shares({"weight": 1, "max_epochs": 1}, {"weight": weight}) for weight in (0.1, 0))),
    fault("a longer run than the shares as redistributed allow",
          ({"on_exhausted": "redistribute"}, shares({"weight": 1, "max_epochs": 1}, {"weight": 0.00001})),
          "samples or more has at least one of each.*`samples: ([^`]+)`", {"samples": "{1}"}),
    fault("no plan that is long enough", shares({"weight": 1}, {"weight": "1e-18"}), "^(?!.*set `).*but can have at most",
          shares({"weight": 1}, {"weight": 0.1})),
    *(fault(f"a run of no sample in {unit}", {"samples": None, unit: value}, f"`{unit}: ([^`]+)`", {unit: "{1}"})
      for unit, value in (("tokens", 3), ("epochs", "0.000001"))),
    *(fault(f"a source of no sample in {unit}", shares({unit: most}, {unit: least}, samples=None), f"`{unit}: ([^`]+)`",
            shares({unit: most}, {unit: "{1}"}), shares({unit: most}, {unit: 0}))
      for unit, most, least in (("tokens", 1000, 3), ("epochs", 1, "0.0001"))),
    fault("one source, without tokens",
          (data("empty.parquet", columns={"ids": pa.array([[], []], pa.list_(pa.int32()))}), path("{folder}/empty.parquet")),
          "^(?!.*leave it out).*add files with tokens to it",
          {"sources": [{"path": ["{folder}/empty.parquet", "{folder}/a.parquet"]}]}),
    fault("two sources, one without tokens",
          (data("empty.parquet", columns={"ids": pa.array([[], []], pa.list_(pa.int32()))}),
          path("{folder}/a.parquet", "{folder}/empty.parquet")),
          "`weight: (0)`", {"sources": [{"path": "{folder}/a.parquet", "weight": 1}, {"path": "{folder}/empty.parquet",
          "weight": "{1}"}]}),
)

test_settings = table(
    fault("masks without an end of document", {"reset_position_ids": True},
          "eod_token: missing; reset_position_ids needs to know the end-of-document token: set `eod_token` to", {"eod_token": 1}),
    fault("masks and two ends of documents", shares(*({"weight": 1, "append_eod": token} for token in (1, 2)), eod_mask_loss=True,
                                                    reset_attention_mask=True),
          rf"{NO_EOD} \(1, 2\): set `eod_token`", {"eod_token": 2}),
    setting({"samples": -5}, "samples: found -5, expected more than 0", 1),
    setting({"sequence_length": -5}, "sequence_length: found -5, expected more than 0", 8),
    setting({"lanes": 0}, "lanes: found 0, expected 1 or more", 1),
    setting({"lanes": 2.5}, "lanes: found 2.5, expected a whole number", 2),
    setting({"seed": -1}, "seed: found -1, expected 0 or more", 0),
    setting({"direct_io": "maybe"}, "direct_io: found 'maybe', expected true or false", False),
    setting({"run": "a b"}, "run: found 'a b', expected at most 100 letters, digits, `.`, `_` and `-`, the first a letter",
            "a-b"),
    setting({"on_unreadable": "skp"}, "found 'skp', expected 'error' or 'skip'; did you mean 'skip'?", "skip"),
    *(fault(f"a source that is {source}", {"sources": [source]}, PLAIN, path("{folder}/a.parquet"))
      for source in ("a.parquet", 5, None, {"name": "a b", "path": "x"}, {"name": 5, "path": "x"})),
)
# fmt: on

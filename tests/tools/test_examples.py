"""The example configs are valid, the tables of docs/configuration.md name every key of a config once, and nothing else, and
the numbers of the example in docs/concepts.md are those of its run."""

import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from trace_calls import make_config

import megablend
from megablend.blend.interleavings.lane_schedule import make_lane_schedule
from megablend.config import Config, Source, load_config
from megablend.config.settings import OLD_KEYS
from megablend.inspect.description import SourceDescription, SplitDescription
from megablend.kernels.blend.keyed_hash import bounded_hash, hash_combine
from megablend.operations.gc import GcResult
from megablend.order.registry import OLD_NAMES

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if not path.name.endswith(".kubernetes.yaml")
]


def table_keys(heading: str) -> list[str]:
    """Names in backquotes in the first column of the tables of keys in a section of the page."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    tables = section.split("| key | value | default | meaning |\n|---|---|---|---|\n")[1:]
    rows = [row for table in tables for row in table.partition("\n\n")[0].splitlines()]
    assert all(cell.strip() for row in rows for cell in row.split(" | ")), "empty cell"
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_config_is_valid(path: Path) -> None:
    config = load_config(path)
    assert config.sources["train"]


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES} == {
        "demo.yaml",
        "megatron_prefix.yaml",
        "per_split.yaml",
    }


def test_the_docs_name_every_key_of_a_config_once() -> None:
    assert sorted(table_keys("Keys of the run")) == sorted(Config.model_fields)


def test_the_docs_name_every_key_of_a_source_once() -> None:
    assert sorted(table_keys("Keys of a source")) == sorted(Source.model_fields)


def test_old_names_are_in_one_table() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    named, table = page.split("\n## Old names\n")
    assert not re.search(r"`(order: )?(cycle|page|row)`", named)
    json_keys = [each.OLD_KEYS for each in (SourceDescription, SplitDescription, GcResult)]
    for old, new in chain.from_iterable(each.items() for each in (OLD_KEYS, *json_keys)):
        assert f"| `{old}` | `{new}` |" in table
    for old, new in OLD_NAMES.items():
        assert f"| `order: {old}` | `order: {new}` |" in table


def test_the_numbers_of_the_example_are_those_of_its_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    section = page.partition("\n### An example\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (\w[\w, ]*) \| (.+) \|$", section, re.MULTILINE))
    config = make_config(tmp_path)
    lanes = config["lanes"]
    window = config["shuffle_window"]
    size = lanes * window
    megablend.build(config)
    run = megablend.open(config).run
    sources, ordinals = run.plan.locate_many(np.arange(run.num_samples))
    shown = megablend.show(config, 700)
    (span,) = shown.pieces
    low = 700 // size * size
    stop = low + size
    slot = (700 - low) // lanes
    lane = (700 - low) % lanes
    schedule = make_lane_schedule(lanes, window)
    seed = run.ledger.blend.seed
    shift = bounded_hash(hash_combine(hash_combine(seed, 0), 700 // size), 0, window)
    turn = (schedule.stride * slot + shift) % window
    first = int(schedule.firsts[lane])
    position = (first + lanes * turn) % size
    before = int((sources[:low] == 1).sum())
    after = int((sources[:stop] == 1).sum())
    of_lane = np.arange(lane, stop, lanes)
    dealt = ordinals[of_lane[sources[of_lane] == 1]]
    dealt.sort()
    in_cycle = ordinals[low + lane : stop : lanes][sources[low + lane : stop : lanes] == 1]
    epoch = int(run.data.parts["tokens"][1])
    begin = shown.ordinal * config["sequence_length"]
    assert dealt.tolist() == list(range(len(dealt)))
    assert sorted(in_cycle) == list(range(len(dealt) - len(in_cycle), len(dealt)))
    assert len(in_cycle) == 6
    assert position in range(after - before)
    assert (shown.source, shown.epochs) == ("b", (0,))
    told = {
        "cycle": f"{700 // size} | 700 // {size}: .* K x B = {size} samples.* {low} to {stop - 1}",
        "slot, lane": rf"{slot}, {lane} \| \(700 - {low}\) // {lanes}, \(700 - {low}\) % {lanes}",
        "turns of the lane": rf"{turn} \| \({schedule.stride} x {slot} \+ {shift}\) % {window}",
        "position": rf"{position} \| \({first} \+ {lanes} x {turn}\) % {size}: .* {position % lanes}$",
        "source": rf"`b` .* {before} of the first {low} .* {after} of the first {stop}: .* 0 to {after - before - 1}$",
        "ordinal": rf"{shown.ordinal} .* 25 .* {min(in_cycle)} in earlier .* six .* {min(in_cycle)} to {max(in_cycle)},",
        "tokens": rf"{begin:,} to {begin + 16:,} \| from {shown.ordinal} x 16 .* {epoch:,}$",
        "block": rf"{span.block}, .* {span.first_token:,} to {span.stop_token - 1:,} \| .* {begin - span.first_token:,} tokens$",
    }
    assert rows.keys() == {"what", *told}
    for name, pattern in told.items():
        assert re.match(pattern, rows[name]), (rows[name], pattern)
    assert run.num_samples // size == 25
    assert np.bincount(sources).tolist() == [267, 533]

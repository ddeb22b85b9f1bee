"""The example configs are valid, and the tables of docs/configuration.md name every key of a config once, and nothing else."""

import re
from itertools import chain
from pathlib import Path

import pytest

from megablend.config import Config, Source, load_config
from megablend.config.settings import OLD_KEYS
from megablend.inspect.description import SourceDescription, SplitDescription
from megablend.operations.gc import GcResult
from megablend.order.registry import OLD_NAMES

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "configs").glob("*.yaml"))


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

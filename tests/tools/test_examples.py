"""The example configs are valid, and the tables of docs/configuration.md name every key of a config and nothing else."""

import re
from pathlib import Path

import pytest

from megablend.config import Config, Source, load_config

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "configs").glob("*.yaml"))


def table_keys(heading: str) -> set[str]:
    """Names in backquotes in the first column of the table that follows `heading`."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.split(heading, 1)[1].split("|---|", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[1:]]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


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


def test_the_docs_name_every_key_of_a_config() -> None:
    assert table_keys("## Keys of the run\n") == set(Config.model_fields)


def test_the_docs_name_every_key_of_a_source() -> None:
    assert table_keys("## Keys of a source\n") == set(Source.model_fields)

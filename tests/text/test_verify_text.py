"""Documents that are tokenised again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megablend.errors import ConfigError
from megablend.operations.build import build
from megablend.operations.verify import verify
from megablend.text.engine import Engine, Tokens
from tests.cli.commands import run
from tests.text.test_build import make_config, write_text

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_wrong_tokens_are_found(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_text(tmp_path / "data", num_files=1, suffix=suffix, num=60)
    config = make_config(tmp_path, bos=True)
    encode = Engine.encode

    def encode_wrong(self: Engine, given: list[str]) -> Tokens:
        found = encode(self, given)
        if texts[40] in given:
            found.ids[int(found.counts[: given.index(texts[40])].sum())] += 1
        return found

    monkeypatch.setattr(Engine, "encode", encode_wrong)
    build(config, processes=1)
    monkeypatch.setattr(Engine, "encode", encode)
    (problem,) = verify(config, text=1000).problems
    assert re.search(
        rf"differ from those of the text at byte \d+ of {tmp_path}/data/0000.jsonl{suffix}; ",
        problem,
    )


def test_the_command(tmp_path: Path) -> None:
    write_text(tmp_path / "data", num=60)
    config = make_config(tmp_path)
    build(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert run("verify", path, "--text", 50).returncode == 0
    with pytest.raises(ConfigError, match="expected a config, which says where the text is"):
        verify(config["cache"], text=3)
    with (tmp_path / "data/0001.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    said = run("verify", path, "--text", 50)
    assert said.returncode == 3
    assert "0001.jsonl: is new, or has changed since it was tokenised" in said.stdout

"""Text files of one name, and token files of the same lines: each document is told by its own place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ConfigError
from megablend.inspect.find import find
from megablend.inspect.show import show
from megablend.operations.build import build
from megablend.operations.session import Session
from megablend.operations.source_specs import list_specs
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.text import work
from megablend.text.token_file import copy_token_file, read_footer
from megablend.text.verify_text import verify_text
from tests.text.test_build import make_config, token_files, write_text

STORAGE = make_storage()
pytestmark = pytest.mark.usefixtures("small_parts")


def write_lines(path: Path, num: int, first: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    lines = [
        json.dumps({"id": f"{path.parent.name}-{i}", "text": f"text {i} " * 9}) for i in range(num)
    ]
    path.write_text("\n".join([first or lines[0], *lines[1:], ""]))


def test_sources_with_files_of_the_same_names(tmp_path: Path) -> None:
    for name, num in (("one", 900), ("two", 500)):
        write_lines(tmp_path / name / "0.jsonl", num)
    config = make_config(tmp_path)
    source = config["sources"][0]
    config["sources"] = [
        source | {"name": name, "path": f"{tmp_path}/{name}/*"} for name in ("one", "two")
    ]
    build(config)
    for name in ("one", "two"):
        path = f"{tmp_path}/{name}/0.jsonl"
        for line in (5, 480):
            by_key = find(config, path, key=f"{name}-{line - 1}").found
            assert find(config, path, line=line).found == by_key
            assert find(config, f"{name}/0.jsonl", line=line).found == by_key
    with pytest.raises(ConfigError, match="2 text files in the index match this name"):
        find(config, "0.jsonl", line=5)
    for k in range(0, 200, 10):
        for piece in show(config, k).pieces:
            for place in piece.texts:
                assert place.key == f"{Path(place.text).parent.name}-{place.line - 1}"


def test_text_that_was_renamed_is_told_by_its_new_name(tmp_path: Path) -> None:
    write_text(tmp_path / "data", num_files=1)
    config = make_config(tmp_path)
    build(config)
    before = token_files(tmp_path / "cache/tokens")
    (tmp_path / "data/0000.jsonl").rename(tmp_path / "data/new.jsonl")
    build(config | {"run": "new"})
    made = [name for name in token_files(tmp_path / "cache/tokens") if name not in before]
    assert len(made) == len(before)
    for name in made:
        footer = read_footer(STORAGE, str(tmp_path / "cache/tokens" / name))
        assert footer["text"] == str(tmp_path / "data/new.jsonl")
    # They are those of a build that knows nothing of the old ones
    build(config | {"cache": str(tmp_path / "other")})
    assert token_files(tmp_path / "other/tokens") == {
        name: (tmp_path / "cache/tokens" / name).read_bytes() for name in made
    }


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_text_is_tokenised_if_the_token_file_of_the_same_lines_is_no_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, is_gone: bool
) -> None:
    write_text(tmp_path / "data", num_files=1)
    config = make_config(tmp_path, on_unreadable=policy)
    build(config)
    tokens = tmp_path / "cache/tokens"
    before = token_files(tokens)
    first = tokens / next(iter(before))
    damaged = bytearray(first.read_bytes())
    damaged[40:400] = bytes(360)
    first.write_bytes(damaged)
    if is_gone:  # since it was listed
        copy = copy_token_file

        def remove_and_copy(storage: Storage, path: str, *others: Any) -> None:
            first.unlink(missing_ok=True)
            copy(storage, path, *others)

        monkeypatch.setattr(work, "copy_token_file", remove_and_copy)
    (tmp_path / "data/0000.jsonl").rename(tmp_path / "data/new.jsonl")
    built = build(config | {"run": "new"})
    assert built.index.num_files == len(before)
    made = [each for name, each in token_files(tokens).items() if "/new.jsonl/" in name]
    build(config | {"cache": str(tmp_path / "other")})
    assert made == list(token_files(tmp_path / "other/tokens").values())


def test_lines_that_moved_have_token_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "data/0.jsonl"
    write_lines(path, 900)
    config = make_config(tmp_path)
    build(config)
    write_lines(path, 900, '{"text": "a first line that is shorter"}')
    build(config | {"run": "new"})
    opened = Session(config | {"run": "new"}).config
    assert list(verify_text(opened, list_specs(opened), STORAGE, 100)) == []


def test_another_token_that_begins_texts_makes_other_files(tmp_path: Path) -> None:
    write_text(tmp_path / "data", num_files=1, num=3)
    config = make_config(tmp_path, bos=True, samples=2)
    build(config)
    before = set(token_files(tmp_path / "cache/tokens"))
    (tmp_path / "gpt2/tokenizer_config.json").write_text(json.dumps({"bos_token": "a"}))
    shutil.copy(tmp_path / "data/0000.jsonl", tmp_path / "data/1.jsonl")
    build(config | {"run": "new"})
    opened = Session(config | {"run": "new"}).config
    assert list(verify_text(opened, list_specs(opened), STORAGE, 9)) == []
    assert len(token_files(tmp_path / "cache/tokens")) == 3 * len(before)

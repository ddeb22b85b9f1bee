"""The commands around runs and descriptions: what they print, in which width, and how they end with --json."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import megablend
from megablend.cli.main import main
from megablend.system.build_lock import build_lock
from tests.runs import documents, make_config, write_source

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megablend", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sources = [
        write_source(tmp_path, d, "arrow", documents(d, 60, 30, 5)) | {"weight": d + 1}
        for d in range(3)
    ]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(make_config(tmp_path, sources, samples=100, run="demo")))
    return path


def test_index_then_describe_then_build(config: Path, command: Command) -> None:
    code, out, _ = command("describe", config)
    assert code == 0
    assert "weight 3" in out
    assert "`megablend index CONFIG`" in out
    code, out, err = command("index", config)
    assert (code, "run 'demo'" in out) == (0, False)
    assert "indexed 6 of 6 files" in err
    assert json.loads(command("index", config, "--json")[1])["index"]["reused"] == 6
    code, out, _ = command("describe", config, "--all")
    assert "run 'demo': stages would end at sample 100" in out
    assert "note: run 'demo' is not committed; `megablend build CONFIG` commits it" in out
    assert "run 'demo' is new: 100 samples" in command("build", config)[1]
    assert "run 'demo': stages end at sample 100" in command("describe", config, "--all")[1]


def test_a_config_from_a_pipe(config: Path, command: Command) -> None:
    """What a shell makes of `<(envsubst < run.yaml)`; paths in it are absolute."""

    def pipe() -> str:
        reading, writing = os.pipe()
        ends.append(reading)
        with open(writing, "wb") as file:
            file.write(config.read_bytes())
        return f"/dev/fd/{reading}"

    ends = list[int]()
    assert "run 'demo' is new: 100 samples" in command("build", pipe())[1]
    for arguments in (["describe"], ["check"], ["show", "--sample", 3], ["runs", "list"]):
        given = [*arguments[:1], pipe(), *arguments[1:]]
        if arguments[0] == "runs":
            given = [*arguments, pipe()]
        code, out, err = command(*given)
        assert (code, bool(out)) == (0, True), err
    code, _, err = command("verify", pipe())
    assert code == 2
    assert (
        "found nothing, expected keys such as cache, sequence_length, sources; a pipe can be read only once: write it to a file"
        in err
    )
    for end in ends:
        os.close(end)


def test_runs_from_list_to_remove(tmp_path: Path, config: Path, command: Command) -> None:
    command("build", config)
    for where in (config, tmp_path / "cache"):
        assert re.search(r"demo .* 100 .* 1 ", command("runs", "list", where)[1])
    out = command("runs", "show", config, "demo")[1]
    assert "lanes: 4" in out
    assert "1/2" in out
    assert command("runs", "rename", config, "demo", "other")[:2] == (
        0,
        "run 'demo' is now 'other'\n",
    )
    code, out, err = command("runs", "reset", config, "demo", "--json")
    assert code == 3
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit_code"]) == ("CacheError", 3)
    assert err == f"megablend: {error['message']}\n"
    assert "contains no run 'demo'; its runs: 'other'" in error["message"]
    moved = Path(
        json.loads(command("runs", "reset", config, "other", "--json")[1])["ledger_moved_to"]
    )
    assert moved.is_file()
    assert json.loads(command("runs", "list", config, "--json")[1]) == {"runs": []}
    command("build", config)
    assert command("runs", "remove", config, "demo")[1] == "run 'demo' was removed\n"
    assert not (tmp_path / "cache" / "runs" / "demo.json").exists()


def test_at_80_columns_no_number_is_broken(
    config: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = yaml.safe_load(config.read_text())
    settings["sources"][0]["name"] = (
        "a-source-with-a-name-that-is-longer-than-any-line-of-a-table-may-be"
    )
    settings["samples"] = 987_654_321
    config.write_text(yaml.safe_dump(settings))
    command("index", config)
    monkeypatch.setenv("COLUMNS", "80")
    summary = [line for line in command("describe", config)[1].splitlines() if " " in line.strip()]
    assert max(map(len, summary)) <= 80
    out = command("describe", config, "--all")[1]
    tables = [line for line in out.splitlines() if line[:1] in "│┃┏┡├└"]
    assert tables
    assert max(map(len, tables)) <= 80
    described = json.loads(command("describe", config, "--json")[1])
    for source in described["splits"]["train"]["sources"]:
        for key in ("tokens", "samples", "tokens_left_in_epoch"):
            assert f" {source[key]:,} " in out
        assert f" {source['epochs']:,.3f} " in out
    assert "longer-than" in "".join(
        line.split("│")[1].strip() for line in tables if line.startswith("│")
    )


def test_at_80_columns_lines_are_wrapped_between_words(
    config: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("build", config)
    commands = [
        ("show", config, "-k", "3"),
        ("gc", config),
        ("verify", config),
        ("check", config),
        ("build", config),
        ("describe", config, "--micro-batch", "2"),
        ("describe", config, "--micro-batch", "2", "--all"),
        ("skip", config, "--from", "8", "--to", "16", "--batch", "8", "--dry-run"),
    ]
    for words in commands:
        whole = command(*words)[1]
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            lines = command(*words)[1].splitlines()
        assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []
        if words[0] == "show":
            assert max(map(len, whole.splitlines())) > 80  # a log has no width
            (listed,) = (line for line in whole.splitlines() if line.startswith("tokens: "))
            first = next(i for i, line in enumerate(lines) if line.startswith("tokens: "))
            assert " ".join(" ".join(lines[first:]).split()).startswith(listed)


def test_some_of_many_sources(config: Path, command: Command) -> None:
    command("build", config)
    out = command("describe", config, "--top", 1, "--sort", "samples")[1]
    assert "s2" in out
    assert "s0 " not in out.partition("train")[2].partition("first")[0]
    left_out = "and 2 more sources (--top 0 shows all; --sort and --match select)"
    assert out.count(left_out) == 1
    assert command("describe", config, "--top", 1, "--all")[1].count(left_out) == 2
    out = command("describe", config, "--top", 2)[1]
    assert re.search("│ s2 .*│ s1 ", out, re.S)  # those with the largest shares
    assert "│ s0 " not in out
    found = json.loads(command("describe", config, "--match", "s1", "--json")[1])
    assert [source["name"] for source in found["splits"]["train"]["sources"]] == ["s1"]
    code, _, err = command(
        "describe", Path(yaml.safe_load(config.read_text())["cache"]), "--top", 1
    )
    assert (code, "--top selects sources of a config" in err) == (2, True)


def test_show_prints_few_tokens_unless_asked(config: Path, command: Command) -> None:
    text = (
        config.read_text()
        .replace("sequence_length: 8", "sequence_length: 48")
        .replace("samples: 100", "samples: 20")
    )
    config.write_text(text)
    command("build", config)
    (line,) = [
        line
        for line in command("show", config, "--sample", 0)[1].splitlines()
        if line.startswith("tokens: ")
    ]
    assert line.endswith("(49; --all prints all)")
    whole = command("show", config, "--sample", 0, "--all")[1]
    tokens = megablend.show(str(config), 0).to_dict()["tokens"]
    assert "tokens: " + " ".join(map(str, tokens)) + "\n" in whole
    assert (
        line
        == f"tokens: {' '.join(map(str, tokens[:24]))} ... {' '.join(map(str, tokens[-8:]))} (49; --all prints all)"
    )


@pytest.mark.parametrize(
    ("args", "code", "kind", "says"),
    [
        (["describe", "nowhere.yaml"], 2, "ConfigError", "nowhere.yaml: cannot read the config"),
        (["describe", "{config}", "--rank", "2"], 2, "UsageError", "No such option"),
        (
            ["describe", "{config}", "--workers", "1"],
            2,
            "UsageError",
            "--workers 1 needs --micro-batch",
        ),
        (["show", "{config}", "--sample", "0"], 3, "CacheError", "contains no run"),
        (["verify", "{config}"], 3, "CacheError", "does not exist yet; `megablend build "),
    ],
)
def test_errors_are_json_too(
    config: Path, command: Command, args: list[str], code: int, kind: str, says: str
) -> None:
    ended, out, err = command(*(arg.format(config=config) for arg in args), "--json")
    error = json.loads(out)["error"]
    assert (ended, error["exit_code"], error["kind"]) == (code, code, kind)
    assert says in error["message"]
    assert says in err


def test_bugs_and_interrupts_are_json_too(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for error, code in ((ZeroDivisionError("oh"), 70), (KeyboardInterrupt(), 130)):

        def fail(*args: object, error: BaseException = error, **options: object) -> None:
            raise error

        monkeypatch.setattr("megablend.operations.verify.verify", fail)
        ended, out, _ = command("verify", tmp_path, "--json")
        assert (ended, json.loads(out)["error"]["exit_code"]) == (code, code)


def test_verify_and_gc_take_a_config_and_verify_shows_progress(
    tmp_path: Path, config: Path, command: Command
) -> None:
    command("build", config)
    code, out, err = command("verify", config, "--data")
    assert (code, out) == (0, f"{tmp_path / 'cache'}: OK\n")
    assert "megablend: verified 6 of 6 files, " in err
    code, out, err = command("verify", config)
    assert (code, err) == (0, "")
    found = json.loads(command("gc", config, "--dry-run", "--json")[1])
    assert (found["cache"], len(found["kept"])) == (str(tmp_path / "cache"), 1)


def test_a_build_that_waits_says_for_whom(tmp_path: Path, config: Path) -> None:
    command = [sys.executable, "-m", "megablend", "build", str(config)]
    (tmp_path / "cache").mkdir()
    with build_lock(tmp_path / "cache"):
        holder = json.loads((tmp_path / "cache" / ".lock").read_text())
        waiting = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
    out, _ = waiting.communicate(timeout=500)
    assert line == (
        f"megablend: waiting for another build of this cache (host {holder['host']}, pid {holder['pid']}, "
        f"since {holder['since']})\n"
    )
    assert "run 'demo' is new" in out

"""The command line as a user meets it: what it prints where, and how it ends."""

import errno
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import yaml

import megablend
from megablend.cli.inspect import print_sample
from megablend.cli.main import cli, main
from megablend.inspect.show import SampleDescription
from tests.cli.commands import run, run_process
from tests.runs import EOD, documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sources = [
        write_source(tmp_path, d, kind, documents(d, 60, 30, 5))
        for d, kind in enumerate(["parquet", "megatron"])
    ]
    for source, weight in zip(sources, (3, 1), strict=True):
        source |= {"weight": weight, "append_eod": EOD}
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(make_config(tmp_path, sources, samples=100, run="demo", split="90,10,0"))
    )
    return path


@pytest.fixture
def built(config: Path) -> Path:
    done = run("build", config)
    assert done.returncode == 0, done.stderr
    return config


def as_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_build_prints_a_table_and_progress_in_lines(config: Path) -> None:
    done = run_process("build", config)
    assert done.returncode == 0
    assert "run 'demo' is new: 100 samples" in done.stdout
    assert "megablend: indexed 4 of 4 files" in done.stderr
    assert "\r" not in done.stderr
    again = run("build", config)
    assert "run 'demo' is unchanged: 100 samples" in again.stdout


def test_describe_writes_a_page(tmp_path: Path, built: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "run.html"
    done = run("describe", built, "--html", page)
    assert done.returncode == 0, done.stderr
    assert "<h1>Run demo</h1>" in page.read_text(encoding="utf-8")
    refused = run("describe", tmp_path / "cache", "--html", page)
    assert refused.returncode == 2
    assert "--html needs an indexed run" in refused.stderr


def test_each_command_prints_one_json_object(tmp_path: Path, config: Path) -> None:
    build = as_json(run("build", config, "--json"))
    assert build["run"]["stages"] == [100]
    assert (build["index"]["read"], build["ranks"]) == (4, 1)
    described = as_json(run("describe", config, "--json"))
    assert described["index"]["digest"] == build["index"]["digest"]
    assert [source["samples"] for source in described["splits"]["train"]["sources"]] == [75, 25]
    cache = as_json(run("describe", tmp_path / "cache", "--json"))
    assert [ledger["run"] for ledger in cache["runs"]] == ["demo"]
    shown = as_json(run("show", config, "--sample", 7, "--json"))
    assert len(shown["tokens"]) == 9
    assert sum(piece["stop_token"] - piece["first_token"] for piece in shown["pieces"]) == 9
    assert as_json(run("verify", tmp_path / "cache", "--data", "--json"))["problems"] == []


def test_describe_tells_what_there_is_and_what_is_given(tmp_path: Path, built: Path) -> None:
    done = run("describe", built, "--all")
    assert done.returncode == 0
    for said in (
        "train: 100 samples, 800 tokens, blended",
        "0.750000",
        "one unblended pass",
        "stages end at sample 100",
    ):
        assert said in done.stdout
    assert "first source to begin epoch 1, which reads its tokens again: 's" in done.stdout
    printed = run("describe", built, "--micro-batch", 4, "--ranks", 2).stdout
    assert "read amplification: " in printed
    of_cache = run("describe", tmp_path / "cache").stdout
    assert "demo" in of_cache


def test_show_names_files_and_tokens(built: Path) -> None:
    done = run("show", built, "--sample", 0)
    assert done.returncode == 0
    assert "train sample 0: source 's0'" in done.stdout
    assert ".parquet" in done.stdout
    assert "tokens: " in done.stdout


def test_show_decodes(tmp_path: Path, built: Path) -> None:
    from tokenizers import Tokenizer, models

    words = models.WordLevel({"end": 0, **{f"w{i}": i for i in range(1, 300)}}, unk_token="end")
    Tokenizer(words).save(str(tmp_path / "t.json"))
    text = as_json(run("show", built, "--sample", 0, "--tokenizer", tmp_path / "t.json", "--json"))[
        "text"
    ]
    assert "w" in text
    # Ids that no tokenizer has
    np.array([1, -5, 2**40, 2], np.int64).tofile(tmp_path / "odd.bin")
    raw = {"path": "odd.bin", "format": "raw", "format_options": {"dtype": "int64"}}
    odd = {"cache": "odd", "sequence_length": 3, "samples": 1, "sources": [{"name": "a", **raw}]}
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    assert run("build", tmp_path / "odd.json").returncode == 0
    shown = run(
        *("show", tmp_path / "odd.json", "--sample", 0, "--json"),
        *("--tokenizer", tmp_path / "t.json"),
    )
    assert as_json(shown)["text"] == "w1 w2"
    done = run("show", built, "--sample", 0, "--tokenizer", built)
    assert done.returncode == 2
    assert "cannot be loaded as a tokenizer.json" in done.stderr


def test_the_cache_option_takes_the_place_of_the_configs(tmp_path: Path, config: Path) -> None:
    assert run("build", config, "--cache", "elsewhere", cwd=tmp_path).returncode == 0
    assert (tmp_path / "elsewhere" / "runs" / "demo.json").is_file()
    assert not (tmp_path / "cache").exists()
    assert run("describe", config, "--cache", tmp_path / "elsewhere").returncode == 0


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["bild", "{config}"], 2, "No such command"),
        (["build"], 2, "Missing argument"),
        (["build", "{config}", "--ranks"], 2, "No such option"),
        (["build", "nowhere.yaml"], 2, "nowhere.yaml: cannot read the config: No such file"),
        (
            ["show", "{config}", "--sample", "0"],
            3,
            "contains no run 'demo'; run `megablend build CONFIG` first",
        ),
        (["build", "{folder}"], 2, "empty: is a folder; give the path of a YAML or JSON file\n"),
        (["check", "{folder}"], 2, "empty: is a folder; give the path of a YAML or JSON file\n"),
        (
            ["check", "{config}", "--state", "{folder}"],
            3,
            "empty: Is a directory; specify the path of a file\n",
        ),
        (
            ["check", "{config}", "--state", "{data}"],
            2,
            "0.parquet: expected a state saved as JSON: 'utf-8' codec can't decode byte",
        ),
        (["describe", "{config}", "--ranks", "2"], 2, "--ranks 2 needs --micro-batch"),
        (["describe", "{config}", "--workers", "2"], 2, "--workers 2 needs --micro-batch"),
        (["describe", "{config}", "--nodes", "2"], 2, "--nodes 2 needs --micro-batch"),
        (
            ["describe", "{config}", "--sort", "tokns"],
            2,
            "found sort 'tokns', expected one of name, tokens, ",
        ),
        (["describe", "{folder}"], 3, "holds no index; run `megablend build CONFIG` first"),
        (["show", "{config}", "--sample", "x"], 2, "'x' is not a valid integer"),
        (
            ["build", "{config}", "--cache", "hf://b/c"],
            2,
            "--cache: hf://...: cannot hold a cache; expected a folder, or a prefix such as s3://bucket/caches/name",
        ),
        (["describe", "{folder}", "--cache", "c"], 2, "found two caches, "),
        (["verify", "nowhere"], 2, "nowhere: no such folder"),
    ],
)
def test_errors_are_short_and_have_codes(
    tmp_path: Path, config: Path, args: list[str], code: int, says: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"config": config, "folder": tmp_path / "empty"}
    places["data"] = tmp_path / "source0" / "0.parquet"
    done = run(*(arg.format_map(places) for arg in args))
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("sample", ["100", "-1", "9" * 30])
def test_show_out_of_range(built: Path, sample: str) -> None:
    done = run("show", built, "--sample", sample)
    assert done.returncode == 2
    assert f"found sample {sample}, expected 0 to 99: train has 100 samples" in done.stderr


def test_version() -> None:
    assert run_process("--version").stdout.split()[-1] == megablend.__version__


def test_names_that_the_encoding_of_stdout_has_not(tmp_path: Path) -> None:
    source = write_source(tmp_path, 0, "arrow", [[1, 2, 3]] * 9) | {"name": "\xe4", "weight": 1}
    config = tmp_path / "run.json"
    config.write_text(json.dumps(make_config(tmp_path, [source], samples=1)))
    done = subprocess.run(
        [sys.executable, "-m", "megablend", "describe", config],
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "\\xe4" in done.stdout, done.stderr


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    sample = SampleDescription(
        split="train",
        sample=0,
        source=":key:",
        ordinal=0,
        epochs=(0,),
        document_starts=(0,),
        pieces=(),
        tokens=(1,),
        extra={},
    )
    print_sample(sample, "a[:key:] [bold]")
    out = capsys.readouterr().out
    assert "source ':key:'" in out
    assert "a[:key:] [bold]" in out


EDITS = [
    ({"path": "{tmp}/source0/*.parquet"}, {"path": "{tmp}/sorce0/*.parquet"}, 2, "matches no file"),
    ({"column": "ids"}, {"column": "idds"}, 2, "did you mean 'ids'"),
    ({"column": "ids"}, {"column": "text"}, 2, "integer"),
]


@pytest.mark.parametrize(("old", "new", "code", "says"), EDITS, ids=[says for *_, says in EDITS])
def test_sources_that_cannot_be_read_name_the_place(
    tmp_path: Path, config: Path, old: dict[str, str], new: dict[str, str], code: int, says: str
) -> None:
    text = config.read_text()
    for key in old:
        text = text.replace(old[key].format(tmp=tmp_path), new[key].format(tmp=tmp_path), 1)
    config.write_text(text)
    done = run("build", config)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert f"{config}:" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_damaged_data_ends_with_3(tmp_path: Path, config: Path) -> None:
    path = tmp_path / "source0" / "1.parquet"
    path.write_bytes(path.read_bytes()[:-3])
    done = run("build", config)
    assert done.returncode == 3
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_names_what_is_damaged(tmp_path: Path, built: Path) -> None:
    (table,) = (tmp_path / "cache" / "generations").glob("*/blocks.arrow")
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    done = run("verify", tmp_path / "cache")
    assert done.returncode == 3
    assert "blocks.arrow" in done.stdout


def test_a_launcher_that_disagrees_is_refused(config: Path) -> None:
    done = run_process("build", config, OMPI_COMM_WORLD_SIZE="4")
    assert done.returncode == 2
    assert "started 4 processes" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            ZeroDivisionError("nothing to divide by"),
            70,
            "nothing to divide by\nmegablend: the above is a bug in megablend",
        ),
        (KeyboardInterrupt(), 130, "megablend: interrupted"),
        (megablend.StateError("of another run"), 2, "megablend: of another run"),
        # Python raises BrokenPipeError for it, as for a reader of stdout that has exited
        (OSError(errno.ESHUTDOWN, "shut down", "/shared"), 3, "megablend: /shared: shut down; the"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_how_a_command_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    says: str,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("megablend.operations.verify.verify", fail)
    monkeypatch.setattr(sys, "argv", ["megablend", "verify", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert says in capsys.readouterr().err


def test_a_tokenizer_needs_its_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setattr(
        sys, "argv", ["megablend", "show", "run.yaml", "--sample", "0", "--tokenizer", "t.json"]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    assert (
        capsys.readouterr().err
        == "megablend: --tokenizer needs the tokenizers library: pip install tokenizers\n"
    )


def in_bash(command: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = command.replace("megablend ", f"{sys.executable} -m megablend ")
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=500,
        env=environ,
        check=False,
    )


def test_a_closed_pipe_is_no_bug(built: Path) -> None:
    done = in_bash(f"megablend describe {built} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("build CONFIG >&-", 0),
        ("build CONFIG <&- >&- 2>&-", 0),
        ("describe nowhere.yaml 2>&-", 2),
        ("describe nowhere.yaml 2>/dev/full", 2),
        ("runs list 2>/dev/full", 2),
        ("describe CONFIG --json >/dev/full", 3),
    ],
)
def test_output_that_is_closed_or_full(built: Path, command: str, exit_code: int) -> None:
    done = in_bash("megablend " + command.replace("CONFIG", str(built)))
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    if exit_code == 3:
        assert done.stderr.startswith(
            f"megablend: `megablend describe {built}`: No space left on device; "
        )
        assert done.stderr.count("\n") == 1


def test_gc(built: Path) -> None:
    cache = built.parent / "cache"
    first = as_json(run("describe", cache, "--json"))["indices"][0]["digest"]
    (cache / "runs" / "demo.json").unlink()
    sources = yaml.safe_load(built.read_text())
    del sources["sources"][1]
    built.write_text(yaml.safe_dump(sources))
    assert run("build", built).returncode == 0
    assert as_json(run("gc", cache, "--json"))["generations"] == []
    dry = run("gc", cache, "--older-than", 0, "--dry-run")
    assert f"would remove: index {first}" in dry.stdout
    found = as_json(run("gc", cache, "--older-than", 0, "--json"))
    assert (found["generations"], found["dry_run"], len(found["kept"])) == ([first], False, 1)
    assert (
        "removed: 0 indexes, 0 fragments and tables" in run("gc", cache, "--older-than", 0).stdout
    )
    assert run("gc", cache, "--older-than", -1).returncode == 2
    assert run("gc", built.parent / "nowhere").returncode == 3


def test_an_error_of_the_system_is_json_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    monkeypatch.setattr(sys, "argv", ["megablend", "build", "c.yaml", "--json"])
    monkeypatch.setattr(sys.modules["megablend.cli.main"].cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    error = json.loads(capsys.readouterr().out)["error"]
    assert (ended.value.code, error["kind"], error["exit_code"]) == (3, "ResourceError", 3)
    assert error["message"].startswith("`megablend build c.yaml`: a library cannot be loaded")


def test_how_much_is_told(config: Path) -> None:
    """On stderr: what is done with -v, nothing but errors with -q."""
    told = run("build", config, "-v").stderr
    assert "megablend: indexed 4 of 4 files" in told
    assert re.search(r"megablend: .*: indexed 4 files in ", told)
    assert (
        re.search(
            r": indexed 4 files in ",
            run("index", config, "--log-level", "info", "--cache", config.parent / "other").stderr,
        )
        is not None
    )
    assert run("build", config, "-q").stderr == ""
    path = yaml.safe_load(config.read_text())["sources"][0]["path"]
    changed = next(iter(Path(path).parent.glob("*.parquet")))
    os.utime(changed, (1, 1))
    assert "indexed again" in run("build", config, "--verbose").stderr
    done = run("build", config, "-v", "-q")
    assert done.returncode == 2
    assert "give only one of -v, -q and --log-level" in done.stderr
    assert run("build", "nowhere.yaml", "-q").stderr.startswith(
        "megablend: nowhere.yaml: cannot read the config"
    )
    assert logging.getLogger("megablend").level == logging.NOTSET


def test_every_command_takes_these_options_and_its_short_help_ends_within_the_line() -> None:
    def check(group: click.Group) -> None:
        longest = max(map(len, group.commands))
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                check(command)
                continue
            options = {option for parameter in command.params for option in parameter.opts}
            assert {"-v", "--verbose", "-q", "--quiet", "--log-level", "--json"} <= options, name
            assert not command.get_short_help_str(72 - longest).endswith("..."), name

    check(cli)


def test_a_shell_completes_commands_and_options() -> None:
    environ = {
        "_MEGABLEND_COMPLETE": "bash_complete",
        "COMP_WORDS": "megablend desc",
        "COMP_CWORD": "1",
    }
    program = "import sys; sys.argv = ['megablend']; from megablend.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["plain,describe"]), done.stderr

"""Tokenising text: this package, with gigatoken and with `tokenizers`, against a loop over `tokenizers` alone, in turn.

    python tools/bench/text.py --tokenizer FOLDER --text FILE.jsonl [--rounds 3]

CPU seconds of one process, without starting it; MB of UTF-8 text. The loop reads lines by `json`, and writes nothing.

    python tools/bench/text.py ... --peer 'NAME=COMMAND {folder} {file} {out} {workers}' [--workers 1 2] [--peer-mb 10]

Whole tools, `megablend build` among them, in turn: CPU seconds of all of their processes, less
those of the same tool for three lines. A tool of others gets `--peer-mb` of the text, as `{file}`, and two files in `{folder}`.
The tokenizer was proved before; 32 MiB of text is the least that is tokenised by gigatoken. Processes that a tool does not wait
for (datatrove's with two workers) are not seen.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megablend.config import load_config
from megablend.operations.source_specs import list_specs
from megablend.storage.by_scheme import make_storage
from megablend.text.engine import Engine, GigatokenEngine, make_reference, without_threads
from megablend.text.parts import PART_BYTES, plan_tasks
from megablend.text.prove import find_difference
from megablend.text.source import find_text
from megablend.text.tokenizer import load_tokenizer
from megablend.text.work import Worker


def measure(work: Callable[[], object]) -> float:
    """CPU seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def make_files(config: dict[str, Any], engine: str) -> Callable[[], object]:
    """What makes the token files of a config's only file of text, in a new folder each time."""

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            checked = load_config(config | {"cache": folder})
            found = find_text(checked, list_specs(checked)[0], make_storage())
            setup = found.setup
            object.__setattr__(setup, "engine", engine)
            worker = WatchedWorker(setup)
            for task in plan_tasks(found.files[0], setup.storage, setup.fields, PART_BYTES):
                worker.do(task, lambda *_: None)

    return work


class WatchedWorker(Worker):
    """Measures what checking parts takes."""

    checking = 0.0
    """CPU seconds."""

    def _find_difference(self, *args: Any) -> str:
        start = time.process_time()
        found = super()._find_difference(*args)
        WatchedWorker.checking += time.process_time() - start
        return found


def loop(tokenizer: str, path: str) -> Callable[[], object]:
    """What a script does: lines, texts, tokens in batches."""
    model = make_reference(load_tokenizer(tokenizer))

    def work() -> None:
        with open(path, encoding="utf-8") as file:
            batch = []
            for line in file:
                batch.append(json.loads(line)["text"])
                if len(batch) == 1000:
                    model.encode_batch_fast(batch, add_special_tokens=False)
                    batch = []
            model.encode_batch_fast(batch, add_special_tokens=False)

    return work


def run_tool(command: str, text: list[str], workers: int, prepared: Path) -> float:
    """CPU seconds of a tool over lines of text.

    Args:
        prepared: a copy of this folder is what it writes to.
    """
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "text").mkdir()
        (base / "all.jsonl").write_text("".join(text), encoding="utf-8")
        for i in range(2):
            path = base / f"text/{i}.jsonl"
            path.write_text("".join(text[i::2]), encoding="utf-8")
        shutil.copytree(prepared, base / "out")
        filled = command.format(
            folder=base / "text", file=base / "all.jsonl", out=base / "out", workers=workers
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(shlex.split(filled), capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"{filled}: {done.stderr.decode()[-2000:]}")
        for proof in (base / "out").glob("tokens/*/.proof*"):
            kept = prepared / proof.relative_to(base / "out")
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(proof, kept)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def compare_tools(given: argparse.Namespace, lines: list[str]) -> None:
    """Print the rates of whole tools, and how many times slower they are than this package."""
    ours = "megablend build"
    build = f"{sys.executable} -m megablend build {{out}}/config.json --processes {{workers}}"
    tools = {ours: build} | dict(each.split("=", 1) for each in given.peer)
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        prepared = Path(name)
        source = {"name": "text", "path": "../text/*.jsonl", "text": "text"}
        config = make_config(given.tokenizer, source) | {"cache": "cache", "token_files": "tokens"}
        config["samples"] = config.pop("epochs")
        (prepared / "config.json").write_text(json.dumps(config))
        run_tool(build, lines, 1, prepared)  # proves the tokenizer
        for _ in range(given.rounds):
            for tool, command in tools.items():
                share = 1 if tool == ours else min(1, given.peer_mb * 1e6 / count_bytes(lines))
                text = lines[: int(share * len(lines))]
                for workers in given.workers:
                    start = run_tool(command, lines[:3], workers, prepared)
                    seconds = run_tool(command, text, workers, prepared) - start
                    rate = count_bytes(text) / 1e6 / seconds
                    rates.setdefault((tool, workers), []).append(rate)
    for (tool, workers), found in rates.items():
        rate = statistics.median(found)
        ratio = statistics.median(rates[ours, workers]) / rate
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"{tool}, {workers} workers: {rate:.1f} MB per CPU second ({spread}), 1/{ratio:.1f}")


def count_bytes(lines: list[str]) -> int:
    """Bytes of UTF-8 text."""
    return sum(len(json.loads(line)["text"].encode()) for line in lines)


def make_config(tokenizer: str, source: dict[str, Any]) -> dict[str, Any]:
    """A config of one source."""
    return {
        "cache": "",
        "sequence_length": 1024,
        "epochs": 1,
        "tokenizer": tokenizer,
        "sources": [source],
    }


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peer-mb", type=float, default=10)
    given = parser.parse_args()
    with open(given.text, encoding="utf-8") as file:
        lines = list(file)
    if given.peer:
        compare_tools(given, lines)
        return
    size = count_bytes(lines)
    source = {"name": "text", "path": str(Path(given.text).absolute()), "text": "text"}
    config = make_config(given.tokenizer, source)
    tokenizer = load_tokenizer(given.tokenizer)
    works = {"tokenizers, this package": make_files(config, "tokenizers")}
    if tokenizer.is_listed:
        works["gigatoken, this package"] = make_files(config, "gigatoken")
    works["tokenizers alone"] = loop(given.tokenizer, given.text)
    with without_threads():
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(given.rounds):
            for name, work in works.items():
                times[name].append(measure(work))
        for name, found in times.items():
            rate = size / 1e6 / statistics.median(found)
            print(f"{name}: {rate:.1f} MB per CPU second (median of {given.rounds})")
        if tokenizer.is_listed:
            share = WatchedWorker.checking / sum(times["gigatoken, this package"])
            print(f"checks in parts: {share:.1%} of the time with gigatoken")
        if tokenizer.is_listed:
            fast = GigatokenEngine(tokenizer)
            reference = Engine(tokenizer)
            proof = measure(lambda: find_difference(fast, reference, tokenizer))
            print(f"proving: {proof:.1f} CPU seconds, once")


if __name__ == "__main__":
    main()

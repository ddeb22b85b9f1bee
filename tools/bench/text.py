"""Tokenising text: this package, with gigatoken and with `tokenizers`, against a loop over `tokenizers` alone, in turn.

    python tools/bench/text.py --tokenizer FOLDER --text FILE.jsonl [--rounds 3]

CPU seconds of one process, without starting it; MB of UTF-8 text. The loop reads lines by `json`, and writes nothing; it and
this package with `tokenizers` get `--peer-mb` of the text. `gigatoken alone` is its `encode_batch` over texts that are in
memory, in the batches of this package: what no tool around it can be faster than.

    python tools/bench/text.py ... --processes 1 2

Tokenising the text in 16 files by so many processes: CPU seconds of its workers, and of the process that plans, waits and
records, which no number of processes makes less.

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
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megablend.config import Config, load_config
from megablend.distributed.base import SingleProcess
from megablend.operations.source_specs import list_specs
from megablend.storage.by_scheme import make_storage
from megablend.text.engine import Engine, GigatokenEngine, make_reference, without_threads
from megablend.text.lines import BATCH_BYTES
from megablend.text.prove import choose_engine, find_difference
from megablend.text.source import find_text
from megablend.text.tasks import PART_BYTES, plan_tasks
from megablend.text.tokenise import tokenise
from megablend.text.tokenizer import load_tokenizer
from megablend.text.work import Worker


def measure(work: Callable[[], object]) -> float:
    """CPU seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def encode_alone(tokenizer: str, lines: list[str]) -> Callable[[], object]:
    """gigatoken over texts in memory."""
    definition = load_tokenizer(tokenizer).definition
    batches: list[list[str]] = [[]]
    held = 0
    for text in (json.loads(line)["text"] for line in lines):
        batches[-1].append(text)
        held += len(text)
        if held >= BATCH_BYTES:
            batches.append([])
            held = 0

    def work() -> None:
        model: Any = import_module("gigatoken").Tokenizer.from_json(definition)
        for batch in batches:
            model.encode_batch(batch, parallel=False)

    return work


def compare_processes(tokenizer: str, lines: list[str], size: int, counts: list[int]) -> None:
    """Print what tokenising 16 files by several processes takes, in them and beside them."""
    with tempfile.TemporaryDirectory() as proved, tempfile.TemporaryDirectory() as text:
        for i in range(16):
            Path(text, f"{i}.jsonl").write_text("".join(lines[i::16]), encoding="utf-8")
        config = make_config(tokenizer, {"name": "text", "path": f"{text}/*", "text": "text"})
        checked = load_config(config | {"cache": proved})
        setup = find_text(checked, list_specs(checked)[0], make_storage()).setup
        choose_engine(setup.tokenizer, setup.folder, size, SingleProcess())
        for count in counts:
            with tempfile.TemporaryDirectory() as name:
                cache = Path(name, "cache")
                shutil.copytree(proved, cache)
                checked = load_config(config | {"cache": str(cache)})
                compare_one(checked, count)


def compare_one(checked: Config, count: int) -> None:
    """Print what tokenising by so many processes takes."""
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    given: dict[str, Any] = {
        "launch": SingleProcess(),
        "storage": make_storage(),
        "processes": count,
    }
    beside = measure(partial(tokenise, checked, list_specs(checked), **given))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    inside = ended.ru_utime - workers.ru_utime + ended.ru_stime - workers.ru_stime
    print(f"{count} processes: {inside:.2f} CPU seconds in them, {beside:.2f} beside them")


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


def measure_rates(
    works: dict[str, tuple[Callable[[], object], int]], rounds: int
) -> dict[str, list[float]]:
    """MB per CPU second of works over bytes of text, in turn, which are printed."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    with without_threads():
        for _ in range(rounds):
            for name, (work, size) in works.items():
                rates[name].append(size / 1e6 / measure(work))
    for name, found in rates.items():
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"{name}: {statistics.median(found):.1f} MB per CPU second ({spread})")
    return rates


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
    parser.add_argument("--processes", type=int, nargs="+", default=[])
    given = parser.parse_args()
    with open(given.text, encoding="utf-8") as file:
        lines = list(file)
    if given.peer:
        compare_tools(given, lines)
        return
    size = count_bytes(lines)
    few = lines[: int(min(1, given.peer_mb * 1e6 / size) * len(lines))]
    source = {"name": "text", "path": str(Path(given.text).absolute()), "text": "text"}
    config = make_config(given.tokenizer, source)
    tokenizer = load_tokenizer(given.tokenizer)
    if given.processes:
        compare_processes(given.tokenizer, lines, size, given.processes)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(few)
        file.flush()
        small = make_config(given.tokenizer, source | {"path": file.name})
        # Each with the bytes of text that it gets
        works = {
            "tokenizers, this package": (make_files(small, "tokenizers"), count_bytes(few)),
            "tokenizers alone": (loop(given.tokenizer, file.name), count_bytes(few)),
        }
        if tokenizer.is_listed:
            works["gigatoken, this package"] = make_files(config, "gigatoken"), size
            works["gigatoken alone"] = encode_alone(given.tokenizer, lines), size
        rates = measure_rates(works, given.rounds)
    for name in ("tokenizers", "gigatoken"):
        if f"{name} alone" in rates:
            pairs = zip(rates[f"{name}, this package"], rates[f"{name} alone"], strict=True)
            ratio = statistics.median(ours / alone for ours, alone in pairs)
            print(f"{name}: this package has {ratio:.2f} of the rate of {name} alone")
    if tokenizer.is_listed:
        times = sum(size / 1e6 / rate for rate in rates["gigatoken, this package"])
        print(f"checks in parts: {WatchedWorker.checking / times:.1%} of the time with gigatoken")
        fast = GigatokenEngine(tokenizer)
        reference = Engine(tokenizer)
        with without_threads():
            proof = measure(lambda: find_difference(fast, reference, tokenizer))
        print(f"proving: {proof:.1f} CPU seconds, once")


if __name__ == "__main__":
    main()

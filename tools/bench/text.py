"""Tokenising text: this package, with gigatoken and with `tokenizers`, against a loop over `tokenizers` alone, in turn.

    python tools/bench/text.py --tokenizer FOLDER --text FILE.jsonl [--rounds 3]

CPU seconds of one process, without starting it; MB of UTF-8 text. The loop reads lines by `json`, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
            worker = Worker(setup)
            for task in plan_tasks(found.files[0], setup.storage, setup.fields, PART_BYTES):
                worker.do(task, lambda *_: None)

    return work


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


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with open(given.text, encoding="utf-8") as file:
        size = sum(len(json.loads(line)["text"].encode()) for line in file)
    source = {"name": "text", "path": str(Path(given.text).absolute()), "text": "text"}
    config = {
        "cache": "",
        "sequence_length": 1024,
        "epochs": 1,
        "tokenizer": given.tokenizer,
        "sources": [source],
    }
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
            fast = GigatokenEngine(tokenizer)
            reference = Engine(tokenizer)
            proof = measure(lambda: find_difference(fast, reference, tokenizer))
            print(f"proving: {proof:.1f} CPU seconds, once")


if __name__ == "__main__":
    main()

"""Loaders of token samples raced over the same tokens: megablend, pyarrow's scan, and those that others use.

All give batches of 8 samples of 2,048 tokens as int64 tensors, of which every token is read, in fresh processes on one machine;
rounds interleave them. `warm`: all files in the page cache; `cold`: none (both checked by mincore). A contender reads for
--seconds, or one pass. tokens/s, CPU time (of its whole tree of processes) and batch times count from the first batch on; `first
batch` from opening the data on, after imports (and after Ray's cluster is up). `read / used`: bytes that storage gave, from
opening on, by the size of what was delivered; what lies in buffers at the end counts as read. `extra disk`: an
index, or the copy that a loader needs in place of the Parquet that is there.

    python tools/bench/read/peers.py --python .venv-peers/bin/python      # all there is; 1 GiB of tokens, some 12 GB of disk
    python tools/bench/read/peers.py --folder /data --results r.jsonl --contenders megatron hugging --rounds 1

Peers want other versions of each other's dependencies; --python names interpreters, and the first that has a package is used:

    python -m venv .venv-peers && .venv-peers/bin/pip install torch==2.13.0 datasets "ray[data]" megatron-core==0.16.1 matplotlib
    python -m venv .venv-mds && .venv-mds/bin/pip install mosaicml-streaming  # whose torchvision wants its own torch

What is not there is named in the table. A results file is added to: what it has is not measured again, so that a run may be cut
into pieces (--budget), and the table is of all that it holds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from contenders import CONTENDERS, Contender
from documents import CODECS
from measuring import ContenderError, Limits, measure, quiet
from peers_data import MAIN, PAGES, make, make_base, variant
from peers_table import contenders_table, plot, variants_table

VARIED = ["pyarrow, sequential scan", "megablend, sequential", "megablend, page order, 1 source"]
"""Read with every size of pages and every codec."""


def interpreters(pythons: list[str]) -> dict[str, str]:
    """Package -> the first interpreter that has it."""
    packages = sorted({contender.package for contender in CONTENDERS.values()})
    code = f"import importlib.util as u, json; print(json.dumps([p for p in {packages} if u.find_spec(p.split('.')[0])]))"
    found: dict[str, str] = {}
    for python in [sys.executable, *pythons]:
        done = subprocess.run(
            [python, "-c", code],
            env={**os.environ, **quiet(Path())},
            stdout=subprocess.PIPE,
            check=True,
        )
        found = dict.fromkeys(json.loads(done.stdout), python) | found
    return found


def order_of(contender: Contender, name: str) -> str:
    """megablend's order; empty for others."""
    return name.split(", ")[1].split()[0] if contender.package == "megablend" else ""


def tasks(args: argparse.Namespace) -> Iterator[tuple[int, str, str, str, str]]:
    """(round, contender, page, codec, state), interleaved."""
    chosen = [
        name
        for name in CONTENDERS
        if not args.contenders or any(word.lower() in name.lower() for word in args.contenders)
    ]
    pairs = [(page, codec) for page in args.pages for codec in args.codecs]
    for round_ in range(args.rounds):
        for page, codec in pairs:
            for name in chosen:
                if (page, codec) == MAIN or name in VARIED:
                    for state in args.states:
                        yield round_, name, page, codec, state


def race(folder: Path, args: argparse.Namespace, results: Path) -> None:
    """Make what is missing of the data, then measure; each row is added to the results as it is there."""
    make_base(folder, args.tokens)
    pythons = interpreters(args.python)
    wanted = list(tasks(args))
    for _, name, page, codec, _ in dict.fromkeys((0, *task[1:4], "") for task in wanted):
        contender = CONTENDERS[name]
        if contender.package in pythons:
            # A peer that does not import: its own process will say why
            with suppress(subprocess.CalledProcessError):
                make(folder, contender.data, page, codec, pythons[contender.package])
    keys = ("round", "contender", "page", "codec", "state")
    start = time.monotonic()
    have = {tuple(row[key] for key in keys) for row in read(results)}
    for task in [] if args.prepare else wanted:
        if task in have or time.monotonic() - start > args.budget:
            continue
        _, name, page, codec, state = task
        contender = CONTENDERS[name]
        data = folder / variant(contender.data, page, codec)
        order = order_of(contender, name)
        row: dict[str, Any] = dict(zip(keys, task, strict=True))
        limits = Limits(seconds=args.seconds, first=args.first, tokens=args.tokens)
        try:
            if contender.package not in pythons:
                raise ContenderError(f"{contender.package} is not installed")
            if (data / f"{order}.missing").exists():
                raise ContenderError(
                    f"this version lacks it: {(data / f'{order}.missing').read_text()[:120]}"
                )
            row |= measure(name, data, order, state, pythons[contender.package], limits)
        except ContenderError as failure:
            row["failed"] = str(failure)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rate = row.get("failed") or f"{row['tokens_per_s'] / 1e6:,.1f} M tokens/s"
        print(f"{name}, {page} {codec}, {state}: {rate}", file=sys.stderr, flush=True)


def read(results: Path) -> list[dict[str, Any]]:
    """The rows of a results file, which may not be there yet."""
    return (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )


def show(results: Path, picture: Path | None) -> None:
    """Print the tables of all results."""
    rows = read(results)
    main_rows = [row for row in rows if (row["page"], row["codec"]) == MAIN]
    names = [name for name in CONTENDERS if any(row["contender"] == name for row in rows)]
    if main_rows:
        print(contenders_table(main_rows, names))
    varied = [name for name in VARIED if name in names]
    if varied and len({(row["page"], row["codec"]) for row in rows}) > 1:
        print("\nM tokens/s warm / cold; CPU-s per 1e9 tokens, warm\n")
        print(variants_table(rows, varied))
    if picture:
        print(
            f"\n{picture}"
            if plot(main_rows, names, picture)
            else "\nno plot: matplotlib is not installed"
        )


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=1 << 28, help="of 4 bytes each (default: 2^28, 1 GiB)"
    )
    parser.add_argument(
        "--pages", nargs="+", choices=PAGES, default=list(PAGES), help="sizes before compression"
    )
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--states", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--contenders", nargs="+", help="parts of names; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=6, help="of reading, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--first", type=float, default=60, help="limit to the first batch (default: %(default)s)"
    )
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="PATH", help="interpreters that have the peers"
    )
    parser.add_argument(
        "--folder", type=Path, help="keeps the data; a temporary folder where absent"
    )
    parser.add_argument("--results", type=Path, help="default: results.jsonl in the folder")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds after which no measurement is begun"
    )
    parser.add_argument("--prepare", action="store_true", help="make the data, measure nothing")
    parser.add_argument(
        "--show", action="store_true", help="measure nothing, show the results that are there"
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results = args.results or folder / "results.jsonl"
        if not args.show:
            race(folder, args, results)
        if not args.prepare:
            show(results, args.plot)


if __name__ == "__main__":
    main()

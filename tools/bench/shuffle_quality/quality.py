"""Shuffle quality: how well orders mix a corpus that lies sorted by topic, and what a model learns from each.

The corpus is this machine's own text, sorted by package; samples are 1/16 of usual ones, and so are pages and the tokens held in
memory. The same tiny transformer is trained on each order, for one pass, from the same first weights a seed; `perplexity` is of
held-out files of the same packages, mean and standard deviation over the seeds; `above full` the mean difference to the full
shuffle of the same seed, and its standard error. Runs that the results file has are not made again.

    python tools/bench/shuffle_quality/quality.py                       # the whole table; --jobs 2 uses two cores
    python tools/bench/shuffle_quality/quality.py --no-training         # how mixed the orders are, alone
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from corpus.texts import roots
from neighbours import autocorrelation, distance_moved, neighbours
from page_order import places as megablend_places
from strategies import STRATEGIES, Int64s, Setting
from topics import Corpus, make_corpus, write_pages
from train_order import train

OURS = {"megablend, page order": "page"}
NAMES = ["sequential", "window", "refilled page buffer", *OURS, "full"]
LAGS = ((1, 8), (8, 64), (64, 512), (512, 4096))
"""Ranges over which autocorrelation is averaged, last one excluded."""


def places_of(
    name: str, setting: Setting, corpus: Corpus, folder: Path, lanes: int, seed: int
) -> Int64s:
    """The order `name` of the corpus whose Parquet file lies in `folder`: int64 [num_samples, sequence_length + 1]."""
    if name not in OURS:
        return STRATEGIES[name](setting, np.random.default_rng(seed))
    order = OURS[name]
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        path = folder / "corpus.parquet"
        return megablend_places(
            setting, corpus.tokens, path, Path(cache), lanes=lanes, order=order, seed=seed
        )


def measure(
    name: str,
    setting: Setting,
    folder: Path,
    *,
    lanes: int,
    vocab_size: int,
    seed: int,
    training: bool,
) -> dict[str, Any]:
    """A row of results: one order, one seed."""
    corpus = Corpus.load(folder / "corpus.npz")
    places = places_of(name, setting, corpus, folder, lanes, seed)
    documents = corpus.documents_at(places[:, 0])
    topics = corpus.topics[documents]
    found: dict[str, Any] = {
        "distance": distance_moved(places[:, 0]),
        "documents": neighbours(documents, setting.batch),
        "topics": neighbours(topics, setting.batch),
        "autocorrelation": autocorrelation(
            topics, [lags for lags in LAGS if lags[1] <= len(topics)]
        ),
    }
    if training:
        start = time.perf_counter()
        arguments: dict[str, Any] = {"batch": setting.batch, "vocab_size": vocab_size, "seed": seed}
        found["perplexity"] = train(corpus.tokens, places, corpus.validation, **arguments)
        found["seconds"] = time.perf_counter() - start
    return found


def table(results: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Results by name and seed, as Markdown."""
    lags = len(next(iter(next(iter(results.values())).values()))["autocorrelation"])
    head = ["order", "distance moved", "same document", "same source"]
    head += [f"lags {start}-{stop - 1}" for start, stop in LAGS[:lags]] + [
        "perplexity",
        "above full",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, seeds in results.items():
        rows = list(seeds.values())
        cells = [
            f"{statistics.fmean(row[key] for row in rows):.3f}"
            for key in ("distance", "documents", "topics")
        ]
        cells += [
            f"{statistics.fmean(row['autocorrelation'][lag] for row in rows):.3f}"
            for lag in range(lags)
        ]
        found = [row["perplexity"] for row in rows if "perplexity" in row]
        cells.append(f"{statistics.fmean(found):.2f} ± {_deviation(found):.2f}" if found else "")
        full = results.get("full", {})
        pairs = [(row, full[seed]) for seed, row in seeds.items() if seed in full]
        above = [
            row["perplexity"] - best["perplexity"]
            for row, best in pairs
            if "perplexity" in row and name != "full"
        ]
        error = _deviation(above) / math.sqrt(max(1, len(above)))
        cells.append(f"{statistics.fmean(above):+.2f} ± {error:.2f}" if above else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """The corpus, where the folder does not have it."""
    if (folder / "corpus.npz").exists():
        return
    corpus = make_corpus(
        num_tokens=args.tokens,
        vocab_size=args.vocab,
        sequence_length=args.sequence,
        folders=args.text or roots(),
    )
    write_pages(corpus, folder / "corpus.parquet", args.page)
    corpus.save(folder / "corpus.npz")
    print(
        f"{len(corpus.tokens):,} tokens, {len(corpus.documents):,} documents, {corpus.topics[-1] + 1:,} topics; "
        f"validation on {corpus.validation.size:,} tokens"
    )


def run(folder: Path, args: argparse.Namespace) -> dict[str, dict[int, dict[str, Any]]]:
    """All runs that the results file lacks, each in a process of its own; the results by name and seed."""
    results_file = args.results or folder / "results.jsonl"
    rows = (
        [json.loads(line) for line in results_file.read_text().splitlines()]
        if results_file.exists()
        else []
    )
    have = {(row["order"], row["seed"]) for row in rows}
    wanted = [
        (name, seed)
        for seed in range(args.seeds)
        for name in args.orders
        if (name, seed) not in have
    ]

    def one(task: tuple[str, int]) -> dict[str, Any]:
        name, seed = task
        command = [
            sys.executable,
            __file__,
            *sys.argv[1:],
            "--folder",
            str(folder),
            "--one",
            name,
            str(seed),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row: dict[str, Any] = {"order": name, "seed": seed, **json.loads(done.stdout)}
        with results_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{name}, seed {seed}: {json.dumps(row.get('perplexity'))}", file=sys.stderr, flush=True
        )
        return row

    with ThreadPoolExecutor(args.jobs) as pool:
        rows += pool.map(one, wanted)
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in args.orders}
    for row in rows:
        if row["order"] in found:
            found[row["order"]][row["seed"]] = row
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=1_600_000, help="of the corpus (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab", type=int, default=1024, help="size of the vocabulary (default: %(default)s)"
    )
    parser.add_argument(
        "--sequence", type=int, default=128, help="tokens of a sample (default: %(default)s)"
    )
    parser.add_argument(
        "--page", type=int, default=1024, help="tokens of a page (default: %(default)s)"
    )
    parser.add_argument("--lanes", type=int, default=8, help="of megablend (default: %(default)s)")
    parser.add_argument(
        "--cycle", type=int, default=64, help="slots of a lane; buffers hold lanes x cycle samples"
    )
    parser.add_argument(
        "--batch", type=int, default=16, help="samples of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=6, help="runs of each order (default: %(default)s)"
    )
    parser.add_argument(
        "--orders", nargs="+", choices=NAMES, default=NAMES, metavar="ORDER", help=", ".join(NAMES)
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, on a core each (default: %(default)s)"
    )
    parser.add_argument("--no-training", action="store_true", help="leave perplexity out")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        help="folders of text; default: what Python and the system have",
    )
    parser.add_argument(
        "--folder", type=Path, help="keeps corpus and results; a temporary folder where absent"
    )
    parser.add_argument("--results", type=Path, help="default: results.jsonl in the folder")
    parser.add_argument("--one", nargs=2, metavar=("ORDER", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if args.one:
            corpus = Corpus.load(folder / "corpus.npz")
            sizes = {
                "sequence_length": args.sequence,
                "page_tokens": args.page,
                "buffer": args.lanes * args.cycle,
            }
            setting = Setting(num_tokens=len(corpus.tokens), batch=args.batch, **sizes)
            name = args.one[0]
            seed = int(args.one[1])
            options = {
                "lanes": args.lanes,
                "vocab_size": args.vocab,
                "training": not args.no_training,
            }
            print(json.dumps(measure(name, setting, folder, seed=seed, **options)))
            return
        prepare(folder, args)
        print(table(run(folder, args)))


if __name__ == "__main__":
    main()

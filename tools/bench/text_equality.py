"""Whether the tokens of a build are those of `tokenizers`, document by document.

    python tools/bench/text_equality.py --text FILE.jsonl TOKENIZER...

TOKENIZER is a folder or a tokenizer.json. For each, the file's `text` is tokenised by `megablend
build` into a folder that is removed afterwards; then each document of each token file is compared
with `tokenizers`' `encode`. Prints the engine, the documents and the MB of UTF-8 that were compared,
and how many documents differ, with the first ones; ends with 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Tokenizer

BATCH = 1000
"""The number of documents that are compared at a time."""
SHOWN = 3


def main() -> None:
    """Compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("tokenizers", nargs="+")
    options = parser.parse_args()
    num_different = sum(compare(name, options.text) for name in options.tokenizers)
    sys.exit(num_different > 0)


def compare(name: str, text: Path) -> int:
    """Compare one tokenizer. Returns: the number of documents that differ."""
    file = Path(name)
    model = Tokenizer.from_file(str(file / "tokenizer.json" if file.is_dir() else file))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        engines = build(name, text, Path(folder))
        built = time.monotonic() - begin
        documents = read_documents(Path(folder) / "tokens")
        num_documents = 0
        num_bytes = 0
        num_different = 0
        with text.open("rb") as lines:
            while batch := [json.loads(line)["text"] for line in islice(lines, BATCH)]:
                for document, expected in zip(
                    batch, model.encode_batch_fast(batch, add_special_tokens=False), strict=True
                ):
                    if next(documents) != expected.ids:
                        num_different += 1
                        if num_different <= SHOWN:
                            print(f"{name}: document {num_documents:,}: {document[:80]!r}")
                    num_documents += 1
                    num_bytes += len(document.encode())
        assert next(documents, None) is None, "there are more documents than lines"
    print(
        f"{name}: {', '.join(engines)}: {num_documents:,} documents, {num_bytes / 1e6:.0f} MB,"
        f" {num_different} differ; built in {built:.0f} s",
        flush=True,
    )
    return num_different


def build(tokenizer: str, text: Path, folder: Path) -> list[str]:
    """Tokenise a file. Returns: the engines that did."""
    source = {"name": "text", "path": str(text.resolve()), "text": "text", "weight": 1}
    config = {
        "cache": str(folder),
        "token_files": str(folder / "tokens"),
        "tokenizer": str(Path(tokenizer).resolve()),
        "sequence_length": 1024,
        "samples": 1024,
        "sources": [source],
    }
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "megablend", "build", str(folder / "config.json")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    files = list_files(folder / "tokens")
    footers = [pq.read_metadata(file).metadata[b"megablend.text"] for file in files]
    return sorted({json.loads(footer)["engine"] for footer in footers})


def read_documents(folder: Path) -> Iterator[list[int]]:
    """The tokens of each document, in the order of the file."""
    first_lines = {}
    for file in list_files(folder):
        first_lines[pq.ParquetFile(file).read_row_group(0, ["line"])["line"][0].as_py()] = file
    for _, file in sorted(first_lines.items()):
        for rows in pq.ParquetFile(file).iter_batches(BATCH, columns=["tokens"]):
            yield from rows["tokens"].to_pylist()


def list_files(folder: Path) -> list[Path]:
    """The token files."""
    return sorted(file for file in folder.rglob("*.parquet") if file.is_file())


if __name__ == "__main__":
    main()

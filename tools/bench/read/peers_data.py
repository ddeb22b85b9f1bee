"""The same tokens as each contender wants them: Parquet as it was crawled, and the copies that others need.

FOLDER/tokens.npy, offsets.npy       what all are made of
FOLDER/parquet-N[...]/               N files (sources) of documents, and megablend's configs and indices
FOLDER/arrow/, rows/, mds/, bin/     copies: samples as Arrow, as rows of Parquet, as MDS; documents as `.bin/.idx`
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from contenders import LENGTH
from corpus.megatron import MegatronWriter
from documents import make_documents, write_parquet

import megablend

PAGES = {"8KB": 8 << 10, "64KB": 64 << 10, "1MB": 1 << 20}
MAIN = ("64KB", "zstd")
LANES = 8
CYCLE = 512
ORDERS = ("sequential", "page", "row")
SHARDS = 16
BATCH_ROWS = 1000
_PIECE = 1 << 22


def variant(data: str, page: str, codec: str) -> str:
    """The folder of a copy; pages and codecs are Parquet's alone."""
    return f"{data}-{page}-{codec}" if data.startswith("parquet") else data


def make_base(folder: Path, num_tokens: int) -> None:
    """Tokens and documents, in pieces that differ."""
    if (folder / "offsets.npy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.lib.format.open_memmap(folder / "tokens.npy", "w+", np.int32, (num_tokens,))
    ends = [np.zeros(1, np.int64)]
    for start in range(0, num_tokens, _PIECE):
        piece, offsets = make_documents(min(_PIECE, num_tokens - start), seed=start)
        tokens[start : start + len(piece)] = piece
        ends.append(offsets[1:] + start)
    tokens.flush()
    np.save(folder / "offsets.npy", np.concatenate(ends))


def make(folder: Path, data: str, page: str, codec: str, python: str) -> None:
    """One copy, where it is not there; it appears whole.

    Args:
        python: an interpreter that has what the copy is written with.

    Raises: subprocess.CalledProcessError where the peer's own writer fails.
    """
    out = folder / variant(data, page, codec)
    if out.exists():
        return
    unfinished = folder / "unfinished"
    subprocess.run(["rm", "-rf", str(unfinished)], check=True)
    unfinished.mkdir()
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    offsets = np.load(folder / "offsets.npy")
    if data == "arrow":
        for path, samples in _shards(unfinished, tokens, ".arrow"):
            with (
                pa.OSFile(str(path), "wb") as sink,
                pa.ipc.new_stream(sink, samples.schema) as writer,
            ):
                writer.write_table(samples, BATCH_ROWS)
    elif data == "rows":
        for path, samples in _shards(unfinished, tokens, ".parquet"):
            pq.write_table(
                samples, path, compression="zstd", use_dictionary=False, row_group_size=BATCH_ROWS
            )
    elif data == "mds":
        script = Path(__file__).parent / "mds_copy.py"
        command = [
            python,
            str(script),
            str(folder / "tokens.npy"),
            str(LENGTH),
            str(unfinished / "shards"),
        ]
        subprocess.run(command, check=True, capture_output=True)
        (unfinished / "shards").rename(out)
        return
    elif data == "bin":
        writer = MegatronWriter(unfinished / "tokens", end_of_document=0)
        for start in range(0, len(offsets) - 1, BATCH_ROWS):
            ends = offsets[start : start + BATCH_ROWS + 1]
            piece = np.asarray(tokens[ends[0] : ends[-1]])
            writer.write([""] * (len(ends) - 1), np.split(piece, ends[1:-1] - ends[0]))
        writer.close()
    else:
        _write_sources(unfinished, tokens, offsets, int(data.split("-")[1]), PAGES[page], codec)
    unfinished.rename(out)
    if data.startswith("parquet"):
        _build(out, len(tokens))


def files_of(folder: Path, name: str) -> list[Path]:
    """What a contender may read: all of its folder, but for other orders' indices."""
    own = f"cache-{name}" if (folder / "page.json").exists() else ""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in found if not own or path.parent == folder or own in path.parts]


def disk_bytes(folder: Path, name: str) -> int:
    """What a contender needs on disk besides the Parquet that was there: an index, or a copy."""
    found = files_of(folder, name)
    parquet_is_there = (folder / "page.json").exists()
    return sum(
        path.stat().st_size for path in found if not (parquet_is_there and path.parent == folder)
    )


def data_bytes(folder: Path) -> int:
    """Size of the tokens as a contender reads them."""
    ends = (".parquet", ".arrow", ".mds", ".bin")
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in ends)


def _shards(
    folder: Path, tokens: npt.NDArray[np.int32], suffix: str
) -> Iterator[tuple[Path, pa.Table]]:
    samples = len(tokens) // LENGTH
    for shard in range(min(SHARDS, samples)):
        start, stop = (
            samples * edge // min(SHARDS, samples) * LENGTH for edge in (shard, shard + 1)
        )
        offsets = pa.array(np.arange(0, stop - start + 1, LENGTH, dtype=np.int32))
        column = pa.ListArray.from_arrays(offsets, pa.array(np.asarray(tokens[start:stop])))
        yield folder / f"{shard:05d}{suffix}", pa.table({"tokens": column})


def _write_sources(
    folder: Path,
    tokens: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    sources: int,
    page_bytes: int,
    codec: str,
) -> None:
    edges = np.arange(sources + 1) * int(offsets[-1]) // sources
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        inside = offsets[
            np.searchsorted(offsets, start, side="right") : np.searchsorted(offsets, stop)
        ]
        part = np.concatenate([[start], inside, [stop]]) - start
        write_parquet(
            folder / f"{number:05d}.parquet",
            tokens[start:stop],
            part,
            page_bytes=page_bytes,
            codec=codec,
        )


def _build(folder: Path, num_tokens: int) -> None:
    """megablend's config and index, for each order; of one that this version lacks, the reason."""
    names = sorted(path.name for path in folder.glob("*.parquet"))
    for order in ORDERS:
        config = {
            "cache": f"cache-{order}",
            "sequence_length": LENGTH,
            "samples": (num_tokens - 1) // LENGTH,
            "order": order,
            "lanes": LANES,
            "shuffle_window": CYCLE,
            "sources": [{"name": name, "path": name, "weight": 1} for name in names],
        }
        path = folder / f"{order}.json"
        path.write_text(json.dumps(config))
        try:
            megablend.build(path)
        except megablend.ConfigError as error:
            path.unlink()
            (folder / f"{order}.missing").write_text(str(error))

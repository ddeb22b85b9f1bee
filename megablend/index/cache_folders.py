"""Where things are in a cache directory.

    <cache>/.lock                       held by the build that runs
    <cache>/fragments/<place>-<version> what indexing found in one file
    <cache>/packs/<digest>              the same of many files: see packs.py
    <cache>/generations/<digest>/       immutable: blocks.arrow, chunks.arrow, files.arrow, manifest.json, and *.check.arrow
                          roots.json    what the last build of it found: where each source's files lay, which column holds
                                        the tokens, what could not be read and was skipped; replaced atomically
                          seen          sizes and times that the last build of it saw; likewise
                          token_ranges  smallest and largest tokens of its files, as far as that build knew them; likewise
    <cache>/documents/, lengths/        tables of single documents, where an order needs them: see document_table.py
    <cache>/splits/<digest>-<what>      where the splits of a generation begin and end; tokens of groups of their blocks
    <cache>/idx/                        digests of parts of long `.idx` files: see idx_digests.py
    <cache>/runs/<run>.json             the run's ledger

Names that begin with a dot are work under way; see `fs.atomic_write`.
"""

from __future__ import annotations

from pathlib import Path


def generations(cache: str | Path) -> Path:
    """The folder of a cache's generations."""
    return Path(cache).absolute() / "generations"


def fragments(cache: str | Path) -> Path:
    """The folder of a cache's fragments."""
    return Path(cache).absolute() / "fragments"


def splits(cache: str | Path) -> Path:
    """The folder of what was computed of a cache's generations."""
    return Path(cache).absolute() / "splits"


def external_references_dir(cache: str | Path) -> Path:
    """The folder beside a cache where others than runs say which generations they need: in `*.json`, as `index`."""
    return Path(f"{Path(cache).absolute()}-documents")


def folders(cache: str | Path) -> list[Path]:
    """The folders of a cache that builds write to."""
    return [
        Path(cache).absolute() / name
        for name in ("fragments", "packs", "generations", "lengths", "documents", "splits", "idx", "runs")
    ]

"""The layout of a cache directory.

    <cache>/.lock                       lock file of the running build
    <cache>/fragments/<place>-<answer>  result of indexing one file: see fragments.py
    <cache>/packs/<digest>              the same for many files: see packs.py
    <cache>/generations/<digest>/       immutable: blocks.arrow, chunks.arrow, files.arrow, manifest.json, and *.check.arrow
                          roots.json    result of its last build: the folder of each source's files, the token column,
                                        paths that could not be read and were skipped; replaced
                                        atomically
                          seen          file sizes and times at its last build; replaced atomically
                          token_ranges  smallest and largest token of each file, if known; replaced atomically
    <cache>/documents/, lengths/        tables of single documents, if an order needs them: see document_table.py
    <cache>/splits/<digest>-<what>      boundaries of the splits of a snapshot; token totals of groups of their blocks;
                                        companions of the ledgers that read it last: see
                                        run/companion.py
    <cache>/checksums/<digest>/         checksums of a snapshot's blocks, made on request: see block_checksums.py
    <cache>/idx/                        digests of parts of long `.idx` files: see idx_digests.py
    <cache>/runs/<run>.json             the run's ledger

On disk, a snapshot is called a generation. Names that begin with a dot are unfinished; see
`system.atomic_write`.
"""

from __future__ import annotations

from pathlib import Path


def snapshots(cache: Path) -> Path:
    """Return the folder of a cache's snapshots."""
    return cache / "generations"


def fragments(cache: Path) -> Path:
    """Return the folder of a cache's fragments."""
    return cache / "fragments"


def packs(cache: Path) -> Path:
    """Return the folder of a cache's packs."""
    return cache / "packs"


def idx_digests(cache: Path) -> Path:
    """Return the folder of a cache's digests of parts of long `.idx` files."""
    return cache / "idx"


def splits(cache: Path) -> Path:
    """Return the folder of numbers that were computed from a cache's snapshots, such as splits."""
    return cache / "splits"


def external_references_dir(cache: Path) -> Path:
    """Return the folder next to a cache in which programs other than runs register the snapshots
    that they use. Each `*.json` file in this folder has a field `index`, the digest of a snapshot
    that must be kept."""
    return Path(f"{cache.absolute()}-documents")

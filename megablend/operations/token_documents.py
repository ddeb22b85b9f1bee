"""Find sources whose documents are probably not the intended ones. If the config does not say what
a document is, each token of a flat column counts as a document, and so does each raw file, however
large."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from megablend.config import Config
from megablend.errors import ConfigError
from megablend.formats.flat import DOCUMENTS, is_flat
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.index.tables.source_entry import SourceEntry
from megablend.run.ledger import Ledger

_WHOLE_SAMPLES = 100
"""Raw files with more than this number of samples on average are probably not single documents."""


def refuse_token_documents(config: Config, snapshot: Snapshot, ledger: Ledger | None) -> None:
    """Refuse sources in which each token would count as a document, except sources that a run
    already reads in this way.

    Args:
        ledger: the run's ledger as it was committed; None before its first build.

    Raises: ConfigError, which lists the possible values of `documents`.
    """
    known = set[str]() if ledger is None else {source.name for source in ledger.blend.sources}
    for entry in _list_entries(config, snapshot):
        split, _, name = entry.name.rpartition("/")
        if ledger is None or (split in ("", "train") and name not in known):
            raise ConfigError(_describe(config, snapshot, entry))
        if config.needs_lengths and not _is_counted(config, ledger, entry.name):
            raise ConfigError(
                f"{_describe(config, snapshot, entry)}, and give the run another name (`run:`), or "
                "leave out `order: document`"
            )


def warn_of_documents(config: Config, snapshot: Snapshot) -> list[str]:
    """Return warnings about the sources of a run in which each token, or each large raw file,
    counts as a document; an empty list if there are none."""
    warnings = []
    tokens = _join_names(_list_entries(config, snapshot))
    if tokens:
        warnings.append(
            f"each token of {tokens} counts as a document, since the column has no lists of tokens; to change this, set "
            "`documents` of the source in a new run"
        )
    files = _join_names(_list_whole_files(config, snapshot))
    if files:
        warnings.append(
            f"each file of {files} counts as a document, so `split` and `order: document` move whole files; name the "
            "token that ends documents: `format_options: {eod_token: ID}` of the source"
        )
    return warnings


def _join_names(entries: Sequence[SourceEntry]) -> str:
    """Return the names of the first three sources, and the number of the others, as text."""
    more = f" and {len(entries) - 3:,} more" if len(entries) > 3 else ""
    return ", ".join(repr(entry.name) for entry in entries[:3]) + more


def _list_whole_files(config: Config, snapshot: Snapshot) -> list[SourceEntry]:
    """Return the sources that have large raw files but no token that separates documents, if a
    split or the order depends on documents."""
    if not (_splits(config) or config.needs_lengths):
        return []
    entries = []
    for name in config.all_sources:
        entry = snapshot.sources.find(name)
        if entry is None or not len(entry.files):
            continue
        is_large = entry.tokens > _WHOLE_SAMPLES * config.sequence_length * len(entry.files)
        if (
            is_large
            and snapshot.files.entry(entry.files[0]).opened.meta.get("separator", 0) is None
        ):
            entries.append(entry)
    return entries


def _splits(config: Config) -> bool:
    """Return whether a split divides the documents of sources."""
    return config.split is not None and max(config.split) != 1


def _list_entries(config: Config, snapshot: Snapshot) -> list[SourceEntry]:
    """Return the sources in which each token counts as a document although some setting depends on
    where documents end."""
    stages = (config, *config.stage_configs_ignoring_sources)
    is_masked = any(settings.inter_document_masking for settings in stages)
    by_document = _splits(config) or config.needs_lengths or is_masked
    entries = []
    for name, source in config.all_sources.items():
        has_no_effect = not by_document and source.append_eod is None
        if source.documents is not None or has_no_effect:
            continue
        entry = snapshot.sources.find(name)
        if entry is None:
            continue
        is_by_row = len(entry.files) > 0 and entry.read.option(DOCUMENTS) is None
        if is_by_row and is_flat(snapshot.files.entry(entry.files[0]).opened.meta):
            entries.append(entry)
    return entries


def _is_counted(config: Config, ledger: Ledger, name: str) -> bool:
    """Return whether an index of the run has document counts for a source. It does if any setting
    other than the masks depends on them."""
    for digest in ledger.indices:
        entry = open_snapshot(config.cache_store, digest).sources.find(name)
        if entry is not None and entry.documents:
            return True
    return False


def _describe(config: Config, snapshot: Snapshot, entry: SourceEntry) -> str:
    """Return the error message for a source in which each token would be a document."""
    source = config.all_sources[entry.name]
    files = len(entry.files)
    groups = len(entry.blocks)
    if entry.kind.has_row_groups:
        groups = sum(len(snapshot.chunks(snapshot.files.entry(number))) for number in entry.files)
    prefix = f"{source.place}: " if source.place else ""
    return (
        f"{prefix}source {entry.name!r} has one token per row, so each token would be a document, but append_eod, "
        "`split`, `inter_document_masking` and `order: document` need documents; set `documents: file` "
        f"({_count(config, files)}), `documents: row_group` ({_count(config, groups)}) or `documents: {{eod_token: "
        "ID}` for a token that ends documents"
    )


def _count(config: Config, documents: int) -> str:
    """Return a text with a number of documents, and with the number of them that each split would
    have."""
    if not _splits(config):
        return f"{documents:,}"
    assert config.split is not None
    bounds = [round(share * documents) for share in accumulate(config.split, initial=Fraction(0))]
    return f"{documents:,}: {', '.join(f'{stop - start:,}' for start, stop in pairwise(bounds))} in the splits"

"""Sources in which each token counts as a document:
flat columns for which the config does not say what a document is."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise

from megablend.config import Config
from megablend.errors import ConfigError
from megablend.formats.flat import DOCUMENTS, is_flat
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.index.tables.source_entry import SourceEntry
from megablend.run.ledger import Ledger


def refuse_token_documents(config: Config, snapshot: Snapshot, ledger: Ledger | None) -> None:
    """Refuse sources whose tokens would count as documents,
    except those that a run already reads like that.

    Args:
        ledger: of the run as it was committed; None before its first build.

    Raises: ConfigError, which lists what the documents may be.
    """
    known = set[str]() if ledger is None else {source.name for source in ledger.blend.sources}
    for entry in _find(config, snapshot):
        split, _, name = entry.name.rpartition("/")
        if ledger is None or (split in ("", "train") and name not in known):
            raise ConfigError(_describe(config, snapshot, entry))
        if config.needs_lengths and not _is_counted(config, ledger, entry.name):
            raise ConfigError(
                f"{_describe(config, snapshot, entry)}, or, since that cannot change within a run, "
                "give the run another name (`run:`) or leave out `order: document`"
            )


def warn_of_token_documents(config: Config, snapshot: Snapshot) -> list[str]:
    """A warning about the sources of a run in which each token counts as a document;
    none if there are none."""
    names = [repr(entry.name) for entry in _find(config, snapshot)]
    if not names:
        return []
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return [
        f"each token of {', '.join(names[:3])}{more} counts as a document, since the column is flat; this run "
        "continues like that; in a new run, set `documents` of the source"
    ]


def _find(config: Config, snapshot: Snapshot) -> list[SourceEntry]:
    """The sources of which something depends on where documents end,
    while each of their tokens is one."""
    splits = config.split is not None and max(config.split) != 1
    is_masked = any(
        settings.inter_document_masking
        for settings in (config, *config.stage_configs_ignoring_sources)
    )
    by_document = splits or config.needs_lengths or is_masked
    found = []
    for name, source in config.all_sources.items():
        number = snapshot.sources.numbers.get(name)
        if (
            number is None
            or source.documents is not None
            or not (by_document or source.append_eod is not None)
        ):
            continue
        entry = snapshot.sources[number]
        is_by_row = len(entry.files) > 0 and entry.read.option(DOCUMENTS) is None
        if is_by_row and is_flat(snapshot.file(entry.files[0]).opened.meta):
            found.append(entry)
    return found


def _is_counted(config: Config, ledger: Ledger, name: str) -> bool:
    """Whether the run counts documents of a source,
    which it does if anything but its masks goes by them."""
    for digest in ledger.indices:
        committed = open_snapshot(config.cache_store, digest)
        number = committed.sources.numbers.get(name)
        if number is not None and committed.sources[number].documents:
            return True
    return False


def _describe(config: Config, snapshot: Snapshot, entry: SourceEntry) -> str:
    source = config.all_sources[entry.name]
    files = len(entry.files)
    groups = len(entry.blocks)
    if entry.kind.has_row_groups:
        groups = sum(len(snapshot.chunks(snapshot.file(number))) for number in entry.files)
    place = f"{source.place}: " if source.place else ""
    return (
        f"{place}source {entry.name!r}: its column is flat, so each token would be a document, but append_eod, "
        "`split`, `inter_document_masking` and `order: document` depend on documents; set `documents: file` "
        f"({_count(config, files)}), `documents: row_group` ({_count(config, groups)}) or `documents: {{eod_token: "
        "ID}` for a token that ends documents"
    )


def _count(config: Config, documents: int) -> str:
    """How many documents there are, and in the splits if the config has any."""
    if config.split is None or max(config.split) == 1:
        return f"{documents:,}"
    bounds = [round(share * documents) for share in accumulate(config.split, initial=Fraction(0))]
    return f"{documents:,}: {', '.join(f'{stop - start:,}' for start, stop in pairwise(bounds))} in the splits"

"""build --dry-run: what indexing the config's files will request from object stores, without
building anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megablend.config import Config
from megablend.index.build.estimate_requests import estimate_indexing
from megablend.index.build.source_spec import SourceSpec
from megablend.index.build.sources import list_source
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.operations.source_specs import list_specs
from megablend.storage.base import Storage
from megablend.storage.objects.clients import count_requests
from megablend.storage.transfer import Counted, price_transfer
from megablend.system.failures import translating


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DryRun(Record):
    """What indexing a source would take if nothing of it were indexed."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"tokenising"})
    name: str
    files: int
    bytes: int
    """Total size of the data files."""
    requests: int
    """Those to make at least; 0 for files on a local disk."""
    source_bytes: int
    """Bytes to request at least."""
    cost: float | None
    """Where the config gives prices."""
    most_requests: int
    """The most; the same where all files were tried."""
    most_source_bytes: int
    most_cost: float | None
    tabled: bool
    """Whether `build` then reads the lengths of its documents, too, which is not included."""
    tokenising: str | None = None
    """Of text that is not tokenised: how much, and what that takes, from a sample."""


@translating("build")
def dry_run(
    config: ConfigLike,
    *,
    cache: str | None = None,
    storage: Storage | None = None,
    processes: int | None = None,
) -> list[DryRun]:
    """Find the files of a config's sources, and the requests and bytes that indexing them takes. To
    find these, up to 512 files of each source in an object store (more if they differ much) are
    indexed without reading their data. Of text that is not tokenised, the beginnings of up to 16
    files are. Nothing is kept.

    Args:
        processes: that would tokenise.

    Raises: ConfigError, DataError.
    """
    session = Session(config, cache=cache, storage=storage)
    checked = session.config
    storage = session.storage
    found = list[DryRun]()
    tabled = checked.sources_needing_lengths
    for spec in list_specs(checked):
        if checked.all_sources[spec.name].text is not None:
            found.append(_estimate_text(checked, spec, storage, processes))
            continue
        before = count_requests()
        listing = list_source(spec, storage)
        listed = np.subtract(count_requests(), before)
        options = checked.storage.find(listing.files[0].path)
        least, most = (Counted(*(listed + each)) for each in estimate_indexing(listing, storage))
        transfer = price_transfer(least, most, options)
        found.append(
            DryRun(
                name=spec.name,
                files=len(listing.files),
                bytes=sum(file.size for file in listing.files),
                requests=transfer.requests,
                source_bytes=transfer.bytes,
                cost=transfer.cost,
                most_requests=transfer.most_requests,
                most_source_bytes=transfer.most_bytes,
                most_cost=transfer.most_cost,
                tabled=spec.name in tabled,
            )
        )
    return found


def _estimate_text(
    config: Config, spec: SourceSpec, storage: Storage, processes: int | None
) -> DryRun:
    from megablend.text.estimate import estimate_pending  # few need it

    files, expected, number = estimate_pending(config, spec, storage, processes)
    return DryRun(
        name=spec.name,
        files=len(files),
        bytes=sum(file.size for file in files),
        requests=0,
        source_bytes=0,
        cost=None,
        most_requests=0,
        most_source_bytes=0,
        most_cost=None,
        tabled=spec.name in config.sources_needing_lengths,
        tokenising=expected.describe(number),
    )

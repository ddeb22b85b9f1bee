"""build --dry-run: estimate the requests to object stores that indexing the config's files would
take, without building anything."""

from __future__ import annotations

from dataclasses import dataclass

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
from megablend.storage.store_options import find_options
from megablend.storage.transfer import RequestCount, price_transfer
from megablend.system.failures import translating


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DryRun(Record):
    """The estimated cost of indexing a source, as if none of its files were indexed yet."""

    name: str
    files: int
    bytes: int
    """Total size of the data files."""
    requests: int
    """Minimum number of requests; 0 for files on a local disk."""
    source_bytes: int
    """Minimum number of bytes that are requested."""
    cost: float | None
    """Minimum cost of the requests; None if the config gives no prices."""
    most_requests: int
    """Maximum number of requests; equal to `requests` if the estimate is based on all files."""
    most_source_bytes: int
    """Maximum number of bytes that are requested."""
    most_cost: float | None
    """Maximum cost of the requests; None if the config gives no prices."""
    tabled: bool
    """Whether `build` will also read the lengths of the source's documents. The estimate does not
    include this."""
    tokenising: str | None = None
    """Text that states how much must be tokenised, and the time and space that this takes,
    estimated from a sample; None if the source is not text."""


@translating("build")
def dry_run(
    config: ConfigLike,
    *,
    cache: str | None = None,
    storage: Storage | None = None,
    processes: int | None = None,
) -> list[DryRun]:
    """Find the files of a config's sources, and estimate the requests and bytes that indexing them
    takes.

    For the estimate, up to 512 files of each source in an object store (more if they differ much)
    are indexed without reading their data, and the beginnings of up to 16 files of text are
    tokenised. Nothing is kept.

    Args:
        processes: number of processes that will tokenise.

    Raises: ConfigError, DataError.
    """
    session = Session(config, cache=cache, storage=storage)
    checked_config = session.config
    storage = session.storage
    estimates = list[DryRun]()
    tabled = checked_config.sources_needing_lengths
    configured = checked_config.all_sources
    for spec in list_specs(checked_config):
        if configured[spec.name].text is not None:
            estimates.append(_estimate_text(checked_config, spec, storage, processes))
            continue
        before = count_requests()
        listing = list_source(spec, storage)
        listing_requests = np.subtract(count_requests(), before)
        options = find_options(checked_config.storage, listing.files[0].path)
        least, most = estimate_indexing(listing, storage)
        transfer = price_transfer(
            RequestCount(*(listing_requests + least)),
            RequestCount(*(listing_requests + most)),
            options,
        )
        estimates.append(
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
    return estimates


def _estimate_text(
    config: Config, spec: SourceSpec, storage: Storage, processes: int | None
) -> DryRun:
    """Estimate what indexing a source of text takes."""
    from megablend.text.estimate import estimate_pending  # imported only if it is needed

    files, expected, num_processes = estimate_pending(config, spec, storage, processes)
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
        tokenising=expected.describe(num_processes),
    )

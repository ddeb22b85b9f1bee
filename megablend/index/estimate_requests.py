"""What indexing the files of a source in an object store will request, estimated by indexing the smallest of them."""

from __future__ import annotations

from megablend.index.sampled_digest import request_samples, sampled_content_digest
from megablend.index.source_spec import SourceListing
from megablend.storage.base import Storage
from megablend.storage.object_options import ObjectOptions
from megablend.storage.prefetched import PrefetchedStorage
from megablend.storage.transfer import MeteredStorage, Transfer, price_transfer

_FIXED_REQUESTS, _FIXED_BYTES = 17, 128 << 10
"""Requests and bytes that each file costs, whatever its size: samples, and the end of the file."""


def estimate_indexing(listing: SourceListing, storage: Storage, options: ObjectOptions) -> Transfer:
    """Estimate the requests and bytes that indexing a source's files takes; none of files on a local disk.

    The smallest file is indexed. What it takes beyond a fixed part grows with the size of a file.

    Raises: as `Format.index` does.
    """
    files = [file for file in listing.files if storage.limits(file.path).max_files > 1]
    if not files:
        return Transfer()
    smallest = min(files, key=lambda file: file.size)
    metered = MeteredStorage(storage)
    fetched = PrefetchedStorage(metered)
    request_samples(smallest.path, smallest.size, fetched)
    listing.kind.index(smallest.path, listing.spec.read, storage=fetched)
    sampled_content_digest(smallest.path, smallest.size, fetched)
    growth = sum(file.size for file in files) / max(1, smallest.size)
    requests = _extrapolate(metered.requests, _FIXED_REQUESTS, len(files), growth)
    size = _extrapolate(metered.bytes, _FIXED_BYTES, len(files), growth)
    return price_transfer(requests, size, options.find(smallest.path))


def _extrapolate(measured: int, fixed: int, num_files: int, growth: float) -> int:
    """From one file to all: a fixed part of each, and one that grows with the files' size."""
    fixed = min(fixed, measured)
    return round(fixed * num_files + (measured - fixed) * growth)

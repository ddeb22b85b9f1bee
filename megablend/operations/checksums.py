"""Compute checksums of all blocks of an index, for `build --checksums`. The files are divided among
the ranks, and rank 0 commits the result."""

from __future__ import annotations

from collections.abc import Callable

from megablend.caches.base import CHECKSUMS
from megablend.config import Config
from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.index.build.build import Progress
from megablend.index.read.block_checksums import Sums, commit_sums, compute_sums
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.table_folder import is_complete
from megablend.storage.base import Storage
from megablend.storage.requested_reads import RequestedReads, run_in_threads
from megablend.system.log import LOG


def make_checksums(
    config: Config,
    digest: str,
    *,
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Read all blocks of an index and store their checksums, unless they exist already. Called by
    all ranks.

    Raises: DataError; CacheError.
    """
    store = config.cache_store
    snapshot = open_snapshot(store, digest)
    is_made = (
        launch.rank == 0
        and store.has_folder(CHECKSUMS, digest)
        and is_complete(store.fetch_folder(CHECKSUMS, digest))
    )
    if launch.bcast(is_made):
        return
    sizes = [snapshot.files.entry(number).opened.size for number in range(snapshot.num_files)]
    if launch.rank == 0:
        LOG.info(
            "%s: reading up to %d bytes of %d files for checksums of blocks",
            store.location,
            sum(sizes),
            len(sizes),
        )
    mine = assign_longest_first(sizes, launch.size)[launch.rank]
    roots = config.roots
    paths = {number: snapshot.path(number, roots) for number in mine}
    num_threads = max((storage.limits(path).max_files for path in paths.values()), default=1)
    sums_of_file = dict[int, Sums]()
    done = 0

    def compute(number: int, _: RequestedReads) -> Sums:
        return compute_sums(snapshot, number, paths[number], storage)

    for number, sums in run_in_threads(compute, mine, num_threads):
        sums_of_file[number] = sums
        done += sizes[number]
        if progress is not None and launch.rank == 0:
            progress(
                Progress(
                    files=len(sums_of_file),
                    num_files=len(mine),
                    bytes=done,
                    num_bytes=sum(sizes[i] for i in mine),
                )
            )
    gathered = launch.gather(sums_of_file)
    if launch.rank == 0:
        by_number = {
            number: sums for sums_by_file in gathered for number, sums in sums_by_file.items()
        }
        with store.hold():
            commit_sums(snapshot, [by_number[number] for number in range(snapshot.num_files)])
    launch.barrier()
    store.fetch_folder(CHECKSUMS, digest)

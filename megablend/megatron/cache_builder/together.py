"""Every rank of a job fills the cache that it sees: the ranks that share a folder work together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megablend.distributed.fail_together import Subgroup
from megablend.distributed.folder_groups import AUTO, ranks_sharing_folder
from megablend.distributed.job import Job
from megablend.distributed.same_settings import check_same_settings
from megablend.index.build import Progress
from megablend.megatron.cache_builder.build_cache import CacheReport, prepare_cache
from megablend.megatron.request.request import CacheRequest
from megablend.storage.base import Storage


def prepare_on_ranks(
    request: CacheRequest,
    job: Job,
    *,
    storage: Storage,
    shared_fs: str = AUTO,
    dry_run: bool = False,
    max_memory: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> CacheReport:
    """Build what the caches of all ranks lack. Called on every rank of the job.

    Args:
        request: the same on all ranks, except for the location of the cache; this is checked.
        shared_fs: as `ranks_sharing_folder` takes it; a dry run creates no folder, and assumes that all ranks share one.

    Others as prepare_cache has them; `progress` is called on the first rank of each folder.

    Raises: on all ranks the error of any: ConfigError, PlanError, DataError, CacheError, LaunchError.
    """
    cache = Path(request.path_to_cache).absolute()
    with job.members(range(job.size)) as world:
        try:
            check_same_settings(world, request.list_settings())
            ranks = list(range(job.size)) if dry_run else ranks_sharing_folder(world, cache, shared_fs)
            with job.members(ranks) as group:
                launch = Subgroup(group, world)
                report = prepare_cache(
                    request, launch=launch, storage=storage, dry_run=dry_run, max_memory=max_memory, progress=progress
                )
            world.finish()  # a rank may fail at the very end
        except BaseException as error:
            world.abort(error)
    return report

"""The command `megablend megatron-cache` as Python functions, which take Megatron's own config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megablend.config.storage_settings import load_storage_settings
from megablend.distributed.fail_together import Job, Subgroup
from megablend.distributed.find_job import this_job
from megablend.distributed.folder_groups import AUTO, ranks_sharing_folder
from megablend.distributed.same_settings import check_same_settings
from megablend.index.build.build import Progress
from megablend.megatron.cache_builder.build_cache import prepare_cache
from megablend.megatron.cache_builder.cache_report import CacheReport
from megablend.megatron.request.config import DatasetConfig, request_of
from megablend.megatron.request.request import CacheRequest
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.fork_safe import ForkSafeStorage
from megablend.storage.objects.helper import closing_helper


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
    """Build the files that are missing in the caches of all ranks. Every rank of the job must call
    this function.

    Args:
        request: the files to build. It must be the same on all ranks, except for the location of
            the cache; this is checked.
        shared_fs: see `ranks_sharing_folder`; a dry run creates no folder, and assumes that all
            ranks share one.
        dry_run, max_memory: see `prepare_cache`.
        progress: see `prepare_cache`; called on the first rank of each folder.

    Raises: ConfigError, PlanError, DataError, CacheError or LaunchError. If one rank fails, all
        ranks raise its error.
    """
    cache = Path(request.path_to_cache).absolute()
    with job.members(range(job.size)) as world:
        try:
            check_same_settings(world, request.list_settings())
            ranks = list(range(job.size))
            if not dry_run:
                ranks = ranks_sharing_folder(world, cache, shared_fs)
            with job.members(ranks) as group:
                launch = Subgroup(group, world)
                report = prepare_cache(
                    request,
                    launch=launch,
                    storage=storage,
                    dry_run=dry_run,
                    max_memory=max_memory,
                    progress=progress,
                )
            # A rank may fail at the very end
            world.finish()
        except BaseException as error:
            world.abort(error)
    return report


def prepare(
    config: DatasetConfig,
    sizes: Sequence[int | None],
    *,
    max_memory: int | None = None,
    shared_fs: str = AUTO,
) -> CacheReport:
    """Build the files that Megatron's builder will look for in `config.path_to_cache`, unless they
    exist already. Every rank must call this function.

    The ranks are those of torch.distributed if it is initialised, otherwise those that an MPI
    launcher started, otherwise this process alone. Ranks that see the same folder build it
    together.

    Args:
        config: a GPTDatasetConfig. The settings of object stores are taken from its `storage` if it
            is a MegablendDatasetConfig, otherwise from the file named by the environment variable
            MEGABLEND_STORAGE.
        sizes: numbers of samples of train, valid and test, as Megatron's builder takes them.
        max_memory: limit in bytes for the arrays of all ranks of a node together; None for most of
            the node's free memory.
        shared_fs: "yes" if all ranks share the cache's folder, "no" if only those of one machine
            may share it, "auto" to detect it.

    Raises: ConfigError, PlanError, DataError, CacheError or LaunchError. If one rank fails, all
        ranks raise its error.
    """
    job = this_job()
    try:
        request = request_of(config, sizes)
        objects = load_storage_settings(getattr(config, "storage", None))
    except BaseException as error:
        job.world.abort(error)
    # Training forks workers of its DataLoader afterwards
    storage = ForkSafeStorage(make_storage(objects=objects))
    with closing_helper():
        return prepare_on_ranks(
            request, job, storage=storage, shared_fs=shared_fs, max_memory=max_memory
        )

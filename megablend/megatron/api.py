"""`megablend megatron-cache` in Python, from Megatron's own config."""

from __future__ import annotations

from collections.abc import Sequence

from megablend.config.storage_settings import load_storage_settings
from megablend.distributed.find_job import this_job
from megablend.distributed.folder_groups import AUTO
from megablend.megatron.cache_builder.build_cache import CacheReport
from megablend.megatron.cache_builder.together import prepare_on_ranks
from megablend.megatron.request.config import DatasetConfig, request_of
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.fork_safe import ForkSafeStorage
from megablend.storage.objects.helper import closing_helper


def prepare(
    config: DatasetConfig, sizes: Sequence[int | None], *, max_memory: int | None = None, shared_fs: str = AUTO
) -> CacheReport:
    """Build what `config.path_to_cache` lacks for Megatron's builder to find all it looks for. Called on every rank.

    Args:
        config: a GPTDatasetConfig. Object stores are accessed by its `storage` if it is a MegablendDatasetConfig, otherwise by
            the settings that MEGABLEND_STORAGE names.
        sizes: samples of train, valid and test, as the builder takes them.
        max_memory: bytes of arrays that the ranks of one node hold together; most of what is free there where None.
        shared_fs: "yes" where all ranks share the cache's folder, "no" if only those of one machine may, "auto" to detect it.

    The ranks are those of torch.distributed where it is initialised, else those that an MPI launcher started, else this
    process alone. Ranks that see one folder build it together.

    Raises: on all ranks the error of any: ConfigError, PlanError, DataError, CacheError, LaunchError.
    """
    job = this_job()
    try:
        request = request_of(config, sizes)
        objects = load_storage_settings(getattr(config, "storage", None))
    except BaseException as error:
        job.world.abort(error)
    storage = ForkSafeStorage(make_storage(objects=objects))  # training forks its DataLoader's workers
    with closing_helper():
        return prepare_on_ranks(request, job, storage=storage, shared_fs=shared_fs, max_memory=max_memory)

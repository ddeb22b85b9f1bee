"""`megablend megatron-cache` in Python, from Megatron's own config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megablend.config.storage_settings import load_storage_settings
from megablend.distributed.find_job import this_job
from megablend.distributed.folder_groups import AUTO
from megablend.errors import ConfigError
from megablend.megatron.cache_builder.build_cache import CacheReport
from megablend.megatron.cache_builder.together import prepare_on_ranks
from megablend.megatron.compat import setting
from megablend.megatron.request.request import GREEDY, SPLITS, Blend, CacheRequest
from megablend.megatron.request.tokenizer import identifiers_of
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.before_fork import BeforeForkStorage
from megablend.storage.objects.helper import closing_helper


class DatasetConfig(Protocol):
    """The settings of a GPTDatasetConfig that are used."""

    random_seed: int
    sequence_length: int
    blend: tuple[Sequence[str], Sequence[float] | None] | None
    blend_per_split: Sequence[tuple[Sequence[str], Sequence[float] | None] | None] | None
    split: str | None
    multiple_validation_sets: bool | None
    full_validation: bool | None
    path_to_cache: str | None
    tokenizer: Any
    mock: bool
    mid_level_dataset_surplus: float
    drop_last_partial_validation_sequence: bool
    add_extra_token_to_sequence: bool


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
    storage = BeforeForkStorage(make_storage(objects=objects))  # training forks its DataLoader's workers
    with closing_helper():
        return prepare_on_ranks(request, job, storage=storage, shared_fs=shared_fs, max_memory=max_memory)


def request_of(config: DatasetConfig, sizes: Sequence[int | None], *, interleaving: str = GREEDY) -> CacheRequest:
    """The request that a config and sizes describe.

    Raises: ConfigError if Megatron would refuse it or use mock data.
    """
    if config.mock:
        raise ConfigError(
            "the config has neither blend nor blend_per_split, so Megatron would use mock data; nothing to cache"
        )
    if len(sizes) != len(SPLITS):
        raise ConfigError(f"{len(sizes)} sizes given; expected three, for train, valid and test")
    per_split = config.blend_per_split if config.blend_per_split is not None and any(config.blend_per_split) else None
    return CacheRequest(
        path_to_cache=config.path_to_cache or "",
        random_seed=config.random_seed,
        sequence_length=config.sequence_length,
        tokenizer=identifiers_of(config.tokenizer),
        sizes=tuple(None if size is None else int(size) for size in sizes),
        blend=None if config.blend is None else _blend(config.blend),
        blend_per_split=None
        if per_split is None
        else tuple(None if each is None else _blend(each) for each in per_split),
        split=config.split,
        multiple_validation_sets=bool(setting(config, "multiple_validation_sets")),
        full_validation=bool(setting(config, "full_validation")),
        mid_level_dataset_surplus=setting(config, "mid_level_dataset_surplus"),
        drop_last_partial_validation_sequence=config.drop_last_partial_validation_sequence,
        add_extra_token_to_sequence=config.add_extra_token_to_sequence,
        interleaving=interleaving,
    )


def _blend(blend: tuple[Sequence[str], Sequence[float] | None]) -> Blend:
    prefixes, weights = blend
    return Blend(prefixes=tuple(prefixes), weights=None if weights is None else tuple(map(float, weights)))

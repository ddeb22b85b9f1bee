"""What differs between versions of megatron-core; nothing else here knows of a version.

    0.12    a blend's surplus is 0.5 %, not a setting; no validation sets by themselves, no fast cache load
    0.14    multiple_validation_sets, full_validation
    0.16    fast_cache_load, defer_npy_index_mmap
    later   inter_document_masking: a dataset's query also tells the tokens of each of a sample's documents

The builder's steps (`_build_megatron_dataset_splits`, `_build_megatron_datasets_parallel`, `build_generic_dataset`) and the
constructors of datasets have had one signature in all versions that are known here. Of another version that cannot be
said: the builder then goes Megatron's own way.
Nothing is imported of megatron-core: caches can be prepared where it is not installed.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import Any

_FIRST, _LAST = (0, 12), (0, 16)
_DEFAULTS = {
    "fast_cache_load": False,
    "full_validation": False,
    "mid_level_dataset_surplus": 0.005,
    "multiple_validation_sets": False,
}
"""What versions that lack a setting do."""


@cache
def unknown_version() -> str | None:
    """The installed version, where it is not one that this module knows; None where it is."""
    version = metadata.version("megatron-core")
    found = re.match(r"(\d+)\.(\d+)", version)
    known = found is not None and _FIRST <= (int(found[1]), int(found[2])) <= _LAST
    return None if known else version


def setting(config: Any, name: str) -> Any:
    """A setting of a Megatron config, or what Megatron does where the installed version has no such setting."""
    found = getattr(config, name, None)
    return _DEFAULTS[name] if found is None else found


def assumes_whole_cache(config: Any) -> bool:
    """Whether the user has said that the cache is whole and need not be looked at."""
    return bool(setting(config, "fast_cache_load"))


def query_result(config: Any, tokens: Any, documents: Any, document_tokens: list[int]) -> tuple[Any, ...]:
    """What GPTDataset._query_document_sample_shuffle_indices returns in the version that `config` is of."""
    if hasattr(config, "inter_document_masking"):
        return tokens, documents, document_tokens
    return tokens, documents

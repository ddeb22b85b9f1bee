"""Differences between versions of megatron-core. They are detected by the settings and methods that
the installed version has. No other module depends on the version.

    0.12    a blend's surplus is 0.5 %, not a setting; no separate validation sets, no fast cache load
    0.14    multiple_validation_sets, full_validation
    0.16    fast_cache_load, defer_npy_index_mmap
    0.19    inter_document_masking: queries also return the number of tokens of each document

probe.py checks whether the plugin is compatible with the installed version. A setting that this
module does not know may change the content of a cache. If such a setting is not at its default, the
datasets are built by Megatron's own builder. This module imports nothing from megatron-core, so
that caches can be prepared where megatron-core is not installed.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

TRIED = ("0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20")
"""Version series that were tested. Other versions are also used if they are compatible, and a
warning is logged."""
_DEFAULTS = {
    "defer_npy_index_mmap": False,
    "fast_cache_load": False,
    "full_validation": False,
    "mid_level_dataset_surplus": 0.005,
    "multiple_validation_sets": False,
}
"""For each setting that some versions lack: the value that describes how those versions behave."""
_OTHERS = {
    "add_extra_token_to_sequence",
    "allow_ambiguous_pad_tokens",
    "blend",
    "blend_per_split",
    "context_parallel_size",
    "create_attention_mask",
    "data_parallel_size",
    "drop_last_partial_validation_sequence",
    "dynamic_context_parallel",
    "eod_mask_loss",
    "hybrid_context_parallel",
    "inter_document_masking",
    "mmap_bin_files",
    "mock",
    "num_dataset_builder_threads",
    "object_storage_cache_path",
    "path_to_cache",
    "random_seed",
    "reset_attention_mask",
    "reset_position_ids",
    "s3_cache_path",
    "sequence_length",
    "sequence_parallel_size",
    "sequences_per_dataset",
    "sft_mock_dataset_config_json",
    "split",
    "split_matrix",
    "token_dtype_code",
    "tokenizer",
    "varlen_mock_dataset_config_json",
    "varlen_sbhd_validation",
}
"""The other known settings: those that all versions have, or that do not change a cache."""


def is_tried(version: str) -> bool:
    """Return whether a version, such as "0.16.1", belongs to a series that was tested."""
    return ".".join(version.split(".")[:2]) in TRIED


def has_default(name: str) -> bool:
    """Return whether some versions lack this setting, and it therefore has an entry in
    _DEFAULTS."""
    return name in _DEFAULTS


def find_unknown_settings(config: Any, known_class: type[Any]) -> list[str]:
    """Return the names of the settings that megablend does not know and that are not at their
    defaults.

    Args:
        config: an instance of `known_class`, or of a subclass. Settings that the subclass adds are
            ignored.
        known_class: the installed GPTDatasetConfig.
    """
    unknown = [
        field
        for field in fields(known_class)
        if field.name not in _OTHERS and field.name not in _DEFAULTS
    ]
    return [field.name for field in unknown if getattr(config, field.name, None) != _default(field)]


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def setting(config: Any, name: str) -> Any:
    """Return the value of a setting of a Megatron config. If the installed version has no such
    setting, return the value in _DEFAULTS."""
    value = getattr(config, name, None)
    return _DEFAULTS[name] if value is None else value


def assumes_whole_cache(config: Any) -> bool:
    """Return whether the user has declared that the cache is complete (`fast_cache_load`). Such a
    cache is not checked."""
    return bool(setting(config, "fast_cache_load"))


def query_result(
    config: Any, tokens: Any, documents: Any, document_tokens: list[int]
) -> tuple[Any, ...]:
    """Return a sample in the same form as GPTDataset._query_document_sample_shuffle_indices of the
    installed version: two values, or three from 0.19 on.

    Args:
        tokens: the tokens of the sample.
        documents: numbers of the sample's documents.
        document_tokens: number of tokens of each of these documents.
    """
    if hasattr(config, "inter_document_masking"):
        return tokens, documents, document_tokens
    return tokens, documents

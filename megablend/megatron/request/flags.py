"""The request that the flags of Megatron's training script describe.

Source: megatron.training.utils.get_blend_and_blend_per_split, validate_args and core_gpt_dataset_config_from_args of
Megatron-LM 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megablend.errors import ConfigError
from megablend.megatron.request.data_path import blend_from_words, read_blends, read_words
from megablend.megatron.request.request import SPLITS, Blend, CacheRequest
from megablend.megatron.request.sizes import TrainingFlags
from megablend.megatron.request.split import split_matrix
from megablend.megatron.request.tokenizer import build_identifiers, read_identifiers

_LEGACY_SPLIT = "969, 30, 1"
"""What Megatron takes where --data-path comes without --split; its spaces are hashed."""
_SIZE_FLAGS = tuple(TrainingFlags.__dataclass_fields__)


def request_of_flags(flags: Mapping[str, Any], tokenizer_flags: Mapping[str, Any]) -> CacheRequest:
    """The request that Megatron makes of flags.

    Args:
        flags: by the names of their attributes, words as tuples; all that `megablend megatron-cache` takes.
        tokenizer_flags: what --tokenizer-type is built with.

    Raises: ConfigError where flags are missing or contradict, or name a file that cannot be read.
    """
    blend, blend_per_split = _blends(flags)
    split = flags["split"]
    if split is None and flags["data_path"]:
        split = _LEGACY_SPLIT
    if blend is not None and split is None:
        raise ConfigError("--data-args-path needs --split, such as 969,30,1")
    used = [
        number
        for number, part in enumerate(blend_per_split or () if blend is None or split is None else split_matrix(split))
        if part is not None
    ]
    return CacheRequest(
        path_to_cache=flags["data_cache_path"],
        random_seed=flags["seed"],
        sequence_length=flags["seq_length"],
        tokenizer=_identifiers(flags["tokenizer_identifiers"], tokenizer_flags),
        sizes=TrainingFlags(**{name: flags[name] for name in _SIZE_FLAGS}).sizes(used),
        blend=blend,
        blend_per_split=blend_per_split,
        split=split,
        multiple_validation_sets=flags["multiple_validation_sets"],
        full_validation=flags["full_validation"],
        mid_level_dataset_surplus=flags["mid_level_dataset_surplus"],
        interleaving=flags["interleaving"],
    )


def _blends(flags: Mapping[str, Any]) -> tuple[Blend | None, tuple[Blend | None, ...] | None]:
    """The blend of all splits, or those of each."""
    split_words = {split: flags[f"{split}_data_path"] for split in SPLITS}
    given = {
        "--data-path": bool(flags["data_path"]),
        "--data-args-path": flags["data_args_path"] is not None,
        "--train-data-path, --valid-data-path, --test-data-path": any(split_words.values()),
        "--per-split-data-args-path": flags["per_split_data_args_path"] is not None,
    }
    if sum(given.values()) != 1:
        found = " and ".join(name for name, is_given in given.items() if is_given) or "none"
        raise ConfigError(f"data: found {found}; expected one of {'; '.join(given)}")
    if flags["data_path"]:
        return blend_from_words(flags["data_path"], place="--data-path"), None
    if path := flags["data_args_path"]:
        return blend_from_words(read_words(path), place=path), None
    if path := flags["per_split_data_args_path"]:
        return None, read_blends(path)
    return None, tuple(
        blend_from_words(words, place=f"--{split}-data-path") if words else None for split, words in split_words.items()
    )


def _identifiers(given: str | None, tokenizer_flags: Mapping[str, Any]) -> dict[str, Any]:
    if (given is None) == (tokenizer_flags["tokenizer_type"] is None):
        raise ConfigError(
            "tokenizer: expected either --tokenizer-identifiers (such as an earlier run's description.txt) or --tokenizer-type "
            "and its flags, the same as in training: Megatron names its cache by the tokenizer"
        )
    return build_identifiers(tokenizer_flags) if given is None else read_identifiers(given)

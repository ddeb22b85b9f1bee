"""Convert the command-line flags of Megatron's training script to a CacheRequest.

Source: megatron.training.utils.get_blend_and_blend_per_split, validate_args and
core_gpt_dataset_config_from_args of Megatron-LM 0.16.1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megablend.errors import ConfigError
from megablend.megatron.request.address import check_pair
from megablend.megatron.request.layout import split_matrix
from megablend.megatron.request.request import SPLITS, Blend, CacheRequest
from megablend.megatron.request.tokenizer import build_identifiers, read_identifiers
from megablend.storage.by_scheme import make_storage
from megablend.storage.location import find_scheme
from megablend.system.limited_json import parse_json

_LEGACY_SPLIT = "969, 30, 1"
"""Megatron's default split if --data-path is given without --split. It is hashed, so its spaces
matter."""
_SIZE_FLAGS = (
    "train_samples",
    "train_iters",
    "global_batch_size",
    "rampup_batch_size",
    "eval_interval",
    "eval_iters",
    "full_validation",
    "valid_samples",
    "test_samples",
)
"""The keyword arguments of `count_samples`, which have the same names as the flags."""


def blend_from_words(words: Sequence[str], *, place: str) -> Blend:
    """Return the blend that is given by the words of a flag: prefixes only, or a weight before each
    prefix.

    Args:
        place: flag or file that contains the words, for error messages.

    Raises: ConfigError if weights and prefixes do not alternate.
    """
    words = [word.strip() for word in words]
    are_numbers = [_is_number(word) for word in words]
    try:
        if not any(are_numbers):
            return Blend(prefixes=tuple(words))
        if are_numbers == [True, False] * (len(words) // 2):
            return Blend(prefixes=tuple(words[1::2]), weights=tuple(map(float, words[::2])))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    wrong = next(
        (i for i, is_number in enumerate(are_numbers) if is_number != (i % 2 == 0)), len(words)
    )
    wrong_word = repr(words[wrong]) if wrong < len(words) else "the end"
    raise ConfigError(
        f"{place}: word {wrong + 1} of {len(words)} is {wrong_word}; expected a weight before each prefix, "
        "as in 0.3 /data/a 0.7 /data/b, or prefixes alone (one that looks like a number needs a path, such as ./30)"
    )


def read_words(path: str) -> list[str]:
    """Read the words of the file of --data-args-path. Raises: ConfigError if the file cannot be
    read."""
    return _read(path).split()


def read_blends(path: str) -> tuple[Blend | None, ...]:
    """Read the blend of each split from a JSON file with the keys train, valid and test
    (--per-split-data-args-path).

    Each blend is a list of words, a string of words, or null. Raises: ConfigError if the file
    cannot be read or is invalid.
    """
    try:
        record = parse_json(_read(path))
    except ValueError as error:
        raise ConfigError(
            f"{path}: invalid JSON ({error}); expected an object with the keys train, valid and test"
        ) from None
    if not isinstance(record, dict) or not set(SPLITS) <= set(record):
        raise ConfigError(
            f"{path}: expected an object with the keys train, valid and test (null for a split without data)"
        )
    return tuple(_blend_of(record[split], place=f"{path}, {split}") for split in SPLITS)


def _blend_of(value: Any, *, place: str) -> Blend | None:
    if value is None:
        return None
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(
        isinstance(word, str | int | float) for word in words
    ):
        raise ConfigError(
            f"{place}: found {value!r}; expected a list of words, a string of words, or null"
        )
    return blend_from_words([str(word) for word in words], place=place)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); check the path and its permissions"
        ) from None


def count_samples(
    used: Collection[int],
    *,
    train_samples: int | None = None,
    train_iters: int | None = None,
    global_batch_size: int | None = None,
    rampup_batch_size: tuple[str, ...] = (),
    eval_interval: int | None = None,
    eval_iters: int = 100,
    full_validation: bool = False,
    valid_samples: int | None = None,
    test_samples: int | None = None,
) -> tuple[int | None, ...]:
    """Return the number of samples that training will request of each split, computed from the
    values of Megatron's flags.

    Ramps of the batch size and training phases are not modelled. If the number of samples depends
    on them, it must be given directly (`train_samples`, `valid_samples`, `test_samples`).

    Args:
        used: numbers of the splits that have data.
        rampup_batch_size: initial batch size, increment, and number of samples of the ramp.

    Returns: the number for train, valid and test: 0 for splits that are not in `used`, None for a
        validation split of one whole epoch.
    Raises: ConfigError if a flag that the size of a used split depends on is missing, or two flags
        contradict.
    Source: megatron.training.training.get_train_valid_test_num_samples, update_train_iters.
    """
    if train_samples and train_iters:
        raise ConfigError(
            "--train-samples and --train-iters are both given, but Megatron takes only one of them; leave one out"
        )
    if full_validation and valid_samples is not None:
        raise ConfigError("--full-validation takes whole epochs; leave out --valid-samples")

    def batch_size(split: str) -> int:
        if not global_batch_size:
            instead = " instead of --train-iters" if split == "train" else ""
            raise ConfigError(
                f"{split}: the number of samples cannot be computed without --global-batch-size; add that flag, or "
                f"--{split}-samples{instead}"
            )
        return global_batch_size

    def num_iterations(split: str) -> int:
        if train_iters:
            return train_iters
        if not train_samples:
            problem = "cannot be computed without --train-iters; add that flag, or"
        elif rampup_batch_size:  # more steps, by Megatron's own rounding of each
            problem = "cannot be computed with --rampup-batch-size;"
        else:
            return train_samples // batch_size(split)
        raise ConfigError(f"{split}: the number of samples {problem} set it with --{split}-samples")

    def train_size() -> int:
        if train_samples:
            return train_samples
        if not train_iters:
            raise ConfigError(
                "train: its size is unknown; give --train-samples, or --train-iters with --global-batch-size"
            )
        return train_iters * batch_size("train")

    def valid_size() -> int | None:
        if full_validation or valid_samples is not None:
            return valid_samples
        if not eval_interval:
            raise ConfigError(
                "valid: the number of samples cannot be computed without --eval-interval; add that flag, or "
                "--valid-samples"
            )
        num_evaluations = num_iterations("valid") // eval_interval + 1
        return num_evaluations * eval_iters * batch_size("valid")

    def test_size() -> int:
        return eval_iters * batch_size("test") if test_samples is None else test_samples

    # Called for used splits only: the flags of others may be missing
    size_of = (train_size, valid_size, test_size)
    return tuple(size_of[split]() if split in used else 0 for split in range(len(SPLITS)))


def request_of_flags(flags: Mapping[str, Any], tokenizer_flags: Mapping[str, Any]) -> CacheRequest:
    """Return the CacheRequest for the flags of Megatron's training script.

    Args:
        flags: the values of all flags of `megablend megatron-cache`, by attribute name, such as
            "data_path". Lists of words are tuples.
        tokenizer_flags: see build_identifiers.

    Raises: ConfigError if flags are missing or contradict one another, or name a file that cannot
        be read; MissingFileError if a size is missing and a local pair does not exist.
    """
    blend, blend_per_split = _blends(flags)
    split = flags["split"]
    if split is None and flags["data_path"]:
        split = _LEGACY_SPLIT
    if blend is not None and split is None:
        raise ConfigError("--data-args-path needs --split, such as 969,30,1")
    parts: Sequence[object] = blend_per_split or ()
    if blend is not None and split is not None:
        parts = split_matrix(split)
    used = [number for number, part in enumerate(parts) if part is not None]
    try:
        sizes = count_samples(used, **{name: flags[name] for name in _SIZE_FLAGS})
    except ConfigError:
        _check_files([blend, *(blend_per_split or ())])
        raise
    return CacheRequest(
        path_to_cache=flags["data_cache_path"],
        random_seed=flags["seed"],
        sequence_length=flags["seq_length"],
        tokenizer=_identifiers(flags["tokenizer_identifiers"], tokenizer_flags),
        sizes=sizes,
        blend=blend,
        blend_per_split=blend_per_split,
        split=split,
        multiple_validation_sets=flags["multiple_validation_sets"],
        full_validation=flags["full_validation"],
        mid_level_dataset_surplus=flags["mid_level_dataset_surplus"],
    )


def _check_files(blends: Sequence[Blend | None]) -> None:
    """Check that the local pairs of blends exist, so that a wrong path is reported before a missing
    flag. Raises: see Storage.stat; ConfigError for an address that is not a pair."""
    storage = make_storage()
    prefixes = [prefix for blend in blends if blend is not None for prefix in blend.prefixes]
    for prefix in prefixes:
        check_pair(prefix)
        for path in (f"{prefix}.bin", f"{prefix}.idx"):
            if not find_scheme(path):
                storage.stat(path)


def _blends(flags: Mapping[str, Any]) -> tuple[Blend | None, tuple[Blend | None, ...] | None]:
    """Return the blend that is divided into all splits, and the separate blends of the splits. One
    of the two is None."""
    split_words = {split: flags[f"{split}_data_path"] for split in SPLITS}
    are_given = {
        "--data-path": bool(flags["data_path"]),
        "--data-args-path": flags["data_args_path"] is not None,
        "--train-data-path, --valid-data-path, --test-data-path": any(split_words.values()),
        "--per-split-data-args-path": flags["per_split_data_args_path"] is not None,
    }
    if sum(are_given.values()) != 1:
        given_flags = (
            " and ".join(name for name, is_given in are_given.items() if is_given) or "none"
        )
        raise ConfigError(
            f"data: found {given_flags}; expected exactly one of {'; '.join(are_given)}"
        )
    if flags["data_path"]:
        return blend_from_words(flags["data_path"], place="--data-path"), None
    if path := flags["data_args_path"]:
        return blend_from_words(read_words(path), place=path), None
    if path := flags["per_split_data_args_path"]:
        return None, read_blends(path)
    return None, tuple(
        blend_from_words(words, place=f"--{split}-data-path") if words else None
        for split, words in split_words.items()
    )


def _identifiers(identifiers: str | None, tokenizer_flags: Mapping[str, Any]) -> dict[str, Any]:
    if (identifiers is None) == (tokenizer_flags["tokenizer_type"] is None):
        raise ConfigError(
            "tokenizer: expected exactly one of --tokenizer-identifiers (such as an earlier run's description.txt) and "
            "--tokenizer-type (with its flags, as in training): the names of cache files depend on it"
        )
    if identifiers is None:
        return build_identifiers(tokenizer_flags)
    return read_identifiers(identifiers)

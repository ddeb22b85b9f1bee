"""Hints for unknown keys: megablend's name for a key of another tool, the nearest spelling, or how
to write a mapping as a list."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from megablend.errors import did_you_mean

_OTHER_NAMES = {
    "weight": (
        "weights",
        "ratio",
        "ratios",
        "prob",
        "probability",
        "probabilities",
        "proportion",
        "proportions",
    ),
    "epochs": ("repeat", "repeats", "upsample", "oversample"),
    "samples": ("train_samples", "num_samples"),
    "tokens": ("num_tokens", "train_tokens", "token_budget", "choose"),
    "on_exhausted": ("stopping_strategy", "exhaustion", "stop_strategy"),
    "sequence_length": (
        "seq_length",
        "seq_len",
        "max_seq_len",
        "max_seq_length",
        "context_length",
        "block_size",
    ),
    "path": ("data", "data_path", "paths", "files", "remote", "local"),
    "sources": ("datasets", "streams", "blend", "mixture"),
    "stages": ("data_stages", "curriculum", "schedule"),
    "lanes": ("num_canonical_nodes",),
    "append_eod": ("eos_token_id", "eod", "eos"),
    "column": ("token_column", "text_column", "field", "key", "feature"),
}
"""Names that Megatron, Streaming, datasets and other tools use for similar settings, by megablend's
key."""
_IN_STEPS = "set the length of the run with `samples`: steps x global batch size"
_OF_ALL_TEXT = "it belongs at the top level, and applies to all text sources"
_SET_ELSEWHERE = {
    "iterations": _IN_STEPS,
    "max_steps": _IN_STEPS,
    "steps": _IN_STEPS,
    "train_iters": _IN_STEPS,
    "batch_size": "batches are not part of the data: pass `micro_batch_size=` to megablend.Loader",
    "micro_batch_size": "batches are not part of the data: pass `micro_batch_size=` to megablend.Loader",
    "global_batch_size": "the training loop sets it (micro batch x data-parallel size x gradient accumulation "
    "steps); remove the key",
    "cycle": "it is the old name of `shuffle_window`; write that instead",
    "tokenizer": "all text sources share the top-level `tokenizer`; to check token ids, set `vocab_size`",
    "token_files": _OF_ALL_TEXT,
    "on_bad_document": _OF_ALL_TEXT,
    "max_bad": _OF_ALL_TEXT,
    "max_document": _OF_ALL_TEXT,
    "shuffle": "runs are always shuffled, unless `order: sequential` is set; `shuffle_window` sets how far blocks are mixed",
    "drop_last": "pass `drop_last=` to megablend.Loader",
    "num_workers": "pass `num_workers=` to megablend.Loader",
}
"""Advice for keys of other tools that megablend sets elsewhere or does not need."""
_MAX_LISTED = 12
"""Maximum number of known keys that a message lists."""


def explain_unknown(key: str, known: Collection[str], keys_of_sources: Sequence[str]) -> str:
    """Return a hint on what to write instead of an unknown key.

    Args:
        known: the valid keys at that place.
        keys_of_sources: the keys that each source may have.
    """
    spelled = key.replace("-", "_")
    meant = next(
        (ours for ours, others in _OTHER_NAMES.items() if spelled in (*others, ours)), None
    )
    if meant in known:
        return f"did you mean {meant!r}?"
    if meant in keys_of_sources:
        return f"each source has its own `{meant}`, below `sources`"
    if spelled in _SET_ELSEWHERE:
        return _SET_ELSEWHERE[spelled]
    # A high cutoff: the nearest of many keys is often a different one, and a wrong hint costs more
    # than none
    if hint := did_you_mean(key, known, cutoff=0.75):
        return hint
    if len(known) > _MAX_LISTED:
        return "docs/configuration.md lists the keys"
    return f"known keys: {', '.join(known)}"


def explain_mapping(keys: Collection[object], keys_of_sources: Collection[str]) -> str:
    """Return a message that shows how to write sources as a list, for sources that were given as a
    mapping (by name, or as a single source).

    Args:
        keys: the keys of the mapping; at least one.
        keys_of_sources: the keys that each source may have.
    """
    first = next(iter(keys))
    shown = ", ".join(repr(key) for key in islice(keys, 3)) + (", ..." if len(keys) > 3 else "")
    entry = f"- {first}: ..." if first in keys_of_sources else f"- name: {first}"
    return f"found {shown}, expected a list of sources; begin each with a dash, as in `{entry}`"

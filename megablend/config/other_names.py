"""Hints for unknown keys: what other tools call a key of ours, the nearest spelling, or the list that should be there."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from itertools import islice

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
    "samples": ("iterations", "steps", "train_iters", "train_samples", "num_samples"),
    "tokens": ("num_tokens", "train_tokens", "token_budget", "choose"),
    "on_exhausted": ("stopping_strategy", "exhaustion", "stop_strategy"),
    "sequence_length": ("seq_length", "seq_len", "max_seq_len", "max_seq_length", "context_length", "block_size"),
    "path": ("data", "data_path", "paths", "files", "remote", "local"),
    "sources": ("datasets", "streams", "blend", "mixture"),
    "stages": ("data_stages", "curriculum", "schedule"),
    "lanes": ("num_canonical_nodes",),
    "append_eod": ("eos_token_id", "eod", "eos"),
}
"""What Megatron, Streaming, datasets, nanotron and others call something like our keys."""


def explain_unknown(key: str, known: Collection[str], keys_of_sources: Sequence[str]) -> str:
    """What to write in place of an unknown key.

    Args:
        known: the keys that may stand there.
        keys_of_sources: the keys that each source may have.
    """
    meant = next((ours for ours, others in _OTHER_NAMES.items() if key in (*others, ours)), None)
    if meant in known:
        return f"did you mean {meant!r}?"
    if meant in keys_of_sources:
        return f"each source has its own `{meant}`"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known ones are {', '.join(known)}"


def explain_mapping(keys: Collection[object], keys_of_sources: Collection[str]) -> str:
    """How to write as a list what was given as a mapping: sources by name, or a single source.

    Args:
        keys: at least one.
        keys_of_sources: the keys that each source may have.
    """
    first, shown = (
        next(iter(keys)),
        ", ".join(repr(key) for key in islice(keys, 3)) + (", ..." if len(keys) > 3 else ""),
    )
    entry = f"- {first}: ..." if first in keys_of_sources else f"- name: {first}"
    return f"found {shown}, expected a list of sources; begin each with a dash, as in `{entry}`"

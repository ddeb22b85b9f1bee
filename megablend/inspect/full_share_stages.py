"""Write the stages that replace `on_exhausted: redistribute` in a config, so that sources keep
their shares until they reach their caps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fractions import Fraction

from megablend.blend.caps import plan_full_shares
from megablend.blend.shares import cap_of
from megablend.config import LENGTHS, Source
from megablend.run.compile import Compiled

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
"""Matches names that YAML writes without quotes."""


def write_full_share_stages(compiled: Compiled) -> str | None:
    """Return the stages as YAML; None if no cap changes a share, or the config sets no length."""
    config = compiled.config
    has_length = any(getattr(config, name) is not None for name in LENGTHS)
    if compiled.weights == compiled.requested or not has_length:
        return None
    length = config.sequence_length
    extra = int(config.add_extra_token_to_sequence)
    caps = [
        cap_of(source, tokens, length, extra)
        for source, tokens in zip(compiled.sources, compiled.data.tokens, strict=True)
    ]
    stages = plan_full_shares(
        compiled.requested, caps, compiled.run.num_samples, multiple_of=config.lanes
    )
    lines = ["stages:"]
    _, weights_before = stages[0]
    for number, (end, weights) in enumerate(stages):
        keys = _list_changes(compiled.sources, weights_before, weights)
        # The last stage ends with the run, unless all sources reach their caps earlier
        if number < len(stages) - 1 or end < compiled.run.num_samples:
            keys.append(f"samples: {end}")
        lines += [f"  {'-' if i == 0 else ' '} {key}" for i, key in enumerate(keys)] or ["  - {}"]
        weights_before = weights
    return "\n".join(lines) + "\n"


def _list_changes(
    sources: Sequence[Source], before: Sequence[Fraction], weights: Sequence[Fraction]
) -> list[str]:
    """Return a list with one line of YAML, the key `sources` of a stage. It gives a share of 0 to
    the sources whose weight becomes 0; the list is empty if there are none."""
    left_out = [
        source for source, old, new in zip(sources, before, weights, strict=True) if old and not new
    ]
    if not left_out:
        return []
    unit = left_out[0].unit or "weight"
    changes = ", ".join(f"{_quote(source.name)}: {{{unit}: 0}}" for source in left_out)
    return [f"sources: {{{changes}}}"]


def _quote(name: str) -> str:
    """Return a name as it is written in YAML."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name)

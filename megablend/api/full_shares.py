"""The stages in which each source keeps its full share until it runs out, as YAML to paste into a config."""

from __future__ import annotations

import json
import re

from megablend.config import LENGTHS
from megablend.plan.caps import plan_full_shares
from megablend.plan.compile import Compiled
from megablend.plan.shares import cap_of

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def write_full_share_stages(compiled: Compiled) -> str | None:
    """The stages that replace `on_exhausted: redistribute`; None where it changes no share, or the config sets no length."""
    config = compiled.config
    has_length = any(getattr(config, name) is not None for name in LENGTHS)
    if compiled.weights == compiled.requested or not has_length:
        return None
    length, extra = config.sequence_length, int(config.add_extra_token_to_sequence)
    caps = [cap_of(source, n, length, extra) for source, n in zip(compiled.sources, compiled.data.tokens, strict=True)]
    stages = plan_full_shares(compiled.requested, caps, compiled.run.num_samples, multiple_of=config.lanes)
    lines, before = ["stages:"], stages[0][1]
    for number, (end, weights) in enumerate(stages):
        gone = [source for source, old, new in zip(compiled.sources, before, weights, strict=True) if old and not new]
        keys = []
        if gone:
            unit = gone[0].unit or "weight"
            keys.append(f"sources: {{{', '.join(f'{_quote(source.name)}: {{{unit}: 0}}' for source in gone)}}}")
        if number < len(stages) - 1 or end < compiled.run.num_samples:
            keys.append(f"samples: {end}")
        lines += [f"  {'-' if i == 0 else ' '} {key}" for i, key in enumerate(keys)] or ["  - {}"]
        before = weights
    return "\n".join(lines) + "\n"


def _quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)

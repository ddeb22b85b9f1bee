"""Numbers of a plan that deserve a second look, by the thresholds of the config's `warnings`."""

from __future__ import annotations

import numpy as np

from megablend.config import Config
from megablend.plan.run import Run
from megablend.plan.shares import samples_in


def find_warnings(run: Run) -> list[str]:
    """Warn of the sources of a split: a line for each kind of problem, naming the worst. An unblended split has none."""
    if not run.weights:
        return []
    limits, config = run.config.warnings, run.config
    length = max(section.config.sequence_length for section in run.sections)
    extra = int(config.add_extra_token_to_sequence)
    samples, read = run.plan.counts(run.num_samples), run.plan.count_tokens(run.num_samples)
    tokens = np.array(run.tokens, dtype=np.int64)
    found = []
    if limits.min_source_samples is not None:
        holds = np.array([samples_in(n, length, extra) for n in run.tokens], dtype=np.int64)
        small = np.flatnonzero((holds < limits.min_source_samples) & (samples > 0))
        if len(small):
            worst = small[tokens[small].argmin()]
            found.append(
                f"{run.split}: {_count(len(small))} fewer than {limits.min_source_samples:,} samples of {length:,} tokens; the "
                f"smallest is {run.sources[worst].name!r} with {tokens[worst]:,} tokens (warnings.min_source_samples)"
            )
    if limits.max_epochs is not None:
        capped = np.array([source.max_epochs is not None for source in run.sources])  # chosen deliberately
        epochs = np.where(capped | (samples == 0), 0.0, (read.astype(float) + extra) / np.maximum(1, tokens))
        often = np.flatnonzero(epochs > float(limits.max_epochs))
        if len(often):
            worst = often[epochs[often].argmax()]
            found.append(
                f"{run.split}: {_count(len(often), 'is', 'are')} read more than {float(limits.max_epochs):g} times; most often "
                f"{run.sources[worst].name!r}, {epochs[worst]:,.1f} times ({tokens[worst]:,} tokens, {samples[worst]:,} samples) "
                "(warnings.max_epochs; a source's own max_epochs overrides it)"
            )
    return found


def warn_of_amplification(config: Config, amplification: float) -> list[str]:
    """A line if read amplification is above its threshold."""
    limit = config.warnings.max_read_amplification
    if limit is None or amplification <= limit:
        return []
    return [
        f"loaders read {amplification:.1f} times the bytes that they use, more than {float(limit):g} times "
        "(warnings.max_read_amplification)"
    ]


def _count(n: int, one: str = "holds", several: str = "hold") -> str:
    return f"1 source {one}" if n == 1 else f"{n:,} sources {several}"

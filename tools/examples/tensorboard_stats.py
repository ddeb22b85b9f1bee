"""What a loader reports of itself, in TensorBoard: python tools/examples/tensorboard_stats.py CONFIG --logdir runs/demo.

A training loop takes the two lines of `log_stats` into its own reporting, every few hundred steps.
"""

from __future__ import annotations

import argparse
from typing import Any

import megablend


def log_stats(writer: Any, loader: megablend.Loader) -> None:
    """Write a loader's stats at its position: `writer` is a torch.utils.tensorboard.SummaryWriter."""
    stats = loader.stats()
    step = stats["consumed_samples"]
    for source in stats["sources"]:
        for name in ("samples", "tokens", "epochs", "share"):
            writer.add_scalar(f"{name}/{source['name']}", source[name], step)
    writer.add_scalar("loader/waiting_seconds", stats["waiting_seconds"], step)
    for name, value in (stats["reads"] or {}).items():
        writer.add_scalar(f"loader/{name}", value, step)


def main() -> None:
    """Read some batches of a config's run, and log what the loader reports."""
    from torch.utils.tensorboard import SummaryWriter

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--logdir", default="runs/megablend")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    asked = parser.parse_args()
    loader = megablend.Loader(megablend.open(asked.config), micro_batch_size=asked.micro_batch)
    with SummaryWriter(asked.logdir) as writer:
        for number, _ in zip(range(1, asked.batches + 1), loader, strict=False):
            if number % asked.every == 0:
                log_stats(writer, loader)
    loader.close()


if __name__ == "__main__":
    main()

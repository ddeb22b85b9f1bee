"""Train a tiny language model from a blend, stop, resume in a new process, and compare the batches.

    python tools/train_demo.py demo/demo.yaml demo/run train --steps 40
    python tools/train_demo.py demo/demo.yaml demo/run resume --steps 20
    python tools/train_demo.py demo/demo.yaml demo/run compare

`train` and `resume` leave a checkpoint (model, optimiser, the loader's state) and the digest of every batch they saw.
`compare` reads the same batches without a stop, and fails where one differs, or where the loss has not gone down.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tiny_model import TinyModel
from torch import Tensor

import megablend

MICRO_BATCH_SIZE = 8
NUM_WORKERS = {"train": 1, "resume": 2, "compare": 0}
"""Loader processes: different ones, for the batches do not depend on them."""
CHECKPOINT = "checkpoint.pt"
LOG = "batches.jsonl"


def digest(batch: dict[str, Tensor]) -> str:
    """Hex digest of a batch's tokens."""
    return hashlib.blake2b(batch["tokens"].numpy().tobytes(), digest_size=8).hexdigest()


def open_loader(config: Path, command: str) -> megablend.Loader:
    """Batches of the train split, from its beginning."""
    dataset = megablend.open(str(config), split="train")
    return megablend.Loader(
        dataset, micro_batch_size=MICRO_BATCH_SIZE, num_workers=NUM_WORKERS[command]
    )


def train(config: Path, folder: Path, steps: int, *, resume: bool) -> None:
    """Train for some steps, from the beginning or from the checkpoint; leave checkpoint and log in `folder`."""
    torch.manual_seed(0)
    loader = open_loader(config, "resume" if resume else "train")
    model = TinyModel(len(loader.dataset[0]["tokens"]))
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = 0
    if resume:
        checkpoint: dict[str, Any] = torch.load(folder / CHECKPOINT, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimiser.load_state_dict(checkpoint["optimiser"])
        loader.load_state_dict(checkpoint["loader"])
        first = checkpoint["steps"]
        print(f"resumed after step {first}: {json.dumps(checkpoint['loader'])}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("a" if resume else "w", encoding="utf-8") as log:
        for step, batch in enumerate(islice(loader, steps), first + 1):
            loss = model(batch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            log.write(
                json.dumps({"step": step, "loss": loss.item(), "batch": digest(batch)}) + "\n"
            )
            if step % 5 == 0 or step == first + 1:
                print(f"step {step:3d}  loss {loss.item():.3f}  batch {digest(batch)}", flush=True)
    state = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "loader": loader.state_dict(),
    }
    torch.save({**state, "steps": first + steps}, folder / CHECKPOINT)
    print(
        f"stopped after step {first + steps}; the loader's state takes {len(json.dumps(state['loader']))} bytes"
    )


def compare(config: Path, folder: Path) -> bool:
    """Whether an uninterrupted reader sees the batches of the log, and the log's loss went down."""
    log = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    uninterrupted = [digest(batch) for batch in islice(open_loader(config, "compare"), len(log))]
    print("step  stopped and resumed  never stopped")
    for entry, found in list(zip(log, uninterrupted, strict=True))[::5]:
        print(f"{entry['step']:4d}  {entry['batch']}     {found}")
    same = [entry["batch"] for entry in log] == uninterrupted
    before, after = (fmean(entry["loss"] for entry in part) for part in (log[:5], log[-5:]))
    print(
        f"same batches: {'yes' if same else 'no'} ({len(log)} batches of {MICRO_BATCH_SIZE} samples)"
    )
    print(
        f"loss went down: {'yes' if after < before else 'no'} (first 5 steps {before:.3f}, last 5 {after:.3f})"
    )
    return same and after < before


def main() -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        description="Train a tiny model from a blend; stop, resume, compare."
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path, help="where checkpoint and log are kept")
    parser.add_argument("command", choices=list(NUM_WORKERS))
    parser.add_argument(
        "--steps", type=int, default=40, help="steps to train (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.command == "compare":
        return 0 if compare(options.config, options.folder) else 1
    train(options.config, options.folder, options.steps, resume=options.command == "resume")
    return 0


if __name__ == "__main__":
    sys.exit(main())

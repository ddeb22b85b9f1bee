"""Train a tiny sharded language model on several ranks, and resume on another number of them: the data's state is saved beside
the model's by torch.distributed.checkpoint, while training goes on.

    torchrun --nproc-per-node 2 tools/train_ranks.py demo/demo.yaml demo/ranks --steps 8
    torchrun --nproc-per-node 3 tools/train_ranks.py demo/demo.yaml demo/ranks --steps 12

Each start goes on from the newest complete checkpoint in the folder. Each rank leaves a line for each step in
steps-RANK-of-RANKS.jsonl: the loss, and a digest of each of its samples.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from concurrent.futures import Future
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_model import TinyModel
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

import megablend

STEP_SAMPLES = 12
"""Over all ranks: the same for any number of them, since the order of samples does not depend on it."""
SAVE_EVERY = 5
WAIT_SECONDS = 60


def digest_samples(batch: dict[str, Tensor]) -> list[str]:
    """Hex digest of all fields of each sample of a batch."""
    fields = [batch[name].numpy() for name in sorted(batch)]
    return [
        hashlib.blake2b(b"".join(field[i].tobytes() for field in fields), digest_size=8).hexdigest()
        for i in range(len(fields[0]))
    ]


def find_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is complete: its metadata are written last."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(complete, key=lambda path: int(path.name.partition("-")[2]), default=None)


def train(config: Path, folder: Path, steps: int) -> None:
    """Train until so many steps are done since the run's start, in one of the processes of a job."""
    ranks = dist.get_world_size()
    loader = megablend.Loader(
        megablend.open(config, split="train"),
        micro_batch_size=STEP_SAMPLES // ranks,
        data_parallel_group=dist.group.WORLD,
    )
    torch.manual_seed(0)
    model = TinyModel(len(loader.dataset[0]["tokens"]))
    fully_shard(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def get_state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimiser)
        # As a text the data's state is one value: it can be read before there is a Loader, for
        # megablend.open(state=...), and may be of other stages than the run has now
        return {"model": weights, "optimiser": moments, "data": json.dumps(loader.state_dict())}

    checkpoint = find_checkpoint(folder)
    if checkpoint is not None:
        state = get_state()
        load(state, checkpoint_id=checkpoint)
        set_state_dict(
            model,
            optimiser,
            model_state_dict=state["model"],
            optim_state_dict=state["optimiser"],
        )
        loader.load_state_dict(json.loads(state["data"]))
    first = loader.consumed_samples // STEP_SAMPLES
    # The thread that saves talks to the others' while the model does: never in one group
    saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))
    saved: Any = Future()
    saved.set_result(None)
    with (folder / f"steps-{dist.get_rank()}-of-{ranks}.jsonl").open("w", encoding="utf-8") as log:
        for step, batch in enumerate(islice(loader, steps - first), first + 1):
            loss = model(batch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            entry = {"step": step, "loss": loss.item(), "samples": digest_samples(batch)}
            log.write(json.dumps(entry) + "\n")
            if step % SAVE_EVERY == 0:
                saved.result(WAIT_SECONDS)  # one at a time
                saved = async_save(
                    get_state(), checkpoint_id=folder / f"step-{step}", process_group=saving
                )
    saved.result(WAIT_SECONDS)


def main() -> None:
    """The command line, which torchrun starts on each rank."""
    parser = argparse.ArgumentParser(
        description="Train a tiny model on some ranks; resume on others."
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path, help="where checkpoints and logs are kept")
    parser.add_argument(
        "--steps", type=int, default=8, help="since the run's start (default: %(default)s)"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_SECONDS))
    try:
        train(options.config, options.folder, options.steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Perplexity of a tiny model that was trained on samples in a given order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from strategies import Int64s
from tiny_model import TinyModel, evaluate

WIDTH = 64
LAYERS = 2
HEADS = 4
PEAK_RATE = 2e-3
WARM_UP = 0.05


def learning_rate(step: int, steps: int) -> float:
    """As a share of the peak: up in a line, down to nothing in half a cosine."""
    warm = max(1, int(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def train(
    tokens: npt.NDArray[np.int32],
    places: Int64s,
    validation: npt.NDArray[np.int64],
    *,
    batch: int,
    vocab_size: int,
    seed: int,
) -> float:
    """Train for one pass and give the validation perplexity.

    Args:
        tokens: int32 [num_tokens].
        places: int64 [num_samples, sequence_length + 1], in the order of training.
        validation: int64 [num_sequences, sequence_length + 1].
        seed: of the model's first weights.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = TinyModel(
        places.shape[1] - 1, vocab_size=vocab_size, width=WIDTH, heads=HEADS, layers=LAYERS
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    steps = len(places) // batch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate(step, steps))
    position_ids = torch.arange(places.shape[1] - 1).expand(batch, -1)
    for step in range(steps):
        samples = torch.from_numpy(
            tokens[places[step * batch : (step + 1) * batch]].astype(np.int64)
        )
        optimiser.zero_grad()
        loss: Any = model.losses(samples[:, :-1], position_ids, samples[:, 1:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return math.exp(evaluate(model, torch.from_numpy(validation), 64))

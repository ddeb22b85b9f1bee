"""A decoder small enough to be trained on a CPU in a minute or two: what the demo and the benchmarks train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention and a two-layer network, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width = width
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, self.width // self.heads))
        # Each [batch, heads, sequence, width / heads]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        transformed: Tensor = x + self.network(self.norms[1](x))
        return transformed


class TinyModel(nn.Module):
    """A decoder with one matrix for tokens in and out."""

    def __init__(
        self,
        sequence_length: int,
        *,
        vocab_size: int = 16_384,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def losses(self, tokens: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy in nats: all [batch, sequence], of int64, int64, int64 -> float32."""
        x = self.tokens(tokens) + self.positions(position_ids)
        logits = functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of a batch of GPTDataset's dicts, over the tokens that its mask lets count."""
        losses = self.losses(batch["tokens"], batch["position_ids"], batch["labels"])
        return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def evaluate(model: TinyModel, sequences: Tensor, batch_size: int) -> float:
    """Mean loss in nats a token over sequences int64 [n, sequence_length + 1]."""
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(sequences), batch_size):
            part = sequences[start : start + batch_size]
            position_ids = torch.arange(part.shape[1] - 1).expand(len(part), -1)
            total += model.losses(part[:, :-1], position_ids, part[:, 1:]).sum().item()
    return total / (sequences.shape[0] * (sequences.shape[1] - 1))

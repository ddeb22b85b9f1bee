"""A pretraining loop with megatron-core's GPT model: the same losses whoever built the datasets, also after a resume."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader

from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset
from tests.megatron.plugin_data import draw_documents, plugin_config, write_word
from tests.megatron.reference import config_of

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.filterwarnings("ignore:The pad token id:UserWarning"),
]
EOD = 0
VOCABULARY = 64
LENGTH = 16
MICRO_BATCH = 2
DATA_PARALLEL = 3
STEPS = 8
RESUME = 5


class HostBuffer:
    """Scratch tensors where there is no GPU; megatron-core's own takes them from the current CUDA device."""

    def get_tensor(
        self, shape: Any, dtype: torch.dtype, name: str, mem_alloc_context: Any = None
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


@pytest.fixture
def on_cpu(distributed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Model parallelism of one process, without a GPU's scratch memory and random states (there is no dropout)."""
    parallel_state.initialize_model_parallel(1, 1)
    parallel_random.initialize_rng_tracker()
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", HostBuffer())
    monkeypatch.setattr(
        parallel_random._CUDA_RNG_STATE_TRACKER, "fork", lambda name=None: contextlib.nullcontext()
    )
    yield
    monkeypatch.undo()
    parallel_state.destroy_model_parallel()


class Training:
    """A model, its optimizer, and what it has consumed."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        spec = get_gpt_layer_local_spec()
        self.model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.consumed_samples = 0

    def steps(self, dataset: Any, num_steps: int) -> list[float]:
        """Losses of micro steps over all data-parallel ranks, in the order of Megatron's pretraining sampler."""
        step = MICRO_BATCH * DATA_PARALLEL
        starts = range(self.consumed_samples, self.consumed_samples + num_steps * step, step)
        batches = [
            [*range(start + r, start + r + MICRO_BATCH)]
            for start in starts
            for r in range(0, step, MICRO_BATCH)
        ]
        losses = []
        for batch in DataLoader(dataset, batch_sampler=batches):
            mask = batch["attention_mask"]
            output = self.model(
                batch["tokens"], batch["position_ids"], mask, labels=batch["labels"]
            )
            loss = (output * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        self.consumed_samples += num_steps * step
        return losses

    def save(self) -> bytes:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "consumed": self.consumed_samples,
        }
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        state = torch.load(io.BytesIO(checkpoint), weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.consumed_samples = state["consumed"]


@pytest.mark.usefixtures("on_cpu")
def test_losses_are_the_same(tmp_path: Path) -> None:
    documents = [
        [[token % VOCABULARY for token in each] for each in draw_documents(seed, 60)]
        for seed in range(3)
    ]
    flags = {
        "eod_mask_loss": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "create_attention_mask": True,
    }
    weights = [0.5, 0.2, 0.3]
    sizes = [MICRO_BATCH * DATA_PARALLEL * STEPS, 0, 0]

    def words(kind: str) -> list[str]:
        return [
            write_word(tmp_path / kind / str(i), kind, each, EOD)
            for i, each in enumerate(documents)
        ]

    def dataset(builder: type[Any], cls: type[Any], make: Any, kind: str, cache: str) -> Any:
        config = make(
            tmp_path / cache,
            blend=(words(kind), weights),
            split="1",
            sequence_length=LENGTH,
            **flags,
        )
        return builder(cls, sizes, lambda: True, config).build()[0]

    expected = Training().steps(
        dataset(BlendedMegatronDatasetBuilder, GPTDataset, config_of, "megatron", "theirs"), STEPS
    )
    assert len(set(expected)) == STEPS * DATA_PARALLEL
    for cls, make, kind in (
        (GPTDataset, config_of, "megatron"),
        (MegablendGPTDataset, plugin_config, "megatron"),
        (MegablendGPTDataset, plugin_config, "parquet"),
    ):
        first = Training()
        losses = first.steps(
            dataset(MegablendDatasetBuilder, cls, make, kind, f"{cls.__name__}-{kind}"), RESUME
        )
        resumed = Training()
        resumed.load(first.save())
        again = dataset(MegablendDatasetBuilder, cls, make, kind, f"{cls.__name__}-{kind}")
        assert losses + resumed.steps(again, STEPS - RESUME) == expected

"""A Loader under Lightning: it trains on the whole run, validates in full passes, and goes on where a state was saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import megablend
from tests.reader.test_lengths_of_loaders import BATCH, BATCHES, config, make_loader

lightning: Any = pytest.importorskip("lightning.pytorch")
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
__all__ = ["config"]  # the fixture


class Model(lightning.LightningModule):  # type: ignore[misc]
    """Records the samples that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.trained += batch["tokens"].tolist()
        return (self.weight * batch["tokens"].float().mean()) ** 2

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.validated += batch["tokens"].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def fit(
    train: megablend.Loader,
    valid: megablend.Loader | None,
    folder: Path,
    *,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> tuple[Model, Any]:
    model = Model()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        chosen = {"max_epochs": 1, "num_sanity_val_steps": 0} | settings
        trainer = lightning.Trainer(accelerator="cpu", default_root_dir=folder, **(quiet | chosen))
        trainer.fit(model, train, valid, ckpt_path=ckpt_path)
    return model, trainer


def test_it_trains_on_the_run_and_validates_in_full_passes(
    config: dict[str, Any], tmp_path: Path
) -> None:
    train = megablend.open(config)
    valid = megablend.open(config, "valid")
    loader = make_loader(config, "valid")
    model, trainer = fit(make_loader(config), loader, tmp_path, val_check_interval=BATCHES // 2)
    assert model.trained == [train[k]["tokens"].tolist() for k in range(len(train))]
    one_pass = [
        valid[k]["tokens"].tolist() for k in range(loader.batches_total * loader.batch_size)
    ]
    assert model.validated == one_pass * 2
    assert trainer.num_training_batches == BATCHES


def test_it_goes_on_where_a_state_was_saved(config: dict[str, Any], tmp_path: Path) -> None:
    train = megablend.open(config)
    loader = make_loader(config)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 5 * loader.batch_size})
    model, trainer = fit(loader, None, tmp_path)
    assert model.trained == [
        train[k]["tokens"].tolist() for k in range(5 * loader.batch_size, len(train))
    ]
    assert trainer.num_training_batches == len(train) // loader.batch_size - 5


@pytest.mark.parametrize("micro_batch_size", [BATCH, BATCH // 2])
@pytest.mark.parametrize("steps", [5, BATCHES - 3, BATCHES])
def test_it_goes_on_from_a_checkpoint_of_lightning(
    config: dict[str, Any], tmp_path: Path, steps: int, micro_batch_size: int
) -> None:
    """Lightning loads the Loader's state, too, and goes on counting: the length has the batches that it has counted before."""
    saves = lightning.callbacks.ModelCheckpoint(
        dirpath=tmp_path, filename="saved", every_n_train_steps=steps
    )
    fit(
        make_loader(config),
        None,
        tmp_path,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[saves],
    )
    train = megablend.open(config)
    loader = megablend.Loader(
        train, micro_batch_size=micro_batch_size, data_parallel_rank=0, data_parallel_size=1
    )
    model, trainer = fit(loader, None, tmp_path, ckpt_path=tmp_path / "saved.ckpt")
    assert model.trained == [train[k]["tokens"].tolist() for k in range(steps * BATCH, len(train))]
    rest = (BATCHES - steps) * BATCH // micro_batch_size
    assert trainer.global_step == steps + rest
    assert loader.consumed_samples == len(train)

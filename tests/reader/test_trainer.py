"""A Loader under Hugging Face's Trainer: trained to the end, stopped and resumed in both documented ways."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import megablend
from tests.runs import documents, make_config, write_source

transformers: Any = pytest.importorskip("transformers")
STEPS = 8
BATCH = 4


class Model(torch.nn.Module):
    """Records the tokens that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.seen: list[list[int]] = []

    def forward(self, tokens: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        self.seen += tokens.tolist()
        return {"loss": (self.weight * tokens.float().mean()) ** 2}


class OwnLoader(transformers.Trainer):  # type: ignore[misc]
    """As docs/resume.md says: `get_train_dataloader` returns a Loader."""

    def __init__(self, loader: megablend.Loader, folder: Path, **arguments: Any) -> None:
        settings = {
            "save_steps": 3,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "max_steps": STEPS,
        }
        given = transformers.TrainingArguments(
            str(folder), save_strategy="steps", **settings | arguments
        )
        super().__init__(Model(), given)
        self.loader = loader

    def get_train_dataloader(self) -> megablend.Loader:
        return self.loader

    def seen(self, **arguments: Any) -> list[list[int]]:
        """Train; the samples that the model was given."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the installed version's own
            self.train(**arguments)
        found: list[list[int]] = self.model.seen
        return found


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path, 0, "parquet", documents(0, 60, 40, 3)) | {"weight": 1}
    given = make_config(tmp_path, [source], samples=STEPS * BATCH)
    megablend.build(given)
    return given


def make_loader(config: dict[str, Any], **arguments: Any) -> megablend.Loader:
    return megablend.Loader(
        megablend.open(config),
        micro_batch_size=BATCH,
        data_parallel_rank=0,
        data_parallel_size=1,
        **arguments,
    )


def test_trainer_trains_on_the_run_and_resumes_in_both_ways(
    config: dict[str, Any], tmp_path: Path
) -> None:
    dataset = megablend.open(config)
    expected = [dataset[k]["tokens"].tolist() for k in range(len(dataset))]
    whole = OwnLoader(make_loader(config), tmp_path / "a")
    assert whole.seen() == expected
    checkpoint = str(tmp_path / "a" / "checkpoint-6")
    skipped = OwnLoader(make_loader(config), tmp_path / "b").seen(resume_from_checkpoint=checkpoint)
    assert skipped == expected[6 * BATCH :]  # Trainer skips batches
    loader = make_loader(config)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 6 * BATCH})
    loaded = OwnLoader(loader, tmp_path / "c", ignore_data_skip=True).seen(
        resume_from_checkpoint=checkpoint
    )
    assert loaded == expected[6 * BATCH :]


def test_a_state_after_trainer_has_skipped_names_what_to_do(
    config: dict[str, Any], tmp_path: Path
) -> None:
    OwnLoader(make_loader(config), tmp_path / "a").seen()
    checkpoint = str(tmp_path / "a" / "checkpoint-6")
    loader = make_loader(config, num_workers=2)
    OwnLoader(loader, tmp_path / "b").seen(resume_from_checkpoint=checkpoint)
    says = r"another DataLoader with workers took .*with Trainer: ignore_data_skip=True\), or use num_workers=0"
    with pytest.raises(megablend.StateError, match=says):
        loader.state_dict()
    alone = make_loader(config)
    OwnLoader(alone, tmp_path / "c").seen(resume_from_checkpoint=checkpoint)
    assert alone.state_dict()["consumed_samples"] == STEPS * BATCH  # "use num_workers=0"


def test_a_trainer_that_shuffles_again_is_told(config: dict[str, Any], tmp_path: Path) -> None:
    """Trainer's own sampler shuffles; with a Loader nothing does."""
    settings = {
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "max_steps": 1,
        "save_strategy": "no",
    }
    dataset = megablend.open(config)
    trainer = transformers.Trainer(
        Model(),
        transformers.TrainingArguments(str(tmp_path / "a"), **settings),
        train_dataset=dataset,
    )
    with pytest.warns(RuntimeWarning, match="shuffles a megablend dataset"):
        next(iter(trainer.get_train_dataloader()))


def test_a_trainer_goes_on_from_the_loaders_own_state_by_the_batches_of_the_run(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """With the length of the run given, as docs/resume.md says; `len` of a Loader is what is left."""
    dataset = megablend.open(config)
    expected = [dataset[k]["tokens"].tolist() for k in range(len(dataset))]
    OwnLoader(make_loader(config), tmp_path / "a", max_steps=STEPS).seen()
    loader = make_loader(config)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 6 * BATCH})
    assert (len(loader), loader.batches_total) == (STEPS - 6, STEPS)
    arguments = {"ignore_data_skip": True, "max_steps": loader.batches_total}
    checkpoint = str(tmp_path / "a" / "checkpoint-6")
    assert (
        OwnLoader(loader, tmp_path / "b", **arguments).seen(resume_from_checkpoint=checkpoint)
        == expected[6 * BATCH :]
    )


def test_accelerate_keeps_the_length_of_an_iteration(config: dict[str, Any]) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    loader = make_loader(config)
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    assert len(prepared) == STEPS
    assert sum(1 for _ in prepared) == STEPS
    skipped = accelerate.skip_first_batches(make_loader(config), 3)
    assert len(skipped) == STEPS - 3
    assert sum(1 for _ in skipped) == STEPS - 3

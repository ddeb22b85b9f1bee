"""The demo's training, on a small corpus: batches after a stop are those of a run that never stopped."""

import json
import os
import runpy
from pathlib import Path

import make_corpus
import pytest
import train_demo

import megablend
from tests.tools.test_make_corpus import FEW_ROOTS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the demo script leaves it before training, with less of everything."""
    folder = tmp_path_factory.mktemp("demo")
    make_corpus.make_corpus(
        folder / "data", num_tokens=100_000, vocab_size=2000, seed=0, folders=FEW_ROOTS
    )
    config = (
        (ROOT / "configs" / "demo.yaml")
        .read_text(encoding="utf-8")
        .replace("samples: 40000", "samples: 200")
    )
    config = config.replace("sequence_length: 512", "sequence_length: 64")
    (folder / "demo.yaml").write_text(config, encoding="utf-8")
    megablend.build(folder / "demo.yaml")
    return folder


def test_stopped_and_resumed_sees_the_batches_of_an_uninterrupted_run(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_demo.train(demo / "demo.yaml", tmp_path, 2, resume=False)
    train_demo.train(demo / "demo.yaml", tmp_path, 1, resume=True)
    train_demo.compare(demo / "demo.yaml", tmp_path)
    shown = capsys.readouterr().out
    assert "resumed after step 2" in shown
    assert "same batches: yes (3 batches of 8 samples)" in shown


def test_another_batch_than_the_logs_is_a_failure(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        {"step": 1, "loss": 2.0, "batch": "0" * 16},
        {"step": 2, "loss": 1.0, "batch": "1" * 16},
    ]
    (tmp_path / train_demo.LOG).write_text(
        "".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8"
    )
    assert not train_demo.compare(demo / "demo.yaml", tmp_path)
    assert "same batches: no" in capsys.readouterr().out


def test_the_readmes_python_runs(
    demo: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .split("```python\n", 1)[1]
        .split("```", 1)[0]
    )
    (tmp_path / "readme.py").write_text(
        code.replace("config.yaml", str(demo / "demo.yaml")), encoding="utf-8"
    )
    runpy.run_path(os.fspath(tmp_path / "readme.py"))
    assert capsys.readouterr().out.count("torch.Size([8, 64])") == 3

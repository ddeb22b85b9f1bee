"""From a folder of JSON Lines and a tokenizer to a training step, as the quickstart says."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import run_process
from tests.preloaded import python
from tests.text.tokenizers_of_kinds import corpus, write_tokenizer

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_three_commands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    section = page.partition("### From text\n")[2].partition("\n## ")[0]
    config, script, commands = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    assert commands.splitlines() == [
        'pip install ".[text]"',
        "megablend build text.yaml",
        "python train.py",
    ]
    for place in ("/shared/cache", "/models/gpt2", "/data/web"):
        assert place in config
        config = config.replace(place, f"{tmp_path}{place}")
    (tmp_path / "text.yaml").write_text(config)
    # The example's vocabulary is GPT-2's, of which a step takes gigabytes
    (tmp_path / "train.py").write_text(script.replace("50304", "2000").replace("=8", "=2"))
    write_tokenizer(tmp_path / "models/gpt2", "gpt2")
    data = tmp_path / "data/web"
    data.mkdir(parents=True)
    lines = [json.dumps({"text": text}) for text in corpus()[:200]]
    (data / "a.jsonl").write_text("\n".join(lines))
    built = run_process("build", "text.yaml", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    assert "run 'default' is new: 100,000 samples" in built.stdout
    trained = subprocess.run(
        [*python("torch"), "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert trained.returncode == 0, trained.stderr
    assert re.fullmatch(r"loss [0-9.]+\n", trained.stdout)

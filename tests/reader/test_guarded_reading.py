"""Samples are gathered from memory that is held: whoever reads a block that was let go crashes, or finds other tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import megablend
from tests.runs import documents, make_config, write_source

SCRIPT = """
import json, sys
from tests.formats.guarded import guard
guard()
import megablend
config = json.loads(sys.argv[1])
dataset = megablend.open(config)
for k, batch in enumerate(megablend.Loader(megablend.open(config), micro_batch_size=1)):
    assert batch["tokens"][0].tolist() == dataset[k]["tokens"].tolist()
print(k + 1)
"""


def test_blocks_are_held_while_they_are_read(tmp_path: Path) -> None:
    kinds = ["parquet", "parquet-v2-unindexed", "arrow", "megatron"]
    sources = [
        write_source(tmp_path, d, kind, documents(d, 150, 30, seed=4)) | {"weight": 1}
        for d, kind in enumerate(kinds)
    ]
    config = make_config(
        tmp_path, sources, samples=1000, memory=100_000, inter_document_masking=True
    )
    megablend.build(config)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SCRIPT, json.dumps(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr

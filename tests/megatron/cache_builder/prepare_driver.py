"""Calls prepare on every rank of a launcher, as a script would. Argument: a JSON file of

prefixes, sizes   of the datasets
cache             with {node} in it, a folder for each two ranks
meet              whether torch.distributed is initialised
victim            this rank kills itself when it has built an artefact
limit             bytes that no file may grow beyond, on the ranks of a folder
limited           number of that folder; on all ranks where it is not given
patient           seconds that ranks of the other folders take for each artefact, unless they are stopped
out               folder that each rank leaves <rank>.json in: what it built, what was missing, or its error
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megablend.distributed.launch import detect
from megablend.megatron import prepare
from megablend.megatron.cache_builder.artefacts import Artefact
from megablend.megatron.cache_builder.commit import Commits


def config_of(spec: dict[str, Any], cache: str) -> Any:
    return SimpleNamespace(
        random_seed=7,
        sequence_length=16,
        blend=(spec["prefixes"], [float(i + 1) for i in range(len(spec["prefixes"]))]),
        blend_per_split=None,
        split="8,1,1",
        path_to_cache=cache,
        tokenizer=SimpleNamespace(unique_identifiers={"class": "T"}),
        mock=False,
        mid_level_dataset_surplus=0.05,
        drop_last_partial_validation_sequence=True,
        add_extra_token_to_sequence=True,
    )


def watch(built: list[str], victim: bool, patient: float) -> None:
    """Note what is built; a victim ends with its first artefact."""
    add = Commits.add

    def noted(commits: Commits, *artefacts: Artefact) -> None:
        commits.stop.wait(patient)
        add(commits, *artefacts)
        commits.finish()  # at once, as a large one is
        built.extend(each.base for each in artefacts)
        if victim:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Commits, "add", noted)  # noqa: B010


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))
    built = list[str]()
    node = rank // 2
    limited = spec.get("limited") in (None, node)
    if spec.get("meet"):
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    if spec.get("limit") and limited:
        detect()  # MPI makes larger files of its own
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec["limit"], resource.RLIM_INFINITY))
    watch(built, rank == spec.get("victim"), 0 if limited else spec.get("patient", 0))
    found: dict[str, Any] = {"built": built, "error": None}
    start = time.monotonic()
    try:
        found["missing"] = len(
            prepare(config_of(spec, spec["cache"].format(node=node)), spec["sizes"]).missing
        )
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - start
    Path(spec["out"], f"{rank}.json").write_text(json.dumps(found))
    if spec.get("meet") and found["error"] is None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

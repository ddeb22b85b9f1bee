"""Opens datasets through the plugin on every rank of a launcher, as a training script does. Argument: a JSON file of

class, order, blend, split, sizes     of the datasets
cache      with {rank} in it, a folder for each rank
launcher   torchrun or mpirun
seeds      of some ranks
holders    ranks that hold datasets; all where absent
victim     this rank kills itself when it has built an artefact
out        folder that each rank leaves <rank>.json in: what it built, what its samples are, or its error
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

warnings.simplefilter("ignore")

from megatron.core.datasets.gpt_dataset import GPTDataset  # noqa: E402

from megablend.megatron.cache_builder.artefacts import Artefact  # noqa: E402
from megablend.megatron.cache_builder.commit import Commits  # noqa: E402
from megablend.megatron.plugin.builder import MegablendDatasetBuilder  # noqa: E402
from megablend.megatron.plugin.dataset import MegablendGPTDataset  # noqa: E402
from tests.megatron.plugin_data import plugin_config  # noqa: E402


class OtherDataset(GPTDataset):  # type: ignore[misc]
    """A class of the user's own, which Megatron's builder builds."""


def digest(datasets: list[Any]) -> list[str | None]:
    """Of all samples of each split."""
    found: list[str | None] = []
    for dataset in datasets:
        if dataset is None:
            found.append(None)
            continue
        whole = hashlib.md5(usedforsecurity=False)
        for k in range(len(dataset)):
            for name, value in sorted(dataset[k].items()):
                whole.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
        found.append(whole.hexdigest())
    return found


def rank_of(launcher: str) -> int:
    if launcher == "torchrun":
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        return torch.distributed.get_rank()
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


def watch(built: list[str], victim: bool) -> None:
    """Note what is built; a victim ends with its first artefact."""
    add = Commits.add

    def noted(commits: Commits, *artefacts: Artefact) -> None:
        add(commits, *artefacts)
        commits.finish()  # at once, as a large one is
        built.extend(each.base for each in artefacts)
        if victim:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Commits, "add", noted)  # noqa: B010


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = rank_of(spec["launcher"])
    built = list[str]()
    watch(built, rank == spec.get("victim"))
    classes = {cls.__name__: cls for cls in (GPTDataset, MegablendGPTDataset, OtherDataset)}
    cls = classes[spec["class"]]
    holders = spec.get("holders")
    config = plugin_config(
        Path(spec["cache"].format(rank=rank)),
        blend=tuple(spec["blend"]),
        split=spec["split"],
        order=spec.get("order", "megatron"),
        shared_fs=spec.get("shared_fs", "auto"),
        random_seed=spec.get("seeds", {}).get(str(rank), 1234),
    )
    found: dict[str, Any] = {"built": built, "error": None, "samples": None}
    start = time.monotonic()
    try:
        builder = MegablendDatasetBuilder(
            cls, spec["sizes"], lambda: holders is None or rank in holders, config
        )
        found["samples"] = digest(builder.build())
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - start
    beside = Path(spec["out"], f".{rank}")
    beside.write_text(json.dumps(found))
    beside.rename(Path(spec["out"], f"{rank}.json"))
    if spec["launcher"] == "torchrun" and found["error"] is None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

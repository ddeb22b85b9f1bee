"""One of two processes of a torch job: which samples its loaders read, as JSON on stdout. Arguments: a config's path."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

import megablend


def main() -> None:
    """Loaders over process groups and mesh dimensions, and the errors of those that cannot be."""
    dataset = megablend.open(sys.argv[1])

    def outcome(**ranks: Any) -> Any:
        try:
            loader = megablend.Loader(dataset, micro_batch_size=4, **ranks)
        except megablend.ConfigError as error:
            return str(error)
        return next(iter(loader.sampler))

    found = {"before": outcome()}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    alone = [torch.distributed.new_group([rank]) for rank in range(2)]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    swapped = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found |= {
        "missing": outcome(),
        "given": outcome(data_parallel_rank=0, data_parallel_size=1),
        "world": outcome(data_parallel_group=torch.distributed.group.WORLD),
        "dp": outcome(data_parallel_group=mesh["dp"]),
        "tp": outcome(data_parallel_group=swapped["dp"]),
        "flat": outcome(data_parallel_group=mesh["dp", "tp"]._flatten("all")),
        "whole": outcome(data_parallel_group=mesh),
        "other": outcome(data_parallel_group=alone[1 - torch.distributed.get_rank()]),
        "both": outcome(data_parallel_group=mesh["dp"], data_parallel_rank=0),
        "wrong": outcome(data_parallel_group="dp"),
    }
    torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

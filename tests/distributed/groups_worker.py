"""A rank of a torch job that forms groups again and again, as builds do: python groups_worker.py RANK SIZE PORT BUILDS"""

from __future__ import annotations

import os
import random
import sys
import time

import torch
import torch.distributed

from megablend.distributed.torch_job import torch_job


def main() -> None:
    """Print the sum of what all ranks said, over all builds."""
    rank, size, port, builds = map(int, sys.argv[1:])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    torch.set_default_device("meta")  # as trainers may set one; groups exchange bytes all the same
    job = torch_job()
    drawn = random.Random(rank)
    total = 0
    others = list[object]()  # of some ranks only, as Megatron has them
    for number in range(builds):
        if number % 4 == 0:
            others.append(torch.distributed.new_group([number // 4 % size]))
        with job.members(range(size)) as world:
            total += sum(world.allgather(number * rank))
            time.sleep(drawn.random() / 200)  # ranks come to the next group at different times
            half = [other for other in range(size) if other % 2 == rank % 2]
            with job.members(half) as group:
                total += sum(group.allgather(1))
    print(total, flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

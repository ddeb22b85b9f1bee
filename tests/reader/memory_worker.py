"""Reads NUM batches of a run from sample FIRST on, and tells by how much this process grew at most.

python memory_worker.py CONFIG FIRST NUM
"""

import json
import sys
from pathlib import Path

from corpus.linked import one_file

import megablend


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, what it has now; VmHWM, the most that it had."""
    return (
        int(Path("/proc/self/status").read_text(encoding="utf-8").split(f"{name}:")[1].split()[0])
        << 10
    )


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    first = int(sys.argv[2])
    num_batches = int(sys.argv[3])
    small = megablend.Loader(megablend.open(one_file(config)), micro_batch_size=8)
    next(iter(small))  # libraries and kernels are loaded
    small.dataset[0]
    small.close()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM counts from here
    before = memory("VmRSS")
    dataset = megablend.open(config)
    batches = iter(megablend.Loader(dataset, micro_batch_size=8, consumed_samples=first))
    epochs = set()
    for batch in range(num_batches):
        next(batches)
        if batch in (0, num_batches - 1):
            # `dataset.sample` would read blocks of its own
            located = dataset.run.plan.locate_many([first + 8 * batch])
            epochs.update(dataset.run.locate_spans(*located).epochs.tolist())
    print(json.dumps({"growth": memory("VmHWM") - before, "epochs": sorted(epochs)}))


if __name__ == "__main__":
    main()

"""Write samples as MosaicML Streaming's shards, with its own writer: python mds_copy.py TOKENS.npy LENGTH FOLDER."""

from __future__ import annotations

import sys

import numpy as np
import streaming


def main() -> None:
    """Cut the tokens into samples and write them."""
    tokens = np.load(sys.argv[1], mmap_mode="r")
    length = int(sys.argv[2])
    with streaming.MDSWriter(
        out=sys.argv[3], columns={"tokens": f"ndarray:int32:{length}"}
    ) as writer:
        for start in range(0, len(tokens) // length * length, length):
            writer.write({"tokens": np.asarray(tokens[start : start + length])})


if __name__ == "__main__":
    main()

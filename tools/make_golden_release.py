"""Make the golden files of tests/releases: data, caches, ledgers and states as a release wrote them, and what it read from them.

Run it with that release's code, never with a later one; the folder is named after the release:

    git worktree add /tmp/release 0.1.0
    PYTHONPATH=/tmp/release python tools/make_golden_release.py /tmp/golden   # then move it to tests/releases

Made once: tests open a copy of the folder with the present code and expect the same tokens. Needs megatron-core, for the plugin's
cache. The folder contains

    data/           a source in each format
    <run>.json      configs with relative paths
    cache/          made by `build`: an index, splits, tables of documents, a ledger for each run
    plugin/         the cache of MegablendDatasetBuilder in page order
    expected.json   {"states": {name: {"run", "split", "state"}}, "samples": {name: digests of what was read}}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

EOD = 0
KINDS = ("parquet", "arrow", "megatron")
WEIGHTS = ("0.5", "0.2", "0.3")
PLUGIN_SIZES = [400, 90, 10]
Documents = list[list[int]]

CONFIG: dict[str, Any] = {
    "cache": "cache",
    "sequence_length": 16,
    "block_bytes": 128,
    "lanes": 4,
    "cycle": 4,
    "seed": 7,
    "split": "80,15,5",
    "valid_samples": 150,
    "sources": [
        {
            "name": kind,
            "path": f"data/{kind}/*{suffix}",
            "weight": weight,
            "append_eod": EOD,
            "column": column,
        }
        for kind, suffix, weight, column in zip(
            KINDS, (".parquet", ".arrow", ".bin"), WEIGHTS, ("ids", "ids", None), strict=True
        )
    ],
}
RUNS: dict[str, list[dict[str, Any]]] = {
    "pages": [{"samples": 300}, {"samples": 700}],
    "rows": [{"samples": 400, "order": "row", "lanes": 6, "cycle": 9}],
    "in_place": [{"samples": 250, "order": "sequential", "valid_samples": None}],
}
"""For each run what it changes in CONFIG, once for each of its builds."""


def config_of(run: str, stage: int) -> dict[str, Any]:
    """A run's config at one of its builds."""
    changed = CONFIG | RUNS[run][stage] | {"run": run}
    return {key: value for key, value in changed.items() if value is not None}


def draw_documents(seed: int, num_tokens: int) -> Documents:
    """Distinct tokens; some documents are empty, a few longer than a block."""
    rng = random.Random(seed)
    documents = list[list[int]]()
    used = 0
    while used < num_tokens:
        size = rng.choice([0, 1, rng.randrange(30), rng.randrange(30), rng.randrange(120)])
        documents.append([1 + seed * 10_000 + used + i for i in range(size)])
        used += size
    return documents


def write_data(folder: Path) -> None:
    """Two files of each format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for seed, (kind, num_tokens) in enumerate(zip(KINDS, (2500, 900, 1500), strict=True)):
        documents = draw_documents(seed, num_tokens)
        (folder / kind).mkdir(parents=True)
        for number, part in enumerate(
            (documents[: len(documents) // 3], documents[len(documents) // 3 :])
        ):
            table = pa.table({"ids": pa.array(part, pa.list_(pa.int32()))})
            if kind == "parquet":
                pq.write_table(
                    table,
                    folder / kind / f"{number}.parquet",
                    data_page_size=200,
                    write_batch_size=4,
                    use_dictionary=False,
                    write_page_index=number == 0,
                    write_page_checksum=True,
                )
            elif kind == "arrow":
                with pa.ipc.new_file(
                    str(folder / kind / f"{number}.arrow"), table.schema
                ) as writer:
                    writer.write_table(table, max_chunksize=5)
            else:
                write_pair(folder / kind / f"{number}", part)


def write_pair(prefix: Path, documents: Documents) -> None:
    """A `.bin/.idx` pair of int32, a sequence a document."""
    lengths = np.array([len(document) for document in documents], "<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * 4
    tokens = np.array([token for document in documents for token in document], "<i4")
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    ends = np.arange(len(lengths) + 1, dtype="<i8")
    prefix.with_suffix(".idx").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + ends.tobytes()
    )


def digest_numbers(numbers: Iterable[Any]) -> str:
    """Of integers as int64, one after the other."""
    text = b"".join(np.ascontiguousarray(each, "<i8").tobytes() for each in numbers)
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def read_samples(dataset: Any, first: int = 0) -> dict[str, Any]:
    """Digests of the plan's (source, ordinal) and of the tokens of samples from `first` on; the first few in clear."""
    ks = np.arange(first, len(dataset))
    sources, ordinals = dataset.run.plan.locate_many(ks)
    return {
        "first": first,
        "samples": len(dataset),
        "sources": digest_numbers([sources]),
        "ordinals": digest_numbers([ordinals]),
        "tokens": digest_numbers(dataset[int(k)]["tokens"].numpy() for k in ks),
        "begins": [
            [int(source), int(ordinal)]
            for source, ordinal in zip(sources[:12], ordinals[:12], strict=True)
        ],
    }


def make_runs(folder: Path) -> dict[str, Any]:
    """Build all runs; states of all splits, and what was read."""
    import megablend

    states: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    for run in RUNS:
        for stage in range(len(RUNS[run])):
            config = config_of(run, stage)
            path = folder / f"{run}.json"
            path.write_text(json.dumps(config, indent=1))
            megablend.build(path)
            for split in ("train", "valid", "test") if stage == len(RUNS[run]) - 1 else ("train",):
                dataset = megablend.open(path, split)
                name = f"{run} {split} stage {stage}"
                consumed = len(dataset) // 3 + 1
                states[name] = {"run": run, "split": split, "state": dataset.state_dict(consumed)}
                samples[name] = read_samples(dataset) | {
                    "rest": read_samples(dataset, consumed)["tokens"]
                }
    return {"states": states, "samples": samples}


def plugin_datasets(folder: Path, root: Path) -> list[Any]:
    """The splits of the plugin's builder in page order, with its cache in `folder`; data is below `root`."""
    from megablend.megatron import MegablendDatasetBuilder
    from megablend.megatron.plugin.config import MegablendDatasetConfig
    from megablend.megatron.plugin.dataset import MegablendGPTDataset

    words = [
        f"parquet:{root}/data/parquet/*.parquet?column=ids&append_eod={EOD}",
        f"arrow:{root}/data/arrow/*.arrow?column=ids&append_eod={EOD}",
        f"{root}/data/megatron/1",
    ]
    tokenizer = SimpleNamespace(
        eod=EOD, eos=EOD, pad=49_999, vocab_size=50_000, unique_identifiers={"class": "golden"}
    )
    config = MegablendDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        path_to_cache=str(folder),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        blend=(words, [float(weight) for weight in WEIGHTS]),
        split=CONFIG["split"],
        order="page",
        lanes=4,
        cycle=8,
    )
    built: list[Any] = MegablendDatasetBuilder(
        MegablendGPTDataset, PLUGIN_SIZES, lambda: True, config
    ).build()
    return built


def read_plugin(datasets: list[Any]) -> dict[str, Any]:
    """Digests of the samples' tokens and sources, by split."""
    return {
        split: {
            "samples": len(dataset),
            "tokens": digest_numbers(dataset[k]["tokens"].numpy() for k in range(len(dataset))),
            "sources": digest_numbers([dataset[k]["dataset_id"]] for k in range(len(dataset))),
        }
        for split, dataset in zip(("train", "valid", "test"), datasets, strict=True)
    }


def main() -> None:
    """Make the folder of the release whose code runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    import torch.distributed

    import megablend

    folder = (out / f"v{megablend.__version__.replace('.', '_')}").absolute()
    folder.mkdir(parents=True)  # never over one that is there
    os.chdir(folder)
    write_data(folder / "data")
    expected = make_runs(folder)
    with tempfile.TemporaryDirectory() as store:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}/store", rank=0, world_size=1
        )
        expected["plugin"] = read_plugin(plugin_datasets(folder / "plugin", folder))
        torch.distributed.destroy_process_group()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for lock in folder.rglob(".lock"):
        lock.unlink()  # it names this machine; the next build makes it


if __name__ == "__main__":
    main()

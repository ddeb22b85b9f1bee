"""Programs that know nothing of mirrors read what is wanted; jobs and a service share a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import megablend
from tests.formats.writers import write_megatron
from tests.megatron_core import megatron
from tests.mirror.catalog.test_cluster_datasets import Service, keys
from tests.mirror.catalog.test_datasets import MB, check_folder, count_sent, machine, make_files
from tests.mirror.test_runs import digest_batches
from tests.runs import make_config
from tests.storage.faulty import Faults, FaultySource

__all__ = ["keys"]
pytestmark = pytest.mark.usefixtures("obstore", "keys")
NUM_FETCHED = 16
"""Requests in flight for what is wanted."""
FILE_BYTES = 100_000


def test_safetensors_and_megatron_map_the_files_of_a_folder(tmp_path: Path) -> None:
    indexed_dataset = megatron("indexed_dataset")
    tensors: dict[str, dict[str, Any]] = {
        "model": {f"layer{i}": np.arange(i, i + 70_000, dtype=np.float32) for i in range(4)},
        "sub/small": {"bias": np.arange(9, dtype=np.int64)},
    }
    files = {
        f"m/{name}.safetensors": safetensors.numpy.save(some) for name, some in tensors.items()
    }
    documents = [list(range(i, i + 100 + i % 7)) for i in range(600)]
    write_megatron(tmp_path / "tokens.bin", documents)
    for kind in ("bin", "idx"):
        files[f"m/tokens.{kind}"] = (tmp_path / f"tokens.{kind}").read_bytes()
    with machine(tmp_path / "node", files) as node:
        node.add("model", "m")
        node.ask("want", "model", "--wait")
        path = Path(node.ask("path", "model")["path"])
        node.source.is_down = True
        check_folder(path, files, "m")
        for name, some in tensors.items():
            with safetensors.safe_open(path / f"{name}.safetensors", framework="np") as file:
                assert sorted(file.keys()) == sorted(some)
                for each in some:
                    assert np.array_equal(file.get_tensor(each), some[each])
                    half = file.get_slice(each)[3:7]
                    assert np.array_equal(half, some[each][3:7])
        mapped = indexed_dataset.IndexedDataset(str(path / "tokens"), mmap=True)
        assert [each.tolist() for each in mapped] == documents


def test_what_a_job_reads_comes_before_what_is_wanted(tmp_path: Path) -> None:
    """The job's loader has told of its pages; it finds the service's process by the folder."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, 1000).tolist() for _ in range(2500)]
    local = tmp_path / "job"
    local.mkdir()
    write_megatron(local / "x.bin", documents)
    files = make_files("d", {f"{i}.bin": FILE_BYTES for i in range(600)})
    files |= {f"job/x.{kind}": (local / f"x.{kind}").read_bytes() for kind in ("bin", "idx")}
    size = len(files["job/x.bin"])
    entry: dict[str, Any] = {"name": "s", "weight": 1}
    settings: dict[str, Any] = {"sequence_length": 1000, "block_bytes": 65536, "samples": 2000}
    with FaultySource({f"b/{name}": data for name, data in files.items()}) as source:
        node = Service(tmp_path / "node", source)
        plain = make_config(
            tmp_path,
            [entry | {"path": f"{local}/x.bin"}],
            cache=str(tmp_path / "plain"),
            **settings,
        )
        remote = make_config(
            tmp_path,
            [entry | {"path": "s3://b/job/x.bin"}],
            cache=str(tmp_path / "remote"),
            storage=node.storage,
            **settings,
        )
        try:
            node.start()
            megablend.build(plain)
            megablend.build(remote)
            expected = digest_batches(plain)
            node.add("corpus", "d")
            listed = count_sent(source)
            source.faults = Faults(rate=4e6)
            node.ask("want", "corpus")
            source.paths.clear()
            assert digest_batches(remote) == expected
            asked = [each.removeprefix("/b/") for each in source.paths]
            of_job = [i for i, each in enumerate(asked) if each == "job/x.bin"]
            # At its end the job leaves requests to others
            begin = of_job[0]
            end = of_job[-NUM_FETCHED]
            meanwhile = [each for each in asked[begin:end] if each.startswith("d/")]
            print(f"{len(of_job)} requests of the job, meanwhile {len(meanwhile)} of the rest")
            assert len(of_job) > size / MB
            # Those that were on their way, or began before the loader had told; else as many bytes
            assert len(meanwhile) <= 2 * NUM_FETCHED < size / 2 / FILE_BYTES
            source.faults = Faults()
            node.ask("want", "corpus", "--wait")
            wanted = sum(len(data) for name, data in files.items() if name.startswith("d/"))
            assert wanted < count_sent(source) - listed <= wanted + size + len(files)
        finally:
            node.kill()

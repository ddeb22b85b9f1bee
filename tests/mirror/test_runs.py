"""Whole runs through a mirror: the batches of local files, and each byte read from the source once."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import megablend
from megablend.mirror.node.frames import Kind
from tests.mirror.nodes import connect, get_status, kill_node, mirror
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
KINDS = ("parquet", "arrow", "megatron")


def make_configs(
    folder: Path, source: FaultySource, storage: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run over local files, and the same over a web server that has them."""
    data = folder / "data"
    sources = [
        write_source(data, i, kind, documents(i, 400, 200, seed=i), num_files=3) | {"weight": 1 + i}
        for i, kind in enumerate(KINDS)
    ]
    config = {"sequence_length": 64, "block_bytes": 4096, "samples": 2500, **settings}
    plain = make_config(folder, sources, cache=str(folder / "plain"), **config)
    source.files = {
        f"d/{path.relative_to(data)}": path.read_bytes()
        for path in data.rglob("*")
        if path.is_file()
    }
    urls = [
        each | {"path": [path.replace(str(data), f"{source.url}/d") for path in list_paths(each)]}
        for each in sources
    ]
    return plain, make_config(folder, urls, cache=str(folder / "remote"), storage=storage, **config)


def list_paths(source: dict[str, Any]) -> list[str]:
    from tests.storage.objects.test_http import list_files

    return [str(each) for each in list_files(source)]


def digest_batches(config: dict[str, Any], split: str = "train", **options: Any) -> list[str]:
    """A digest of all fields of each batch."""
    loader = megablend.Loader(megablend.open(config, split), micro_batch_size=4, **options)
    return [digest_fields(batch) for batch in loader]


def digest_fields(batch: dict[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(batch):
        value = batch[name]
        digest.update(
            f"{name} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}".encode()
        )
        digest.update(
            value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        )
    return digest.hexdigest()


def test_the_source_is_read_once_and_may_be_off_then(tmp_path: Path) -> None:
    with FaultySource({}) as source, mirror(tmp_path / "mirror", source.url) as settings:
        plain, remote = make_configs(tmp_path, source, {"mirror": settings})
        megablend.build(plain)
        built = megablend.build(remote)
        assert built.ledger.digest == megablend.open(plain).run.ledger.digest
        expected = digest_batches(plain)
        assert digest_batches(remote) == expected
        assert get_status(settings)["source_bytes"] <= 1.001 * sum(map(len, source.files.values()))
        before = source.bytes
        assert digest_batches(remote) == expected
        assert source.bytes == before
        source.is_down = True
        kill_node(tmp_path / "mirror")
        assert digest_batches(remote) == expected
        assert source.bytes == before


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_share_the_mirror(method: str, tmp_path: Path) -> None:
    with FaultySource({}) as source, mirror(tmp_path / "mirror", source.url) as settings:
        plain, remote = make_configs(tmp_path, source, {"mirror": settings})
        megablend.build(plain)
        megablend.build(remote)
        read = digest_batches(remote, num_workers=2, multiprocessing_context=method)
        assert read == digest_batches(plain)
        assert get_status(settings)["source_bytes"] <= 1.001 * sum(map(len, source.files.values()))


def test_loaders_tell_where_bytes_came_from(tmp_path: Path) -> None:
    """Those of workers that are spawned, too."""
    with FaultySource({}) as source, mirror(tmp_path / "mirror", source.url) as settings:
        plain, remote = make_configs(tmp_path, source, {"mirror": settings})
        megablend.build(plain)
        megablend.build(remote)
        totals = []
        for config in (plain, remote, remote):
            # Which takes seconds, and matters to clients of a mirror
            context = multiprocessing.get_context("fork" if config is plain else "spawn")
            loader = megablend.Loader(
                megablend.open(config),
                micro_batch_size=4,
                num_workers=1,
                multiprocessing_context=context,
            )
            for _ in loader:
                pass
            reads = loader.stats()["reads"]
            totals.append(
                [reads[f"{name}_bytes"] for name in ("mirror", "source", "peer", "direct")]
            )
        assert totals[0] == [0, 0, 0, 0]
        assert totals[1][0] + totals[1][1] >= reads["bytes"]
        assert totals[2][0] >= reads["bytes"] > 0
        assert totals[2][1:] == [0, 0, 0]


def test_a_mirror_smaller_than_the_data_gives_the_same_batches(tmp_path: Path) -> None:
    with (
        FaultySource({}) as source,
        mirror(tmp_path / "mirror", source.url, size="200kB") as settings,
    ):
        plain, remote = make_configs(tmp_path, source, {"mirror": settings})
        megablend.build(plain)
        megablend.build(remote)
        assert digest_batches(remote) == digest_batches(plain)
        assert get_status(settings)["held_bytes"] <= 200_000


def test_a_wrong_byte_in_the_mirror_is_replaced(tmp_path: Path) -> None:
    with FaultySource({}) as source, mirror(tmp_path / "mirror", source.url) as settings:
        plain, remote = make_configs(tmp_path, source, {"mirror": settings})
        megablend.build(plain)
        megablend.build(remote, checksums=True)
        expected = digest_batches(plain)
        assert digest_batches(remote) == expected
        connect(settings).command(Kind.SCRUB)
        copies = sorted((tmp_path / "mirror" / "files").rglob("*.data"))
        assert len(copies) >= 9
        for path in copies:
            path.chmod(0o600)
            data = bytearray(path.read_bytes())
            for offset in range(200, len(data), 4096):
                data[offset] ^= 4
            path.write_bytes(data)
        assert digest_batches(remote) == expected

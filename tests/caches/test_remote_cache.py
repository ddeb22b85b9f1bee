"""A cache in an object store (Azurite): the same index, the same samples, the same commands as for one in a folder."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.base import OvertakenError
from megablend.errors import MegablendError
from megablend.operations import manage_runs
from megablend.run.skips import copy_skips
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectPrefix
from tests.runs import documents, make_config, read_samples, write_source
from tests.storage.objects.servers.forward import RoundsInFront


def configs(folder: Path, remote: str, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run with a cache in a folder, and the same run with one in an object store."""
    kinds = ("parquet", "megatron")
    sources = [
        write_source(folder / "data", number, kind, documents(number, 40, 20, seed=1))
        | {"weight": 1 + number}
        for number, kind in enumerate(kinds)
    ]
    config = make_config(folder, sources, samples=40, append_eod=None, **settings)
    config.pop("append_eod")
    return config, config | {"cache": remote}


def samples(config: dict[str, Any], **options: Any) -> list[list[int]]:
    return [each.tokens[:-1].tolist() for each in read_samples(megablend.open(config, **options))]


@pytest.mark.parametrize("order", ["block", "document"])
def test_index_and_samples_are_those_of_a_folder(
    tmp_path: Path, remote: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, config = configs(tmp_path, remote, order=order)
    expected = megablend.build(local)
    found = megablend.build(config)
    assert found.index.digest == expected.index.digest
    assert found.ledger == expected.ledger
    assert samples(config) == samples(local)
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "another node"))
    assert samples(config) == samples(local)
    assert list((tmp_path / "another node").glob("*/generations/*/blocks.arrow"))
    again = megablend.build(config)
    assert (again.index.read, again.index.created, again.index.digest) == (
        0,
        False,
        expected.index.digest,
    )


def test_runs_are_extended_renamed_reset_and_removed(tmp_path: Path, remote: str) -> None:
    local, config = configs(tmp_path, remote, run="demo")
    for each in (local, config):
        megablend.build(each)
        megablend.build(each | {"samples": 60})
    longer = config | {"samples": 60}
    assert samples(longer) == samples(local | {"samples": 60})
    state = {"consumed": megablend.open(longer, consumed_samples=50).state_dict()}["consumed"]
    megablend.skip(remote, 8, 12, batch_size=4, run="demo")
    megablend.rename_run(remote, "demo", "other")
    (listed,) = (each.to_dict() for each in megablend.list_runs(remote))
    assert (listed["run"], listed["stages"]) == ("other", [40, 60])
    renamed = longer | {"run": "other"}
    assert [
        (each["start"], each["stop"]) for each in megablend.list_skips(renamed).to_dict()["skips"]
    ] == [(8, 12)]
    aside = megablend.reset_run(renamed, "other")
    assert str(aside) == f"{remote}/runs/other/0000.json"
    assert megablend.list_runs(remote) == []
    with pytest.raises(megablend.CacheError, match="contains no run 'other'"):
        megablend.open(renamed)
    assert megablend.build(config | {"run": "other"}).ledger.ends == (40,)
    assert megablend.open(longer, state=state).consumed_samples == 50
    megablend.remove_run(remote, "other")
    assert megablend.list_runs(remote) == []


@pytest.mark.parametrize("change", ["extend", "skip", "rename", "remove"])
def test_a_rename_loses_nothing_of_what_another_node_does_meanwhile(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    _, config = configs(tmp_path, remote, run="demo")
    megablend.build(config)
    megablend.skip(config, 0, 4, batch_size=4)
    changes: dict[str, Callable[[], object]] = {
        "extend": lambda: megablend.build(config | {"samples": 60}),
        "skip": lambda: megablend.skip(config, 8, 12, batch_size=4),
        "rename": lambda: megablend.rename_run(config, "demo", "other"),
        "remove": lambda: megablend.remove_run(config, "demo"),
    }
    found = list[tuple[str, Any]]()

    def copy_after_the_change(*arguments: Any) -> int:
        monkeypatch.setattr(manage_runs, "copy_skips", copy_skips)
        changes[change]()
        found.extend(_skipped(remote).items())
        return copy_skips(*arguments)

    monkeypatch.setattr(manage_runs, "copy_skips", copy_after_the_change)
    with pytest.raises(OvertakenError, match=r"in the meantime; run the command again$"):
        megablend.rename_run(config, "demo", "other")
    assert found == [each for each in _skipped(remote).items() if each in found]
    if change in ("extend", "skip"):
        megablend.remove_run(config, "other")
        megablend.rename_run(config, "demo", "other")
        assert _skipped(remote) == {"other": found[0][1]}


def _skipped(cache: str) -> dict[str, Any]:
    """By run: where its stages end, and what it skips."""
    return {
        each.run: (each.stages, megablend.list_skips(cache, run=each.run).to_dict()["skips"])
        for each in megablend.list_runs(cache)
        if isinstance(each, manage_runs.RunSummary)
    }


def test_commands_take_its_url(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = configs(tmp_path, remote)
    with pytest.raises(megablend.CacheError, match="there is no cache here"):
        megablend.verify(remote)
    digest = megablend.build(config).index.digest
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "another node"))
    described = megablend.describe(remote).to_dict()
    assert [each["digest"] for each in described["indices"]] == [digest]
    assert megablend.describe(config).to_dict()["index"]["digest"] == digest
    assert megablend.verify(remote, data=True).problems == ()
    assert megablend.check(config).problems == ()
    assert megablend.show(remote, 3, run="default").tokens == megablend.show(config, 3).tokens
    assert megablend.open_index(remote).snapshot.digest == digest


def test_the_address_of_the_store_is_in_the_config_or_in_a_file_of_settings(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = os.environ["AZURE_STORAGE_ENDPOINT"]
    monkeypatch.delenv("AZURE_STORAGE_ENDPOINT")
    _, config = configs(tmp_path, remote, run="demo")
    config |= {"storage": {"az://": {"endpoint": endpoint}}, "local_cache": str(tmp_path / "other")}
    digest = megablend.build(config).index.digest
    expected = [megablend.show(config, k).tokens for k in (0, 39)]
    # The ledger decides, and the config names the cache only
    edited = config | {"sequence_length": 16, "samples": 7}
    assert [megablend.show(edited, k, run="demo").tokens for k in (0, 39)] == expected
    megablend.build(config | {"samples": 60})
    (tmp_path / "settings.yaml").write_text(f"storage: {{'az://': {{endpoint: '{endpoint}'}}}}")
    monkeypatch.setenv("MEGABLEND_STORAGE", str(tmp_path / "settings.yaml"))
    assert megablend.verify(remote, data=True).problems == ()
    assert [megablend.show(remote, k, run="demo").tokens for k in (0, 39)] == expected
    assert [each.run for each in megablend.list_runs(remote)] == ["demo"]
    assert megablend.open_index(remote).snapshot.digest == digest
    assert megablend.gc(remote).kept == (digest,)


def test_verify_names_damaged_and_missing_objects_and_build_repairs_them(
    tmp_path: Path, remote: str
) -> None:
    _, config = configs(tmp_path, remote)
    megablend.build(config)
    expected = samples(config)
    prefix = ObjectPrefix(remote, ObjectOptions())
    keys = [each.key for each in prefix.list_objects("generations")]
    blocks = next(key for key in keys if key.endswith("/blocks.arrow"))
    data = prefix.read(blocks)
    assert data is not None
    prefix.write(blocks, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    (problem,) = megablend.verify(remote).problems
    assert f"{remote}/{blocks}: damaged (its BLAKE2b digest is" in problem
    assert megablend.build(config).index.created
    assert megablend.verify(remote).problems == ()
    prefix.remove(
        [
            each.key
            for each in prefix.list_objects("generations")
            if each.key.endswith("/files.arrow")
        ]
    )
    (problem,) = megablend.verify(remote).problems
    assert "files.arrow: the object is missing" in problem
    assert megablend.build(config).index.created
    assert megablend.verify(remote).problems == ()
    assert samples(config) == expected


@pytest.mark.parametrize("kind", ["generations", "documents"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_damaged_copy_of_a_node_is_downloaded_again_on_opening(
    tmp_path: Path, remote: str, kind: str, is_cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, config = configs(tmp_path, remote, order="document")
    megablend.build(config)
    expected = samples(config)
    name = "files.arrow" if kind == "generations" else "lengths.arrow"
    for path in (tmp_path / "node").glob(f"*/{kind}/*/{name}"):
        data = path.read_bytes()
        path.unlink()  # processes that have mapped it keep it
        path.write_bytes(data[:-8] if is_cut else data[:100] + b"damaged" + data[107:])
        # Another version of the table, as a new process opens it
        os.utime(path.with_name("manifest.json"))
    assert samples(config) == expected
    says = f"{name}: damaged table.*; this node's copy was downloaded again"
    assert is_cut or re.search(says, caplog.text)


def test_an_error_of_a_nodes_disk_names_the_setting_and_is_no_damage(
    tmp_path: Path, remote: str
) -> None:
    _, config = configs(tmp_path, remote)
    megablend.build(config)
    (folder,) = (tmp_path / "node").glob("*/generations")
    dataset = megablend.open(config)
    shutil.rmtree(folder)
    with pytest.raises(megablend.CacheError, match=r"run the job again, .* to `local_cache`"):
        read_samples(dataset)
    folder.write_text("not a folder")
    says = rf"{folder}/.*: cannot write the cache \(.*use another folder \(`local_cache`"
    with pytest.raises(megablend.CacheError, match=says):
        megablend.describe(remote)
    with pytest.raises(megablend.CacheError, match=says):
        megablend.open(config)


def test_gc_keeps_what_runs_need_and_removes_the_rest_by_the_clock_of_the_store(
    tmp_path: Path, remote: str
) -> None:
    _, config = configs(tmp_path, remote)
    first = megablend.build(config | {"run": "first"}).index.digest
    _add_files(tmp_path)
    second = megablend.build(config | {"run": "second"}).index.digest
    assert first != second
    prefix = ObjectPrefix(remote, ObjectOptions())
    prefix.write(f"generations/{second}/dead/blocks.arrow", b"of a killed build")
    time.sleep(1.1)  # the store's clock counts seconds
    assert megablend.gc(remote, older_than_days=0).removed == ()
    assert not any("/dead/" in each.key for each in prefix.list_objects("generations"))
    megablend.remove_run(remote, "first")
    assert megablend.gc(remote, older_than_days=1).removed == ()
    time.sleep(1.1)
    assert megablend.gc(remote, older_than_days=0, dry_run=True).removed == (first,)
    collected = megablend.gc(remote, older_than_days=0)
    assert (collected.removed, collected.kept) == ((first,), (second,))
    left = [each.key for each in prefix.list_objects(f"generations/{first}")]
    assert [key.split("/")[2] for key in left] == ["commits", "commits"]
    assert megablend.verify(remote).problems == ()
    assert len(samples(config | {"run": "second"})) == 40
    for path in (tmp_path / "data" / "source0").glob("more-*"):
        path.unlink()
    again = megablend.build(config | {"run": "first"}).index  # after it was removed
    assert (again.digest, again.created) == (first, True)
    assert len(samples(config | {"run": "first"})) == 40


@pytest.mark.slow
@pytest.mark.parametrize("server", ["moto", "ceph"])
def test_a_bucket_of_s3_and_no_secrets_anywhere(
    tmp_path: Path, server: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(request.getfixturevalue(f"remote_{server}"))
    local, config = configs(tmp_path, url)
    with caplog.at_level(logging.DEBUG):
        assert megablend.build(config).index.digest == megablend.build(local).index.digest
        assert samples(config) == samples(local)
        assert megablend.verify(url).problems == ()
        dataset = megablend.open(config)
    prefix = ObjectPrefix(url, ObjectOptions())
    stored = [prefix.read(each.key) or b"" for each in prefix.list_objects()]
    kept = [path.read_bytes() for path in (tmp_path / "node").rglob("*") if path.is_file()]
    shown = [
        caplog.text.encode(),
        repr(dataset.run.store.snapshot.store).encode(),
        pickle.dumps(dataset.run.store),
    ]
    assert not any(b"canary" in each for each in (*stored, *kept, *shown))


@pytest.mark.slow
@pytest.mark.parametrize("server", ["moto", "ceph"])
def test_of_sources_in_the_same_bucket_no_secret_is_kept_or_shown(
    tmp_path: Path, server: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """In objects, files, logs, output of commands, errors with the variables of their frames, pickles and reprs."""
    url = str(request.getfixturevalue(f"remote_{server}"))
    local, config = configs(tmp_path, url, run="demo")
    bucket = url.removesuffix("/of/x")
    data = ObjectPrefix(f"{bucket}/data", ObjectOptions())
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    data.write_all({str(path.relative_to(tmp_path / "data")): path for path in files})
    for source in config["sources"]:
        source["path"] = source["path"].replace(str(tmp_path / "data"), f"{bucket}/data")
    shown = list[str]()
    with caplog.at_level(logging.DEBUG):
        assert (
            megablend.build(config, checksums=True).index.digest
            == megablend.build(local).index.digest
        )
        dataset = megablend.open(config)
        assert dataset[3]["tokens"].tolist() == samples(local)[3]
        batches = iter(megablend.Loader(dataset, micro_batch_size=4))
        next(batches)
        for refused in (
            config | {"cache": "s3://nobody-has-this/x"},
            _with_path(config, f"{bucket}/data/none*"),
        ):
            with pytest.raises(MegablendError) as caught:
                megablend.build(refused | {"run": "other"})
            shown += traceback.TracebackException.from_exception(
                caught.value, capture_locals=True
            ).format()
        del batches
    (tmp_path / "config.json").write_text(json.dumps(config))
    wrong = os.environ | {
        "AWS_SECRET_ACCESS_KEY": "canary-wrong",
        "MEGABLEND_LOCAL_CACHE": str(tmp_path / "other"),
    }
    commands = ("describe", "verify", "build", "gc", "check", "runs list")
    for command, environment in [*((each, None) for each in commands), ("verify", wrong)]:
        arguments = [
            sys.executable,
            "-m",
            "megablend",
            *command.split(),
            str(tmp_path / "config.json"),
        ]
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=500, check=False, env=environment
        )
        assert done.returncode == 0 or environment is wrong, (command, done.stderr)
        shown += [done.stdout, done.stderr]
    shown += [
        caplog.text,
        repr(dataset),
        repr(vars(dataset)),
        repr(vars(dataset.run)),
        repr(dataset.state_dict(3)),
    ]
    pickled = [pickle.dumps(each) for each in (dataset, dataset.run.store)]
    stored = [
        ObjectPrefix(bucket + "/of", ObjectOptions()).read(each.key) or b""
        for each in _list(bucket + "/of")
    ]
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) > 5
    assert len(shown) > 10 < len(kept)
    assert not any("canary" in each for each in shown)
    assert not any(b"canary" in each for each in (*stored, *kept, *pickled))


class ReadOnlyInFront(RoundsInFront):
    """Forwards what reads, and refuses what writes, as a store does to a user who may only read."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 0)
        self.refused = list[str]()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]
    ) -> bool:
        if method in ("GET", "HEAD"):
            return await super()._answer(writer, method, target, headers)
        self.refused.append(f"{method} {target}")
        return await self._send(
            writer, method, 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
        )


def test_a_dry_run_of_gc_only_reads(tmp_path: Path, remote_moto: str, moto: str) -> None:
    _, config = configs(tmp_path, remote_moto)
    unused = megablend.build(config | {"run": "first"}).index.digest
    _add_files(tmp_path)
    megablend.build(config | {"run": "second"})
    megablend.remove_run(remote_moto, "first")
    time.sleep(1.1)  # the store's clock counts seconds
    front = ReadOnlyInFront(moto)
    with front:
        environment = os.environ | {"AWS_ENDPOINT_URL": front.url}
        command = [sys.executable, "-m", "megablend", "gc", remote_moto, "--older-than", "0"]
        options: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "timeout": 120,
            "check": False,
            "env": environment,
        }
        dry = subprocess.run([*command, "--dry-run"], **options)
        assert (dry.returncode, front.refused) == (0, []), dry.stderr
        assert unused in dry.stdout
        real = subprocess.run(command, **options)
        assert real.returncode != 0
        assert front.refused


def _add_files(folder: Path) -> None:
    """Add files to the first source of `configs`."""
    write_source(folder / "data" / "more", 0, "parquet", documents(0, 9, 9, seed=2))
    for path in (folder / "data" / "more" / "source0").iterdir():
        path.rename(folder / "data" / "source0" / f"more-{path.name}")


def _with_path(config: dict[str, Any], path: str) -> dict[str, Any]:
    return config | {"sources": [config["sources"][0] | {"path": path}]}


def _list(url: str) -> list[Any]:
    return ObjectPrefix(url, ObjectOptions()).list_objects()


STRAYS = (
    "generations/README",
    "generations/x/y",
    "runs/README",
    "runs/a/b/c.json",
    "fragments/x/y",
    "documents/x",
    "README",
)


def test_other_objects_below_the_prefix_do_not_matter(tmp_path: Path, remote: str) -> None:
    local, config = configs(tmp_path, remote, run="demo")
    prefix = ObjectPrefix(remote, ObjectOptions())
    prefix.write_all(dict.fromkeys(STRAYS, b"not megablend's"))
    built = megablend.build(config)
    assert built.index.digest == megablend.build(local).index.digest
    assert samples(config) == samples(local)
    assert megablend.verify(remote).problems == ()
    assert [each.run for each in megablend.list_runs(remote)] == ["demo"]
    megablend.describe(remote)
    assert megablend.gc(remote, older_than_days=1).removed == ()
    assert all(prefix.read_all(STRAYS))

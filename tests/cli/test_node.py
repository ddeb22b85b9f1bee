"""`megablend node`: which mirror a command is about, and what it says where there is none."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from megablend.cli import node
from megablend.mirror.disk.folder import MirrorFolder
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.cli.commands import run
from tests.mirror.nodes import find_node, mirror
from tests.storage.faulty import FaultySource
from tests.storage.objects.conftest import obstore as obstore


@pytest.mark.parametrize("storage", [{}, {"storage": {"s3://b/": {"region": "eu-west-1"}}}])
def test_the_mirror_of_the_environment(
    storage: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"sources": [], **storage}))
    done = run("node", "status", config)
    assert done.returncode == 2
    assert "config.json: has no mirror\n" in done.stderr
    MirrorFolder.create(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGABLEND_MIRROR", "m")
    done = run("node", "status", config)
    assert done.returncode == 2
    assert (
        f"{tmp_path / 'm'}: no node process is running (no process listens on the mirror's socket)\nstart a job"
        in done.stderr
    )
    monkeypatch.setenv("MEGABLEND_MIRROR", "s3://m")
    done = run("node", "status", config)
    assert done.returncode == 2
    assert "MEGABLEND_MIRROR: found 's3://m', expected a path on this machine" in done.stderr
    (tmp_path / "m.yaml").write_text("{}")
    monkeypatch.setenv("MEGABLEND_MIRROR", str(tmp_path / "m.yaml"))
    done = run("node", "status", config)
    assert done.returncode == 2
    assert f"MEGABLEND_MIRROR: {tmp_path}/m.yaml is a file\n" in done.stderr


@pytest.mark.parametrize("command", ["status", "stop", "scrub", "remove"])
def test_a_folder_that_is_no_mirror(command: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    done = run("node", command, tmp_path)
    assert done.returncode == 2
    assert (
        f"{tmp_path}: is not a mirror that this version can use (it has no mirror.json"
        in done.stderr
    )
    assert "\ngive a mirror's folder, or a config" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("command", ["status", "remove"])
def test_a_mirror_that_was_not_begun(command: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"storage": {"mirror": "m"}}))
    done = run("node", command, config)
    assert done.returncode == 2
    assert f"{tmp_path / 'm'}: cannot be used for a mirror: No such file" in done.stderr
    assert not (tmp_path / "m").exists()


@pytest.mark.usefixtures("obstore")
def test_status_scrub_and_stop(tmp_path: Path) -> None:
    content = np.random.default_rng(1).integers(0, 256, 1_000_003, np.uint8).tobytes()
    folder = tmp_path / "m"
    with FaultySource({"d/x": content}) as source, mirror(folder, source.url) as settings:
        url = f"{source.url}/d/x"
        make_storage(objects=parse_options({"mirror": settings})).read(url, 0, len(content))
        process = find_node(folder)
        done = run("node", "status", folder)
        assert f"{folder}: process {process}, megablend " in done.stdout
        assert "\nclients: 2\nheld: 0.001 GB of 1 files\n" in done.stdout
        done = run("node", "scrub", folder)
        assert (done.returncode, done.stdout) == (0, "compared 0.001 GB: 0 blocks were damaged\n")
        (copy,) = (
            each
            for each in folder.rglob("*")
            if each.is_file() and each.stat().st_size >= len(content)
        )
        copy.chmod(0o600)
        with copy.open("r+b") as file:
            file.seek(500_000)
            file.write(bytes([content[500_000] ^ 1]))
        done = run("node", "scrub", folder)
        assert done.returncode == 3
        assert re.fullmatch(
            rf"damaged, and dropped: .*{url}.*\ncompared 0\.001 GB: 1 blocks were damaged\n",
            done.stdout,
        )
        done = run("node", "stop", folder)
        assert (done.returncode, done.stdout) == (0, f"process {process} ends\n")
        deadline = time.monotonic() + 100
        while find_node(folder) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert run("node", "status", folder).returncode == 2


def test_an_answer_that_takes_long_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "_SLOW_SECONDS", 0.01)
    with node._warning_if_slow("/m"):
        while "/m: waiting for its node process; for the reason, see node.log" not in caplog.text:
            time.sleep(0.01)
    monkeypatch.setattr(node, "_SLOW_SECONDS", 60.0)
    with node._warning_if_slow("/quick"):
        pass
    assert "/quick" not in caplog.text

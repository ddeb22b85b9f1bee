"""A cache in an object store that is switched off (moto, behind a relay): what a node with a mirror does then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.find import _open_remote
from megablend.caches.objects.remembered import is_on_one_machine
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectPrefix
from tests.caches.test_remote_cache import configs, samples
from tests.mirror.nodes import kill_node, mirror
from tests.storage.objects.servers.switch import Switch

SAYS = "the store is not responding; using the cache as this node last saw it"


@pytest.fixture
def switch(moto: str, remote_moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    with Switch(moto) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made


@pytest.fixture
def both(
    tmp_path: Path, remote_moto: str, switch: Switch
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A run with a cache in a folder, and the same run with one in the store, of a node with a mirror."""
    with mirror(tmp_path / "mirror", "s3:/") as settings:
        storage = {"mirror": settings, "s3://": {"give_up_after": 1}}
        yield configs(tmp_path, remote_moto, storage=storage)


def restart() -> None:
    """What this process knows of stores is forgotten."""
    _open_remote.cache_clear()


def test_a_run_is_opened_restarted_and_checked(
    both: tuple[dict[str, Any], dict[str, Any]], switch: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    local, config = both
    for each in both:
        megablend.build(each)
    expected = samples(local)
    megablend.skip(config, 8, 16, batch_size=4)
    assert samples(config) == expected
    state = megablend.open(config, consumed_samples=20).state_dict()
    assert megablend.check(config).problems == ()
    assert SAYS not in caplog.text
    switch.turn_off()
    restart()
    with caplog.at_level(logging.WARNING, "megablend"):
        assert samples(config) == expected
        opened = megablend.open(config, state=state)
        assert (opened.consumed_samples, opened.skips.ranges) == (20, ((8, 16),))
        assert megablend.check(config).problems == ()
    assert caplog.text.count(SAYS) == 1


def test_a_run_whose_data_is_in_the_store_too(
    tmp_path: Path, both: tuple[dict[str, Any], dict[str, Any]], remote_moto: str, switch: Switch
) -> None:
    local, config = both
    bucket = remote_moto.removesuffix("/of/x")
    data = ObjectPrefix(f"{bucket}/data", ObjectOptions())
    for path in (tmp_path / "data").rglob("*.*"):
        data.write(str(path.relative_to(tmp_path / "data")), path)
    config["sources"] = [
        each | {"path": each["path"].replace(str(tmp_path), bucket)} for each in config["sources"]
    ]
    megablend.build(local)
    megablend.build(config)
    expected = samples(local)
    assert samples(config) == expected
    assert megablend.check(config).problems == ()
    switch.turn_off()
    restart()
    kill_node(tmp_path / "mirror")
    assert samples(config) == expected
    assert megablend.check(config).problems == ()


def test_what_changes_the_cache_waits_for_the_store(
    both: tuple[dict[str, Any], dict[str, Any]], switch: Switch
) -> None:
    _, config = both
    megablend.build(config)
    samples(config)
    switch.turn_off()
    restart()
    longer = config | {"samples": 60}
    for change in (
        lambda: megablend.build(longer),
        lambda: megablend.skip(config, 8, 16, batch_size=4),
        lambda: megablend.remove_run(config, "default"),
        lambda: megablend.gc(config),
    ):
        with pytest.raises(megablend.CacheError, match="cannot access the cache"):
            change()
    switch.turn_on()
    restart()
    assert megablend.build(longer).ledger.ends == (40, 60)
    assert len(samples(longer)) == 60


def test_it_is_refused_where_it_could_do_harm(
    both: tuple[dict[str, Any], dict[str, Any]], switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = both
    megablend.build(config)
    samples(config)
    switch.turn_off()
    restart()
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(megablend.CacheError, match="cannot access the cache"):
        megablend.open(config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert len(megablend.open(config)) == 40
    # Nor without a mirror
    del config["storage"]["mirror"]
    with pytest.raises(megablend.CacheError, match="cannot access the cache"):
        megablend.open(config)


def test_what_another_node_has_changed_since_is_not_known(
    tmp_path: Path,
    both: tuple[dict[str, Any], dict[str, Any]],
    switch: Switch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, config = both
    longer = config | {"samples": 60}
    megablend.build(config)
    samples(config)
    with monkeypatch.context() as other:
        other.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "other"))
        megablend.build(longer)
        assert len(megablend.open(longer)) == 60
    switch.turn_off()
    restart()
    assert len(megablend.open(config)) == 40
    assert SAYS in caplog.text
    switch.turn_on()
    restart()
    assert len(megablend.open(longer)) == 60


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"WORLD_SIZE": "1"}, True),
        ({"WORLD_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, False),
        ({"SLURM_NNODES": "2"}, False),
    ],
    ids=str,
)
def test_jobs_of_one_machine(environ: dict[str, str], expected: bool) -> None:
    assert is_on_one_machine(environ) == expected

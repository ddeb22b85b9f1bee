"""Records of skipped samples: what is damaged, missing or written by half is an error, and never skips less in silence."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.base import RUNS
from megablend.caches.local import LocalCacheStore
from megablend.errors import CacheError, MegablendError
from megablend.run.ledger_file import load_ledger
from megablend.run.ledger_format import dump_ledger
from tests.runs import documents, make_config, write_source

RANGES = [(8, 16), (40, 48)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose cache tests copy."""
    folder = tmp_path_factory.mktemp("built")
    source = write_source(folder, 0, "parquet", documents(0, 60, 40, 3)) | {"weight": 1}
    given = make_config(folder, [source], samples=96, lanes=4)
    megablend.build(given)
    for start, stop in RANGES:
        megablend.skip(given, start, stop, batch_size=4)
    return given


@pytest.fixture
def config(built: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    given = built | {"cache": str(tmp_path / "here" / "cache")}
    shutil.copytree(built["cache"], given["cache"])
    return given


def skips_path(config: dict[str, Any], run: str = "default") -> Path:
    return Path(config["cache"]) / "runs" / "skips" / f"{run}.json"


def ledger_path(config: dict[str, Any]) -> Path:
    return Path(config["cache"]) / "runs" / "default.json"


def skipped(config: dict[str, Any], run: str = "default") -> list[tuple[int, int]]:
    """What a job skips."""
    return list(megablend.open(config | {"run": run}).skips.ranges)


def outcome(config: dict[str, Any]) -> list[tuple[int, int]] | str:
    """What a job skips, or the error."""
    try:
        return skipped(config, config.get("run", "default"))
    except MegablendError as error:
        return str(error)


@pytest.mark.parametrize("find", [skips_path, ledger_path], ids=["record", "ledger"])
def test_a_flipped_bit_skips_the_same_or_is_an_error(
    config: dict[str, Any], find: Callable[[dict[str, Any]], Path]
) -> None:
    path = find(config)
    data = path.read_bytes()
    errors = 0
    for at in range(0, len(data) * 8, 5):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        found = outcome(config)
        assert found == RANGES or isinstance(found, str), (at, found)
        errors += isinstance(found, str)
        if isinstance(found, str) and find is skips_path:
            assert str(path) in found
            assert any(
                str(path) in problem for problem in megablend.verify(config["cache"]).problems
            )
    assert errors > len(data)
    path.write_bytes(data)
    assert skipped(config) == RANGES


@pytest.mark.parametrize("left", [None, '{"version": 1, "skips": []}', "", "[]"])
def test_a_record_that_is_gone_or_empty_is_an_error_of_open_verify_and_check(
    config: dict[str, Any], left: str | None
) -> None:
    path = skips_path(config)
    path.unlink()
    if left is not None:
        path.write_text(left)
    for call in (megablend.open, megablend.check, megablend.describe, megablend.list_skips):
        with pytest.raises(
            CacheError, match=r"skips/default\.json: .*`megablend skip CONFIG --clear`"
        ):
            call(config)
    assert any(str(path) in problem for problem in megablend.verify(config["cache"]).problems)
    megablend.unskip(config)  # the remedy
    assert skipped(config) == []
    assert megablend.verify(config["cache"]).problems == ()


def test_a_skip_that_is_repeated_is_stored_once(config: dict[str, Any]) -> None:
    before = skips_path(config).read_bytes(), ledger_path(config).read_bytes()
    megablend.skip(config, *RANGES[0], batch_size=4)
    assert (skips_path(config).read_bytes(), ledger_path(config).read_bytes()) == before


def test_records_without_a_checksum_go_on_until_the_next_skip(config: dict[str, Any]) -> None:
    """As commit 71d913b left them: neither the record nor the ledger has one, and the ledger counts nothing."""
    record = json.loads(skips_path(config).read_text())
    del record["checksum"]
    skips_path(config).write_text(json.dumps(record, indent=1))
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    ledger_path(config).write_text(dump_ledger("default", ledger.stages))
    assert skipped(config) == RANGES
    verified = megablend.verify(config["cache"])
    assert verified.problems == ()
    assert "skips/default.json: has no checksum" in "".join(verified.notes)
    megablend.build(config | {"samples": 192})  # does not lose them
    assert skipped(config | {"samples": 192}) == RANGES
    megablend.skip(config | {"samples": 192}, 60, 64, batch_size=4)
    assert skipped(config | {"samples": 192}) == [*RANGES, (60, 64)]
    assert megablend.verify(config["cache"]).notes == ()
    assert "checksum" in json.loads(skips_path(config).read_text())


def test_a_record_that_an_earlier_release_has_written_since_is_refused(
    config: dict[str, Any],
) -> None:
    """Its `skip` keeps the ledger, which counts the ranges of before, and writes no checksum."""
    record = json.loads(skips_path(config).read_text())
    del record["checksum"]
    skips_path(config).write_text(json.dumps(record))
    with pytest.raises(
        CacheError, match=r"without a checksum: it is damaged, or an earlier release has written it"
    ):
        megablend.open(config)
    megablend.unskip(config)
    for start, stop in RANGES:
        megablend.skip(config, start, stop, batch_size=4)
    assert skipped(config) == RANGES


def test_the_ledger_counts_through_builds_renames_and_resets(config: dict[str, Any]) -> None:
    longer = config | {"samples": 192}
    digest = megablend.build(longer).ledger.digest
    assert skipped(longer) == RANGES
    megablend.rename_run(config["cache"], "default", "new")
    assert skipped(longer, "new") == RANGES
    assert not skips_path(config).exists()
    named = longer | {"run": "new"}
    skips_path(config, "new").rename(skips_path(config, "aside"))
    with pytest.raises(CacheError, match="found 0 ranges of skipped samples, expected 2"):
        megablend.open(named)
    skips_path(config, "aside").rename(skips_path(config, "new"))
    megablend.reset_run(config["cache"], "new")
    assert megablend.build(named).ledger.digest != digest  # planned in one piece now
    assert skipped(longer, "new") == []  # another plan
    megablend.remove_run(config["cache"], "new")
    assert not skips_path(config, "new").exists()
    megablend.build(named)
    assert skipped(longer, "new") == []


def test_a_rename_that_fails_leaves_no_skips_to_another_run(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalCacheStore.write_record

    def fill(self: LocalCacheStore, kind: str, *arguments: Any) -> None:
        if kind == RUNS:
            raise CacheError("no space left on device")
        write(self, kind, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(LocalCacheStore, "write_record", fill)
        with pytest.raises(CacheError, match="no space"):
            megablend.rename_run(config["cache"], "default", "new")
    megablend.remove_run(config["cache"], "default")
    megablend.build(config | {"run": "new"})
    assert skipped(config, "new") == []


def changes(config: dict[str, Any]) -> dict[str, tuple[Callable[[], Any], list[tuple[int, int]]]]:
    return {
        "skip": (lambda: megablend.skip(config, 60, 64, batch_size=4), [*RANGES, (60, 64)]),
        "clear": (lambda: megablend.unskip(config), []),
        "build": (lambda: megablend.build(config | {"samples": 192}), RANGES),
        "rename": (lambda: megablend.rename_run(config["cache"], "default", "new"), RANGES),
        "reset": (lambda: megablend.reset_run(config["cache"], "default"), RANGES),
        "remove": (lambda: megablend.remove_run(config["cache"], "default"), []),
    }


@pytest.mark.parametrize("change", ["skip", "clear", "build", "rename", "reset", "remove"])
@pytest.mark.parametrize("writes", range(5))
def test_a_crash_between_two_writes_never_skips_less_in_silence(
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    writes: int,
) -> None:
    """The process dies before a write or removal of a record; what jobs see is as before, as after, or an error."""
    call, after = changes(config)[change]
    done = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            if done == writes:
                raise KeyboardInterrupt
            done += 1
            return original(*arguments, **named)

        return write

    with monkeypatch.context() as patch:
        for name in ("write_record", "remove_record", "set_aside_record"):
            patch.setattr(LocalCacheStore, name, dying(getattr(LocalCacheStore, name)))
        with contextlib.suppress(KeyboardInterrupt):
            call()
    for run in ("default", "new"):
        if load_ledger(config["cache"], run) is None:
            continue
        found = outcome(config | {"run": run})
        if isinstance(found, str):
            assert change in ("rename", "remove")
            assert "restore it from a backup" in found
        else:
            assert found in (RANGES, after), (change, writes, run)
    if done < writes or change in ("reset", "remove"):
        return
    if load_ledger(config["cache"], "default") is not None:
        call()  # completes it
    run = "new" if change == "rename" else "default"
    longer = config | {"run": run} | ({"samples": 192} if change == "build" else {})
    assert list(megablend.open(longer).skips.ranges) == after
    shutil.rmtree(tmp_path / "here")

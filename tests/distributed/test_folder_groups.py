"""Ranks that agree: values and errors arrive everywhere; folders that are one are found. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megablend.distributed import folder_groups as nodes
from megablend.distributed.fail_together import FailTogether, Subgroup
from megablend.distributed.folder_groups import ranks_sharing_folder
from megablend.errors import CacheError, ConfigError, CorruptFileError, LaunchError
from tests.megatron.meeting import Meeting, on_ranks


def test_values_are_exchanged() -> None:
    def work(launch: FailTogether) -> Any:
        launch.post((launch.rank, "done"))
        launch.barrier()
        return (
            launch.bcast(launch.rank + 10),
            launch.gather(launch.rank),
            launch.allgather(launch.rank * 2),
            launch.posts(),
        )

    assert on_ranks(3, work) == [
        (10, [0, 1, 2], [0, 2, 4], [(0, (0, "done"))]),
        (10, [], [0, 2, 4], []),
        (10, [], [0, 2, 4], []),
    ]


class LocalError(Exception):
    """Cannot be pickled."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(f"{path}: {number}")


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            CorruptFileError("/d/a.idx", "truncated", offset=3),
            CorruptFileError,
            "/d/a.idx at byte 3: truncated",
        ),
        (CacheError("full"), CacheError, "full"),
        (ZeroDivisionError("by nothing"), ZeroDivisionError, "by nothing"),
        (LocalError(Path("/d"), 3), RuntimeError, "LocalError: /d: 3"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(
    error: Exception, raised: type[Exception], message: str
) -> None:
    def work(launch: FailTogether) -> None:
        try:
            launch.barrier()
            if launch.rank == 1:
                raise error
            launch.bcast("never arrives")
        except Exception as failure:
            launch.abort(failure)  # on those that were notified, too: it must not wait for anybody

    found = on_ranks(4, work)
    assert found[1] is error
    for other in (found[0], *found[2:]):
        assert type(other) is raised
        assert str(other) == message
        assert isinstance(other.__cause__, LaunchError)
        assert str(other.__cause__) == "raised on rank 1 of 4"


def in_groups(work: Callable[[Subgroup, int], Any]) -> list[Any]:
    """What five ranks return: two groups of two at their own work, and one rank that has none."""
    groups = [Meeting(2), Meeting(2)]

    def one(world: FailTogether) -> Any:
        number, rank = divmod(world.rank, 2)
        found = None if number == 2 else work(Subgroup(groups[number].launch(rank), world), number)
        world.finish()
        return found, world.allgather(world.rank)

    return on_ranks(5, one)


def test_groups_talk_apart_as_long_as_they_like() -> None:
    def work(launch: Subgroup, number: int) -> Any:
        return [launch.allgather((number, launch.rank, k)) for k in range(1 + 5 * number)]

    expected = [
        [[(number, 0, k), (number, 1, k)] for k in range(1 + 5 * number)] for number in (0, 0, 1, 1)
    ]
    assert on_all(in_groups(work)) == [*expected, None]


def on_all(found: list[Any]) -> list[Any]:
    """What each rank found by itself; together they found all."""
    assert [all_ranks for _, all_ranks in found] == [list(range(5))] * 5
    return [own for own, _ in found]


@pytest.mark.parametrize("others", [0, 1, 30])
def test_an_error_in_one_group_is_raised_in_all(others: int) -> None:
    """Whether the other group has done its part, or is at work."""

    def work(launch: Subgroup, number: int) -> None:
        for k in range(others if number == 0 else 10):
            if number == 1 and launch.rank == 1 and k == 5:
                launch.abort(CacheError("full"))
            launch.allgather(k)

    found = in_groups(work)
    assert [type(each) for each in found] == [CacheError] * 5
    assert {str(each) for each in found} == {"full"}


@pytest.mark.parametrize("shared_fs", ["auto", "yes", "no"])
def test_ranks_of_one_folder_build_together(tmp_path: Path, shared_fs: str) -> None:
    folders: list[Path | None] = [
        tmp_path / name if name else None for name in ("a", "a", "", "b", "b", "a", "c")
    ]
    (tmp_path / "link").symlink_to(tmp_path / "a")
    folders[5] = tmp_path / "link"
    found = on_ranks(
        7, lambda launch: ranks_sharing_folder(launch, folders[launch.rank], shared_fs)
    )
    apart = [[0, 1, 5], [0, 1, 5], [], [3, 4], [3, 4], [0, 1, 5], [6]]
    together = [[0, 1, 3, 4, 5, 6] if folder else [] for folder in folders]
    assert found == (together if shared_fs == "yes" else apart)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_folders_that_machines_share_are_found_by_nonce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that look like those of four machines: two share a folder."""
    folders = [tmp_path / "shared", tmp_path / "own", tmp_path / "shared", tmp_path / "other"]
    machine = threading.local()

    def place(cache: Path) -> tuple[Path, nodes._Place]:
        cache.mkdir(exist_ok=True)
        return cache, nodes._Place(machine=machine.name, device=0, inode=0, rest=())

    monkeypatch.setattr("megablend.distributed.folder_groups._find_place", place)

    def work(launch: FailTogether) -> list[int]:
        machine.name = f"machine {launch.rank}"
        return ranks_sharing_folder(launch, folders[launch.rank], "auto")

    assert on_ranks(4, work) == [[0, 2], [1], [0, 2], [3]]


def test_a_word_that_is_none() -> None:
    found = on_ranks(2, lambda launch: ranks_sharing_folder(launch, None, "maybe"))
    for error in found:
        assert isinstance(error, ConfigError)
        assert "shared_fs is 'maybe'; choose one of auto, yes, no" in str(error)

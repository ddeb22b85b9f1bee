"""What is to be held, and what of it fits."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np

from megablend.mirror.catalog.catalog import LATEST, Revision, Want
from megablend.mirror.catalog.reconcile import FileSizes, Goal, find_short, list_goals


def make_revision(dataset: str, digest: str, added: float = 0.0) -> Revision:
    return Revision(
        dataset=dataset, digest=digest, num_files=1, num_bytes=1, added=added, sources=()
    )


def make_want(dataset: str, revision: str, since: float = 0.0, *, is_pinned: bool = False) -> Want:
    return Want(dataset=dataset, revision=revision, since=since, is_pinned=is_pinned)


def list_digests(wants: list[Want], complete: set[str], folders: Collection[str] = ()) -> list[str]:
    known = {
        "a": [make_revision("a", f"a{i}", i) for i in range(4)],
        "b": [make_revision("b", "b0")],
    }
    about = [
        (
            want,
            [
                each
                for each in known.get(want.dataset, [])
                if want.revision in (LATEST, each.digest)
            ],
        )
        for want in wants
    ]
    goals = list_goals(
        about,
        {(want.name, digest) for want, _ in about for digest in complete},
        lambda revision: revision.digest in folders,
    )
    return [each.revision.digest for each in goals]


def test_the_latest_revision_and_until_it_is_complete_the_one_before() -> None:
    wants = [make_want("a", LATEST)]
    assert list_digests(wants, set()) == ["a3"]
    assert list_digests(wants, {"a0", "a1"}) == ["a1", "a3"]
    assert list_digests(wants, {"a0", "a1", "a3"}) == ["a3"]
    assert list_digests([make_want("a", "a1")], {"a3"}) == ["a1"]
    assert list_digests([make_want("a", "gone"), make_want("c", LATEST)], set()) == []


def test_pinned_comes_first_then_what_was_wanted_first() -> None:
    wants = [
        make_want("a", "a0", 1),
        make_want("a", "a1", 0),
        make_want("b", "b0", 3, is_pinned=True),
        make_want("a", "a2", 2),
    ]
    assert list_digests(wants, set()) == ["b0", "a1", "a0", "a2"]
    # Programs map the files of a folder
    assert list_digests(wants, set(), {"a2"}) == ["a2", "b0", "a1", "a0"]


def find(sizes: list[dict[str, int]], pinned: set[int], capacity: int, jobs: int) -> list[int]:
    goals = [
        Goal(make_want("a", LATEST), make_revision("a", str(i)), i in pinned)
        for i in range(len(sizes))
    ]
    files = [
        FileSizes.of(
            np.array([ord(name) for name in each], np.uint64), np.array([*each.values()], np.int64)
        )
        for each in sizes
    ]
    return find_short(goals, files, capacity, jobs)


def test_what_does_not_fit_takes_no_room() -> None:
    assert find([{"x": 60}, {"y": 60}, {"z": 40}], set(), 100, 0) == [0, 20, 0]
    # Equal files count once
    assert find([{"x": 60}, {"x": 60, "y": 40}], set(), 100, 0) == [0, 0]
    # A share of a file, and all of it
    assert find([{"x": 60}, {"x": 100}, {"y": 1}], set(), 100, 0) == [0, 0, 1]
    assert find([{"x": 60}], set(), 100, 50) == [10]
    assert find([{"x": 60}, {"y": 40}], {0}, 100, 50) == [0, 40]
    # Others may have left less than is pinned
    assert find([{"x": 60}, {"y": 40}], {0}, 50, 0) == [10, 40]
    assert find([{}], set(), 0, 10) == [0]


def test_any_goals() -> None:
    """Against a count of single bytes, each of which is held once."""
    draw = random.Random(5)
    for _ in range(300):
        sizes = [
            {name: draw.randrange(8) for name in draw.sample("abcd", draw.randrange(4))}
            for _ in range(draw.randrange(5))
        ]
        pinned = set(range(draw.randrange(len(sizes) + 1)))
        capacity = draw.randrange(30)
        jobs = draw.randrange(6)
        held: set[tuple[str, int]] = set()
        expected = []
        for i, files in enumerate(sizes):
            new = {(name, at) for name, size in files.items() for at in range(size)} - held
            room = max(0, capacity - len(held) - (0 if i in pinned else jobs))
            expected.append(max(0, len(new) - room))
            if i in pinned or not expected[-1]:
                held |= new
        assert find(sizes, pinned, capacity, jobs) == expected

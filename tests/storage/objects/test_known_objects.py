"""The versions of objects that a storage knows, and passes on to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from megablend.storage.objects.known_objects import KnownObjects
from megablend.storage.objects.object_version import ObjectVersion


def test_versions_that_are_kept_are_not_replaced_by_others() -> None:
    old = ObjectVersion(5000, "a", 0)
    new = ObjectVersion(5000, "b", 0)
    known = KnownObjects()
    other = KnownObjects()
    assert known.keep("x", old) == old
    assert known.keep("x", new) == old
    other.add(pickle.loads(pickle.dumps(known.take_new())))
    assert other.get("x") == old
    assert known.take_new() == other.take_new() == {}
    known.replace({"x": new})
    assert known.get("x") == new
    other.add(known.take_new())
    assert other.get("x") == old
    other.forget("x")
    assert other.get("x") is None


def test_what_is_found_out_while_it_is_taken_is_taken_next() -> None:
    known = KnownObjects()

    class Met(set[str]):
        """Another thread meets an object as soon as these were listed."""

        def __iter__(self) -> Iterator[str]:
            yield from tuple(super().__iter__())
            known.keep("y", ObjectVersion(1, "y", 0))

    known.keep("x", ObjectVersion(1, "x", 0))
    known._new = Met(known._new)
    assert list(known.take_new()) == ["x"]
    assert list(known.take_new()) == ["y"]

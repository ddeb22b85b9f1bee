"""Messages of errors."""

from __future__ import annotations

from megablend.errors import did_you_mean


def test_a_name_that_begins_with_what_was_given_is_suggested_first() -> None:
    nodes = [f"node{i}:7171" for i in range(4)]
    for i in range(4):
        assert did_you_mean(f"node{i}", nodes) == f"did you mean 'node{i}:7171'?"
    assert did_you_mean("nod3:7171", nodes) == "did you mean 'node3:7171'?"
    assert did_you_mean("x", nodes) == ""

"""Which view is proposed, by nodes that are there: a pure function."""

from __future__ import annotations

import random

from megablend.mirror.members.views import MOST_EARLIER, View, propose

ABC = View(3, ("a", "b", "c"), (("a", "b"),))


def test_the_first_view_waits_for_the_nodes_that_are_expected() -> None:
    assert propose(None, None, ["b", "a"], expected=3, keeps=True) is None
    assert propose(None, None, ["b", "c", "a"], expected=3, keeps=True) == View(1, ("a", "b", "c"))
    assert propose(None, None, "dcab", expected=3, keeps=False) == View(1, tuple("abcd"))


def test_a_view_of_the_nodes_that_there_are_stays() -> None:
    for keeps in (False, True):
        assert propose(ABC, ABC, "cba", expected=3, keeps=keeps) is None
        assert propose(ABC, None, "cba", expected=9, keeps=keeps) is None


def test_nodes_that_come_are_added_and_those_that_go_are_left_out() -> None:
    expected = View(4, ("a", "c", "d"), (("a", "b", "c"), ("a", "b")))
    assert propose(ABC, ABC, "adc", expected=3, keeps=False) == expected


def test_nobody_is_left_out_while_etcd_was_away_a_moment_ago() -> None:
    assert propose(ABC, ABC, "a", expected=3, keeps=True) is None
    assert propose(ABC, ABC, [], expected=3, keeps=True) is None
    found = propose(ABC, ABC, "ad", expected=3, keeps=True)
    assert found == View(4, tuple("abcd"), (("a", "b", "c"), ("a", "b")))


def test_there_is_no_view_of_nobody() -> None:
    assert propose(ABC, ABC, [], expected=3, keeps=False) is None


def test_what_etcd_has_lost_is_put_back_under_a_new_number() -> None:
    earlier = (("a", "b", "c"), ("a", "b"))
    for lost in (None, View(2, ("a", "b")), View(3, ("a",))):
        assert propose(lost, ABC, "a", expected=3, keeps=True) == View(4, tuple("abc"), earlier)
        assert propose(lost, ABC, "ab", expected=3, keeps=False) == View(4, tuple("ab"), earlier)
    # Another node has done so
    new = View(4, tuple("abc"), earlier)
    assert propose(new, ABC, "abc", expected=3, keeps=True) is None


def test_a_thousand_nodes_that_come_and_go_agree_in_few_steps() -> None:
    rng = random.Random(0)
    names = [f"node{i:04}:7171" for i in range(1000)]
    live = set(names[:600])
    view = propose(None, None, live, expected=600, keeps=True)
    for step in range(50):
        assert view is not None
        assert view.number == step + 1
        assert list(view.names) == sorted(live)
        assert len(view.earlier) == min(step, MOST_EARLIER)
        known = view
        # Whoever proposes, proposes the same
        live ^= set(rng.sample(names, rng.randrange(1, 300)))
        found = {
            propose(known, each, rng.sample(sorted(live), len(live)), expected=600, keeps=False)
            for each in (known, None)
        }
        assert len(found) == 1
        (view,) = found

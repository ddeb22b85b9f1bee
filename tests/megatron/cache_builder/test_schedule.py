from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import ConfigError
from megablend.megatron.cache_builder.schedule import (
    CostEstimate,
    MemoryGate,
    NodeResources,
    assign_jobs,
    forecast,
)
from tests.examples import examples

MB = 1 << 20


def need(memory: int, cost: int = 10**9) -> CostEstimate:
    return CostEstimate(memory=memory, cost=cost)


def place(host: str, memory: int = 100 * MB, cores: int = 4) -> NodeResources:
    return NodeResources(host=host, memory=memory, cores=frozenset(range(cores)))


@examples(200)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10**9)), max_size=30),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=12),
)
def test_every_job_is_dealt_once_and_fits_its_rank(
    jobs: list[tuple[int, int]], hosts: list[str]
) -> None:
    needs = [need(memory * MB, cost) for memory, cost in jobs]
    places = [place(host) for host in hosts]
    shares = assign_jobs(needs, [str(i) for i in range(len(needs))], places)
    assert sorted(job for share in shares for job in share.jobs) == list(range(len(needs)))
    for host in set(hosts):
        working = [
            share for share, at in zip(shares, hosts, strict=True) if at == host and share.jobs
        ]
        assert sum(share.memory for share in working) <= 100 * MB
        assert all(needs[job].memory <= share.memory for share in working for job in share.jobs)
    expected = forecast(needs, shares, places)
    assert expected.memory <= 100 * MB
    assert expected.ranks == sum(bool(share.jobs) for share in shares)


def test_ranks_rest_where_memory_does_not_hold_all() -> None:
    shares = assign_jobs([need(40 * MB)] * 6, list("abcdef"), [place("x")] * 4 + [place("y")])
    assert [len(share.jobs) for share in shares] == [2, 2, 0, 0, 2]
    assert [share.threads for share in shares] == [2, 2, 2, 2, 4]


@pytest.mark.parametrize("free", [(99, 100), (100, 99)])
def test_a_node_has_what_the_rank_that_found_least_free_says(free: tuple[int, int]) -> None:
    shares = assign_jobs(
        [need(50 * MB)] * 4, list("abcd"), [place("x", memory * MB) for memory in free]
    )
    assert [(len(share.jobs), share.memory) for share in shares] == [(4, 99 * MB), (0, 99 * MB)]


def test_ranks_that_are_bound_to_cores_have_those() -> None:
    places = [NodeResources(host="x", memory=MB, cores=frozenset({core})) for core in range(3)]
    assert [share.threads for share in assign_jobs([need(1)] * 3, list("abc"), places)] == [1, 1, 1]


def test_a_job_that_no_node_holds_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"big: its arrays need 104,857,601 bytes of memory, but x has only 104,857,600",
    ):
        assign_jobs([need(MB), need(100 * MB + 1)], ["small", "big"], [place("x")])


def test_the_gate_keeps_to_its_bound() -> None:
    gate = MemoryGate(10)
    held = 0
    most = 0
    lock = threading.Lock()

    def work(memory: int) -> None:
        nonlocal held, most
        for _ in range(200):
            with gate.held(memory):
                with lock:
                    held += memory
                    most = max(most, held)
                with lock:
                    held -= memory

    threads = [threading.Thread(target=work, args=[memory]) for memory in (1, 4, 6, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 9 <= most <= 10

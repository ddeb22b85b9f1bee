"""A node's numbers, as Prometheus reads them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megablend.mirror.node.metrics import format_metrics

_LABEL = r'[a-z]+="(?:[^"\\\n]|\\[\\"n])*"'
_SAMPLE = re.compile(
    rf"(megablend_[a-z_]+)(\{{{_LABEL}(?:,{_LABEL})*\}})? (-?[0-9.]+(?:e[+-]?[0-9]+)?)"
)
STATUS: dict[str, Any] = {
    "version": "0.2.0",
    "started": 1764132000.25,
    "service": True,
    "clients": 0,
    "held_bytes": 8192,
    "files": 3,
    "source_bytes": 5,
    "peer_bytes": 7,
    "read_bytes": None,
    "evicted_bytes": 4096,
    "source_requests": {},
    "source_pauses": {},
    "wanted": None,
    "listed": None,
    "cluster": None,
}
CLUSTER = {"nodes": 3, "away": 1, "formed": False, "sent_bytes": 9, "bad": {}}


def parse_metrics(text: str) -> dict[str, float]:
    """Samples by name, without `megablend_`, and labels.

    The format is checked line by line: a family has a HELP and a TYPE, once, before its samples; a counter ends with _total,
    nothing else does; no sample comes twice. Prometheus's own parser finds the same.
    """
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            name, _, about = line.removeprefix("# HELP ").partition(" ")
            assert about.endswith(".")
            assert name not in kinds
            kind = next(lines).removeprefix(f"# TYPE {name} ")
            assert kind == ("counter" if name.endswith("_total") else "gauge")
            kinds[name] = kind
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample is not None, line
        assert sample[1] == list(kinds)[-1]
        key = sample[1].removeprefix("megablend_") + (sample[2] or "")
        assert key not in found
        found[key] = float(sample[3])
    families = list(text_string_to_metric_families(text))
    assert {each.name.removesuffix("_total") for each in families} == {
        each.removesuffix("_total") for each in kinds
    }
    parsed = [sample for family in families for sample in family.samples]
    assert [each.value for each in parsed] == list(found.values())
    return found


def test_one_machine() -> None:
    found = parse_metrics(format_metrics(STATUS))
    assert found == {
        'build_info{version="0.2.0"}': 1,
        "start_time_seconds": 1764132000.25,
        "service": 1,
        "clients": 0,
        "pages_held": 2,
        "files_held": 3,
        'bytes_total{from="source"}': 5,
        'bytes_total{from="peers"}': 7,
        "evicted_bytes_total": 4096,
        "nodes": 1,
        "nodes_away": 0,
    }


def test_a_cluster_with_datasets() -> None:
    wanted = {"bytes": 10, "missing": 4, "short": 1}
    cluster = CLUSTER | {"bytes_to_copy": 17, "copies": 2, "view": 12, "bad": {"node1:7171": 2}}
    requests = {"s3": {"ok": 4, "failed": 1}, "https": {"ok": 1}}
    status = STATUS | {"read_bytes": 6, "source_requests": requests}
    status |= {"source_pauses": {"s3://b": 4.5}}
    listed = {"failing": 1, "listings": {"same": 3, "failed": 2}}
    status |= {"wanted": wanted, "cluster": cluster, "listed": listed}
    found = parse_metrics(format_metrics(status))
    assert (found["sources_failing"], found['listings_total{result="failed"}']) == (1, 2)
    assert found['sent_bytes_total{to="nodes"}'] == 9
    assert found['sent_bytes_total{to="readers"}'] == 6
    assert found['source_requests_total{provider="s3",status="failed"}'] == 1
    assert found['source_requests_total{provider="https",status="ok"}'] == 1
    assert found['source_pause_seconds{source="s3://b"}'] == 4.5
    assert found['bad_total{peer="node1:7171"}'] == 2
    assert [found[name] for name in ("debts_bytes", "view", "formed", "copies")] == [17, 12, 0, 2]
    assert [found[f"wanted{name}_bytes"] for name in ("", "_missing", "_short")] == [10, 4, 1]


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", 'x",y="', "\u00e9{}"])
def test_labels_are_escaped(name: str) -> None:
    text = format_metrics(STATUS | {"cluster": CLUSTER | {"bad": {name: 1}}})
    parse_metrics(text)
    (family,) = (each for each in text_string_to_metric_families(text) if "bad" in each.name)
    assert [each.labels for each in family.samples] == [{"peer": name}]

"""Formats the status of a node as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megablend.mirror.disk.pages import PAGE_BYTES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class _Family(NamedTuple):
    """A metric family: samples with the same name and label names."""

    name: str
    """The name. The suffix `_total` marks a counter, which starts at 0 with the process."""
    about: str
    path: str
    """The key in the status. A dotted key, `a.b`, is the key `b` of the mapping `a`."""
    labels: tuple[str, ...] = ()
    """The names of the labels: see `_list_samples`."""


_FAMILIES = (
    _Family("build_info", "Version of megablend.", "versions", ("version",)),
    _Family("start_time_seconds", "Start time of the process, in seconds since 1970.", "started"),
    _Family("service", "Whether the process outlives its clients.", "service"),
    _Family("clients", "Connected processes.", "clients"),
    _Family("pages_held", "Pages of 4 KiB that are held.", "held_pages"),
    _Family("files_held", "Files of which pages are held.", "files"),
    _Family("bytes_total", "Bytes that were received.", "got", ("from",)),
    _Family("sent_bytes_total", "Bytes that were sent to others.", "sent", ("to",)),
    _Family("evicted_bytes_total", "Bytes that were evicted.", "evicted_bytes"),
    _Family(
        "source_requests_total",
        "Reads of up to 1 MiB from the source, by result.",
        "source_requests",
        ("provider", "status"),
    ),
    _Family(
        "source_pause_seconds",
        "Seconds for which a busy source is not sent requests.",
        "source_pauses",
        ("source",),
    ),
    _Family("bad_total", "Discarded responses with wrong bytes.", "cluster.bad", ("peer",)),
    _Family("nodes", "Nodes of the cluster, including this one.", "cluster.nodes"),
    _Family("nodes_away", "Nodes that do not respond.", "cluster.away"),
    _Family("formed", "Whether the nodes work together.", "cluster.formed"),
    _Family("view", "Number of the cluster's view.", "cluster.view"),
    _Family("copies", "Number of nodes that hold each page.", "cluster.copies"),
    _Family("debts_bytes", "Bytes of copies yet to be fetched.", "cluster.bytes_to_copy"),
    _Family("wanted_bytes", "Bytes of datasets to be held by this node.", "wanted.bytes"),
    _Family(
        "wanted_missing_bytes", "Bytes of these datasets that are not held yet.", "wanted.missing"
    ),
    _Family("wanted_short_bytes", "Bytes of these datasets without room.", "wanted.short"),
    _Family(
        "listings_total",
        "Sources of datasets that were listed again, by result.",
        "listed.listings",
        ("result",),
    ),
    _Family("sources_failing", "Sources whose last listing failed.", "listed.failing"),
)


def format_metrics(status: Mapping[str, Any]) -> str:
    """Format the result of `Node.get_status` in the text format of Prometheus."""
    cluster = status["cluster"] or {"nodes": 1, "away": 0}
    numbers = {
        **status,
        "versions": {status["version"]: 1},
        "held_pages": status["held_bytes"] // PAGE_BYTES,
        "got": {"source": status["source_bytes"], "peers": status["peer_bytes"]},
        "sent": {"nodes": cluster.get("sent_bytes"), "readers": status["read_bytes"]},
        "cluster": cluster,
    }
    lines: list[str] = []
    for family in _FAMILIES:
        samples = list(_list_samples(family.labels, _find(numbers, family.path)))
        if samples:
            metric_type = "counter" if family.name.endswith("_total") else "gauge"
            lines.append(f"# HELP megablend_{family.name} {family.about}")
            lines.append(f"# TYPE megablend_{family.name} {metric_type}")
        lines += [f"megablend_{family.name}{pairs} {number}" for pairs, number in samples]
    return "".join(f"{line}\n" for line in lines)


def _find(numbers: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path in nested mappings; None if there is none."""
    value: Any = numbers
    for key in path.split("."):
        value = (value or {}).get(key)
    return value


def _list_samples(
    labels: tuple[str, ...], value: Any, pairs: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the formatted labels and the number of each sample of a metric. If there are labels,
    `value` is a mapping from values of the first label to mappings for the next label, and so on.
    None has no samples."""
    if value is None:
        return
    if labels:
        for text, inner in value.items():
            pair = f'{labels[0]}="{text.translate(_ESCAPES)}"'
            yield from _list_samples(labels[1:], inner, (*pairs, pair))
    else:
        number = +value  # 1 for True
        yield f"{{{','.join(pairs)}}}" if pairs else "", number

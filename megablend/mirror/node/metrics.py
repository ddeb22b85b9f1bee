"""The numbers of a node as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megablend.mirror.disk.pages import PAGE_BYTES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class _Family(NamedTuple):
    """Numbers that have the same name and labels."""

    name: str
    """A name that ends with `_total` is that of a counter, which begins at 0 when the process
    starts."""
    about: str
    path: str
    """The key of the numbers in the status; with a dot, that of a mapping in it comes first."""
    labels: tuple[str, ...] = ()
    """See `_list_samples`."""


_FAMILIES = (
    _Family("build_info", "The version that runs.", "versions", ("version",)),
    _Family("start_time_seconds", "When it started, since 1970.", "started"),
    _Family("service", "Whether it outlives its clients.", "service"),
    _Family("clients", "Processes that are connected.", "clients"),
    _Family("pages_held", "Pages of 4 KiB.", "held_pages"),
    _Family("files_held", "Files with such pages.", "files"),
    _Family("bytes_total", "Bytes that were got.", "got", ("from",)),
    _Family("sent_bytes_total", "Bytes that were given to others.", "sent", ("to",)),
    _Family("evicted_bytes_total", "Bytes that were evicted.", "evicted_bytes"),
    _Family(
        "source_requests_total",
        "Reads of the source of up to 1 MiB, and how they ended.",
        "source_requests",
        ("provider", "status"),
    ),
    _Family(
        "source_pause_seconds",
        "For so long a busy source is left alone, as it asked for.",
        "source_pauses",
        ("source",),
    ),
    _Family("bad_total", "Answers with wrong bytes.", "cluster.bad", ("peer",)),
    _Family("nodes", "Of the cluster, this one too.", "cluster.nodes"),
    _Family("nodes_away", "Nodes that do not respond.", "cluster.away"),
    _Family("formed", "Whether nodes work together.", "cluster.formed"),
    _Family("view", "Number of the view of nodes.", "cluster.view"),
    _Family("copies", "On how many nodes pages shall be.", "cluster.copies"),
    _Family("debts_bytes", "Copies to get from other nodes.", "cluster.bytes_to_copy"),
    _Family("wanted_bytes", "Of datasets, this node's to hold.", "wanted.bytes"),
    _Family("wanted_missing_bytes", "Of these, not held.", "wanted.missing"),
    _Family("wanted_short_bytes", "Of these, without room.", "wanted.short"),
    _Family(
        "listings_total",
        "Sources that were listed again: as before, a new revision, or nothing changed for a reason.",
        "listed.listings",
        ("result",),
    ),
    _Family("sources_failing", "Of datasets, when last listed by this node.", "listed.failing"),
)


def format_metrics(status: Mapping[str, Any]) -> str:
    """Format the result of `Node.get_status` as Prometheus's text."""
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
            kind = "counter" if family.name.endswith("_total") else "gauge"
            lines.append(f"# HELP megablend_{family.name} {family.about}")
            lines.append(f"# TYPE megablend_{family.name} {kind}")
        lines += [f"megablend_{family.name}{pairs} {number}" for pairs, number in samples]
    return "".join(f"{line}\n" for line in lines)


def _find(numbers: Mapping[str, Any], path: str) -> Any:
    """Return what has a path; None if there is nothing."""
    found: Any = numbers
    for key in path.split("."):
        found = (found or {}).get(key)
    return found


def _list_samples(
    labels: tuple[str, ...], value: Any, pairs: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """List the labels and the number of each sample. A value with labels is a mapping from texts of
    the first label to values with the other labels; None has no samples."""
    if value is None:
        return
    if labels:
        for text, inner in value.items():
            pair = f'{labels[0]}="{text.translate(_ESCAPES)}"'
            yield from _list_samples(labels[1:], inner, (*pairs, pair))
    else:
        number = +value  # 1 for True
        yield f"{{{','.join(pairs)}}}" if pairs else "", number

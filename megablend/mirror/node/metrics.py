"""The numbers of a node as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megablend.mirror.disk.pages import PAGE_BYTES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def format_metrics(status: Mapping[str, Any]) -> str:
    """Format the result of `Node.get_status` as Prometheus's text. Names that end with `_total` are
    counters, which begin at 0 when the process starts."""
    cluster = status["cluster"] or {}
    wanted = status["wanted"] or {}
    listed = status["listed"] or {}
    sent = {"nodes": cluster.get("sent_bytes"), "readers": status["read_bytes"]}
    # For each name its help, its labels and its value; see `_list_samples`
    families: dict[str, tuple[str, tuple[str, ...], Any]] = {
        "build_info": ("The version that runs.", ("version",), {status["version"]: 1}),
        "start_time_seconds": ("When it started, since 1970.", (), status["started"]),
        "service": ("Whether it outlives its clients.", (), status["service"]),
        "clients": ("Processes that are connected.", (), status["clients"]),
        "pages_held": ("Pages of 4 KiB.", (), status["held_bytes"] // PAGE_BYTES),
        "files_held": ("Files with such pages.", (), status["files"]),
        "bytes_total": (
            "Bytes that were got.",
            ("from",),
            {"source": status["source_bytes"], "peers": status["peer_bytes"]},
        ),
        "sent_bytes_total": ("Bytes that were given to others.", ("to",), sent),
        "evicted_bytes_total": ("Bytes that were evicted.", (), status["evicted_bytes"]),
        "source_requests_total": (
            "Reads of the source of up to 1 MiB, and how they ended.",
            ("provider", "status"),
            status["source_requests"],
        ),
        "source_pause_seconds": (
            "For so long a busy source is left alone, as it asked for.",
            ("source",),
            status["source_pauses"],
        ),
        "bad_total": ("Answers with wrong bytes.", ("peer",), cluster.get("bad")),
        "nodes": ("Of the cluster, this one too.", (), cluster.get("nodes", 1)),
        "nodes_away": ("Nodes that do not respond.", (), cluster.get("away", 0)),
        "formed": ("Whether nodes work together.", (), cluster.get("formed")),
        "view": ("Number of the view of nodes.", (), cluster.get("view")),
        "copies": ("On how many nodes pages shall be.", (), cluster.get("copies")),
        "debts_bytes": ("Copies to get from other nodes.", (), cluster.get("bytes_to_copy")),
        "wanted_bytes": ("Of datasets, this node's to hold.", (), wanted.get("bytes")),
        "wanted_missing_bytes": ("Of these, not held.", (), wanted.get("missing")),
        "wanted_short_bytes": ("Of these, without room.", (), wanted.get("short")),
        "listings_total": (
            "Sources that were listed again: as before, a new revision, or nothing changed for a reason.",
            ("result",),
            listed.get("listings"),
        ),
        "sources_failing": (
            "Of datasets, when last listed by this node.",
            (),
            listed.get("failing"),
        ),
    }
    lines = list[str]()
    for name, (about, labels, value) in families.items():
        samples = list(_list_samples(labels, value))
        if samples:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP megablend_{name} {about}", f"# TYPE megablend_{name} {kind}"]
        lines += [f"megablend_{name}{pairs} {number}" for pairs, number in samples]
    return "".join(f"{line}\n" for line in lines)


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

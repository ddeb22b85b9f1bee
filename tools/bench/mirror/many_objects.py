"""A dataset of very many objects: what adding it takes of a node process, beside the listing alone.

    python tools/bench/mirror/many_objects.py /dev/shm/pages --objects 1000000 --rounds 5

nginx answers requests of listings with pages of 1,000 objects, which are written before if the folder
is not there. In each round, obstore lists the bucket into dicts, and into Arrow tables, each in a
process of its own; then a new node process adds the same objects as a dataset. Prints seconds, CPU
seconds and largest memory of each, and then the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megablend.mirror.node.frames import Kind
from megablend.mirror.rank.connection import find_connection
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions

sys.path.insert(0, str(Path(__file__).parent.parent / "objects"))
from many_files import read_cpu, read_peak
from source import find_free_port, set_keys, wait_for_port

_PAGE = 1000
_CONFIG = """
daemon off; worker_processes 1; pid {scratch}/pid; error_log {scratch}/errors; {user}
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000000; keepalive_timeout 600;
  client_body_temp_path {scratch}/a; proxy_temp_path {scratch}/b; fastcgi_temp_path {scratch}/c;
  uwsgi_temp_path {scratch}/d; scgi_temp_path {scratch}/e;
  map $args $page {{ default 0; ~continuation-token=(\\d+) $1; }}
  server {{
    listen 127.0.0.1:{port}; root {pages}; default_type application/xml;
    location /bench {{ rewrite ^ /$page.xml break; }}
  }}
}}
"""
_LIST = """
import sys, time, obstore, resource
from obstore.store import S3Store
store = S3Store("bench", endpoint=sys.argv[1], client_options={"allow_http": True})
begin = time.monotonic()
cpu = time.process_time()
batches = obstore.list(store, "data", chunk_size=1000, return_arrow=sys.argv[2] == "arrow")
count = sum(len(each) if sys.argv[2] == "dicts" else each.num_rows for each in [batches.collect()])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(count, time.monotonic() - begin, time.process_time() - cpu, peak)
"""


def write_pages(folder: Path, count: int) -> None:
    """Write a listing as S3 gives it, 1,000 objects in each folder."""
    folder.mkdir(parents=True)
    for begin in range(0, count, _PAGE):
        objects = [
            f"<Contents><Key>data/shard-{begin // _PAGE:04d}/{i:06d}.bin</Key>"
            "<LastModified>2026-11-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{hashlib.md5(str(begin + i).encode()).hexdigest()}&quot;</ETag>"
            f"<Size>{1_000_000 + i}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for i in range(min(_PAGE, count - begin))
        ]
        is_last = begin + _PAGE >= count
        more = (
            "<IsTruncated>false</IsTruncated>"
            if is_last
            else "<IsTruncated>true</IsTruncated>"
            f"<NextContinuationToken>{begin // _PAGE + 1}</NextContinuationToken>"
        )
        (folder / f"{begin // _PAGE}.xml").write_text(
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bench</Name>'
            f"<Prefix>data/</Prefix><MaxKeys>1000</MaxKeys>{more}{''.join(objects)}</ListBucketResult>"
        )


@contextlib.contextmanager
def serving(pages: Path) -> Iterator[str]:
    """Serve pages; yields the URL."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise SystemExit("nginx is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        port = find_free_port()
        user = "user root;" if os.geteuid() == 0 else ""
        config = _CONFIG.format(scratch=scratch, port=port, pages=pages, user=user)
        path = Path(scratch, "conf")
        path.write_text(config)
        with subprocess.Popen([program, "-c", str(path), "-e", f"{scratch}/errors"]) as process:
            try:
                wait_for_port(port)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def list_alone(url: str, kind: str) -> list[float]:
    """List by obstore in a process of its own. Returns: seconds, CPU seconds, MiB."""
    command = [sys.executable, "-c", _LIST, url, kind]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(each) for each in result.stdout.split()[1:]]


def add(folder: Path, url: str, source: str) -> dict[str, list[float]]:
    """Add the objects in a new node process. Returns: seconds, CPU seconds and MiB of each step."""
    about = {"folder": str(folder), "prefixes": ["s3://bench"], "reserve": 0}
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({"storage": {"mirror": about, "s3://bench": {"endpoint": url}}}))
    command = [sys.executable, "-m", "megablend", "node", "run", str(config)]
    steps = dict[str, list[float]]()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as node:
        try:
            assert node.stdout is not None
            node.stdout.readline()
            connection = find_connection(parse_mirror(about), ObjectOptions())

            def ask(verb: str, **arguments: Any) -> Any:
                begin = time.monotonic()
                cpu = read_cpu(node.pid)
                answer = connection.command(Kind.DATASETS, {"verb": verb, **arguments})
                seconds = time.monotonic() - begin
                steps[verb] = [seconds, read_cpu(node.pid) - cpu, read_peak(node.pid)]
                return answer

            ask("gc")
            ask("add", dataset="d", sources=[source])
            ask("status")
            revision = ask("list")["revisions"][0]
            print(f"  {revision['num_files']:,} files, digest {revision['digest']}")
        finally:
            node.terminate()
    shutil.rmtree(folder)
    config.unlink()
    return steps


def main() -> None:
    """Write the pages, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pattern", default="data/**")
    options = parser.parse_args()
    if not options.folder.exists():
        write_pages(options.folder, options.objects)
    set_keys()
    measured = defaultdict[str, list[list[float]]](list)
    with serving(options.folder) as url:
        for _ in range(options.rounds):
            for kind in ("dicts", "arrow"):
                measured[f"listing into {kind}"].append(list_alone(url, kind))
            mirror = options.folder.with_name(f"{options.folder.name}-mirror")
            for verb, figures in add(mirror, url, f"s3://bench/{options.pattern}").items():
                measured[verb].append(figures)
    for name, rounds in measured.items():
        seconds, cpu, peak = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:20} {seconds:7.2f} s {cpu:7.2f} s of CPU {peak:6.0f} MiB at most")


if __name__ == "__main__":
    main()

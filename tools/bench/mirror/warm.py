"""A warm mirror against local files: CPU of a whole Loader, and of a range of 64 KiB, in turns.

Everything is held by the mirror before anything is measured. The source is a folder, served by nginx, which counts what it sends.

    python tools/bench/mirror/warm.py --mib 256 --rounds 10
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import megablend
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options

NGINX = """
worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  log_format sent '$body_bytes_sent'; access_log {folder}/sent.log sent;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen 127.0.0.1:{port}; root {folder}/data; }}
}}
"""


def write_files(folder: Path, mib: int) -> list[Path]:
    """Parquet files of random tokens, in pages of 64 KiB."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(4):
        tokens = rng.integers(0, 1 << 15, mib << 16, np.int32)
        lengths = np.full(len(tokens) // 1024, 1024)
        column = pa.ListArray.from_arrays(
            np.append(0, lengths.cumsum()).astype(np.int32), pa.array(tokens)
        )
        path = folder / f"{number}.parquet"
        pq.write_table(
            pa.table({"input_ids": column}),
            path,
            data_page_size=64 << 10,
            use_dictionary=False,
            compression="zstd",
        )
        paths.append(path)
    return paths


def make_config(paths: list[str], cache: Path) -> dict[str, Any]:
    """A blend of one source."""
    source = {"name": "s", "path": paths, "column": "input_ids", "weight": 1}
    return {"sources": [source], "cache": str(cache)}


def read_all(config: dict[str, Any]) -> float:
    """CPU seconds of a pass of the Loader."""
    loader = megablend.Loader(megablend.open(config), micro_batch_size=8)
    begin = time.process_time()
    for _ in loader:
        pass
    loader.close()
    return time.process_time() - begin


def read_ranges(storage: Any, path: str, offsets: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    """CPU seconds of many reads of one range of 64 KiB."""
    size = np.array([64 << 10])
    begin = time.process_time()
    for offset in offsets:
        storage.read_ranges(path, np.array([offset]), size, lambda total: np.empty(total, np.uint8))
    return time.process_time() - begin


def compare(
    name: str, mirrored: Callable[[], float], local: Callable[[], float], rounds: int
) -> None:
    """Print the median ratio of neighbouring turns."""
    ratios = []
    for _ in range(rounds):
        mine = mirrored()
        ratios.append(mine / local())
    print(
        f"{name}: {statistics.median(ratios):.3f}x local files ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def main() -> None:
    """Make the files, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--port", type=int, default=8391)
    options = parser.parse_args()
    if shutil.which("nginx") is None:
        raise SystemExit("nginx is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "data").mkdir()
        paths = write_files(folder / "data", options.mib)
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=options.port))
        nginx = subprocess.Popen(["nginx", "-c", folder / "nginx.conf", "-g", "daemon off;"])
        url = f"http://127.0.0.1:{options.port}"
        mirror_folder = str(folder / "mirror")
        mirror = {"folder": mirror_folder, "prefixes": [f"{url}/"], "reserve": 0}
        common = {
            "sequence_length": 2048,
            "lanes": 8,
            "samples": 4 * (options.mib << 16) // 2048 // 8 * 8,
        }
        urls = [f"{url}/{each.name}" for each in paths]
        local = common | make_config(list(map(str, paths)), folder / "local")
        remote = common | make_config(urls, folder / "remote") | {"storage": {"mirror": mirror}}
        try:
            time.sleep(0.5)
            for config in (local, remote):
                megablend.build(config)
                read_all(config)
            size = sum(each.stat().st_size for each in paths)
            print(
                f"source bytes / size: {count_sent(folder) / size:.3f} after the build and a pass"
            )
            sent = count_sent(folder)
            compare("Loader", lambda: read_all(remote), lambda: read_all(local), options.rounds)
            rng = np.random.default_rng(1)
            offsets = rng.integers(0, paths[0].stat().st_size - (64 << 10), 2000)
            through = make_storage(objects=parse_options({"mirror": mirror}))
            plain = make_storage()
            compare(
                "a range of 64 KiB",
                lambda: read_ranges(through, urls[0], offsets),
                lambda: read_ranges(plain, str(paths[0]), offsets),
                options.rounds,
            )
            print(f"source bytes meanwhile: {count_sent(folder) - sent}")
        finally:
            subprocess.run(["megablend", "node", "stop", mirror_folder], check=False)
            nginx.terminate()
            nginx.wait()


def count_sent(folder: Path) -> int:
    """Bytes that nginx has sent."""
    return sum(map(int, (folder / "sent.log").read_text().split()))


if __name__ == "__main__":
    main()

"""A source over HTTP with latency, in a process of its own: nginx, or the tests' server in Python, which is slower.

nginx waits by its Lua module (Debian: `apt install nginx libnginx-mod-http-lua`), serves a folder's files under many names, and
one listing of them as S3 would write it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
BUCKET = "bench"
MODULES = Path("/usr/lib/nginx/modules")
_NEEDED = ("ndk_http_module.so", "ngx_http_lua_module.so")
_CONFIG = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors; {modules} {user}
events {{ worker_connections 8192; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000000; keepalive_timeout 600; {temporary}
  open_file_cache max=20000 inactive=600s; open_file_cache_valid 600s;
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    root {folder}/files;
    access_by_lua_block {{ ngx.sleep({latency}) }}
    location /status {{ access_by_lua_block {{ }} stub_status; }}
    location = /list.xml {{ access_by_lua_block {{ }} }}
    location ~ ^/{bucket}/?$ {{ access_by_lua_block {{ ngx.sleep({latency}); ngx.exec("/list.xml") }} }}
  }}
}}
"""


@contextlib.contextmanager
def serving(folder: Path, *, latency: float, names: int = 1) -> Iterator[str]:
    """Serve a folder's files as `bench/<number>-<file>`, each under `names` numbers; yields the URL.

    Args:
        latency: seconds before each answer.
    """
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    is_nginx = program is not None and all((MODULES / each).exists() for each in _NEEDED)
    with (
        _serving_nginx(str(program), folder, latency, names)
        if is_nginx
        else _serving_python(folder, latency, names) as url
    ):
        yield url


@contextlib.contextmanager
def serving_ceph(folder: Path) -> Iterator[str]:
    """Serve a folder's files as `bench/00000-<file>` by Ceph, whose keys are set; yields the URL."""
    sys.path.insert(0, str(ROOT))
    from tests.storage.objects.servers.ceph import serving_ceph as serving

    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch)) as admin:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": admin.access_key,
            "AWS_SECRET_ACCESS_KEY": admin.secret_key,
        }
        admin.make_bucket(BUCKET)
        for path in folder.iterdir():
            admin.put(BUCKET, f"00000-{path.name}", path.read_bytes())
        yield admin.endpoint


def set_keys() -> None:
    """Credentials that nginx and the tests' server do not look at."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def _serving_nginx(program: str, folder: Path, latency: float, names: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        port = find_free_port()
        (here / "files" / BUCKET).mkdir(parents=True)
        here.chmod(0o755)
        links = [
            (f"{i:05d}-{path.name}", path)
            for i in range(names)
            for path in sorted(folder.iterdir())
        ]
        for name, path in links:
            (here / "files" / BUCKET / name).symlink_to(path.resolve())
        (here / "files/list.xml").write_text(_list_objects(links))
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        (here / "conf").write_text(
            _CONFIG.format(
                folder=here,
                port=port,
                bucket=BUCKET,
                latency=latency,
                modules=" ".join(f"load_module {MODULES / each};" for each in _NEEDED),
                user="user root;" if os.geteuid() == 0 else "",
                temporary=" ".join(f"{kind}_temp_path {here}/{kind};" for kind in kinds),
            )
        )
        with subprocess.Popen(
            [program, "-c", str(here / "conf"), "-e", str(here / "errors")]
        ) as process:
            try:
                wait_for_port(port)
                yield f"http://127.0.0.1:{port}"
                print(f"  source: nginx, {_read_cpu_seconds(process.pid):.2f} s of CPU")
            finally:
                process.terminate()


def _list_objects(links: list[tuple[str, Path]]) -> str:
    """An answer to ListObjectsV2, with the etags that nginx makes of times and sizes."""
    contents = []
    for name, path in links:
        stat = path.stat()
        etag = f"&quot;{int(stat.st_mtime):x}-{stat.st_size:x}&quot;"
        modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stat.st_mtime))
        fields = {"Key": name, "LastModified": modified, "ETag": etag, "Size": stat.st_size}
        contents.append(
            f"<Contents>{''.join(f'<{key}>{value}</{key}>' for key, value in fields.items())}</Contents>"
        )
    start = f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>"
    return f"{start}{''.join(contents)}</ListBucketResult>"


def find_free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Wait until a server listens on a port."""
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise SystemExit("nginx did not start")


def _read_cpu_seconds(parent: int) -> float:
    """CPU time of a process's children."""
    seconds = 0.0
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


@contextlib.contextmanager
def _serving_python(folder: Path, latency: float, names: int) -> Iterator[str]:
    print("  nginx with its Lua module is not installed: the source is a Python server")
    command = [sys.executable, __file__, str(folder), str(latency), str(names)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()  # it ends
            print(f"  source: {process.stdout.readline().strip()}")


def main() -> None:
    """Serve by the tests' server until standard input is closed, then print what was requested."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("latency", type=float)
    parser.add_argument("names", type=int)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.storage.faulty import Faults, FaultySource

    files = {path.name: path.read_bytes() for path in sorted(options.folder.iterdir())}
    names = {
        f"{BUCKET}/{i:05d}-{name}": data
        for i in range(options.names)
        for name, data in files.items()
    }
    with FaultySource(names, Faults(latency=options.latency)) as source:
        print(source.url, flush=True)
        sys.stdin.read()
        print(
            f"{source.requests:,} requests, {source.bytes / 1e6:,.1f} MB, {source.most_in_flight} in flight at most"
        )


if __name__ == "__main__":
    main()

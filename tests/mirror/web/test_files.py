"""Files of datasets over HTTP: real programs, a real node process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import numpy as np
import pytest
import safetensors.numpy

import megablend
from megablend.mirror.web import files as web_files
from megablend.storage.mirror_options import parse_mirror
from tests.certificates import Authority, authorities
from tests.mirror.catalog.test_datasets import (
    MB,
    MIXED,
    Machine,
    count_sent,
    keys,
    machine,
    make_files,
)
from tests.mirror.node.test_metrics import parse_metrics
from tests.mirror.nodes import kill_node
from tests.mirror.peers.clusters import PATIENT, NodesOf
from tests.mirror.peers.clusters import until as until_async
from tests.mirror.test_clusters import until
from tests.mirror.test_runs import digest_batches, list_paths
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.start import find_ports, unavailable

__all__ = ["authorities", "keys"]
pytestmark = pytest.mark.usefixtures("obstore", "keys")
TOKEN = "5f1d-the-token-that-nobody-else-has"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
BLOCK = 256 << 10
ODD = "a b%2F[1]*{x,y}#&+é'\"<b>.bin"


class Web:
    """A node's `data_port`."""

    def __init__(self, node: Machine, port: int) -> None:
        self.node = node
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def ask(
        self, path: str, method: str = "GET", token: bool = True, **headers: str
    ) -> tuple[int, Message, bytes]:
        """Status, headers and body of an answer; the path is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=500)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=(AUTHORIZED if token else {}) | given)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> bytes:
        status, _, body = self.ask(path, "GET", True, **headers)
        assert status in (200, 206), body
        return body


def write_token(folder: Path) -> str:
    path = folder / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return str(path)


@contextlib.contextmanager
def web(folder: Path, files: dict[str, bytes], **settings: Any) -> Iterator[Web]:
    (port,) = find_ports(1)
    with machine(folder, files, data_port=port, token_file=write_token(folder), **settings) as node:
        yield Web(node, port)


def curl(*args: object) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("curl") is None:
        unavailable("needs the command curl: what other programs read is not tried")
    return subprocess.run(
        ["curl", "--silent", "--show-error", "--fail", "--path-as-is", *map(str, args)],
        capture_output=True,
        timeout=500,
        check=False,
    )


def test_curl_reads_what_is_not_held_and_each_byte_comes_once(tmp_path: Path) -> None:
    files = make_files("d", {**MIXED, ODD: 3 * MB + 17})
    with web(tmp_path, files) as served:
        revision = served.node.add("corpus", "d")
        before = count_sent(served.node.source)
        bearer = ["-H", f"Authorization: Bearer {TOKEN}"]
        for name, data in files.items():
            path = quote(name.removeprefix("d/"))
            for version in ("latest", revision, revision[:6]):
                done = curl(*bearer, f"{served.url}/v1/data/corpus/{version}/{path}")
                assert done.stdout == data, done.stderr
        # One more byte of each file, by which its version is seen
        assert count_sent(served.node.source) - before <= sum(map(len, files.values())) + len(files)
        served.node.source.is_down = True
        url = f"{served.url}/v1/data/corpus/latest/big.bin"
        data = files["d/big.bin"]
        assert curl("-u", f"me:{TOKEN}", "-r", "5-300000", url).stdout == data[5:300001]
        assert curl(*bearer, "-r", "-70000", url).stdout == data[-70000:]
        half = tmp_path / "half"
        half.write_bytes(data[:MB])
        assert curl(*bearer, "-C", "-", "-o", half, url).returncode == 0
        assert half.read_bytes() == data
        assert curl(url).returncode == 22


def test_it_answers_as_a_web_server(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with web(tmp_path, files) as served:
        served.node.add("corpus", "d")
        data = files["d/big.bin"]
        path = "/v1/data/corpus/latest/big.bin"
        status, headers, body = served.ask(path)
        assert (status, body) == (200, data)
        tag = headers["ETag"]
        assert tag.startswith('"')
        assert headers["Accept-Ranges"] == "bytes"
        assert headers["Content-Length"] == str(len(data))
        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["X-Content-Type-Options"] == "nosniff"
        status, of_head, body = served.ask(path, "HEAD", Range="bytes=0-4")
        assert (status, body, of_head["ETag"]) == (200, b"", tag)
        assert of_head["Content-Length"] == str(len(data))
        size = len(data)
        for asked, part in {
            "bytes=0-0": (0, 1),
            "bytes=4095-4096": (4095, 4097),
            "Bytes=1048570-1048580": (1048570, 1048581),
            "bytes=2097156-": (2097156, size),
            "bytes=-1": (size - 1, size),
            "bytes=-99999999": (0, size),
            "bytes=100-99999999": (100, size),
        }.items():
            status, headers, body = served.ask(path, Range=asked)
            assert (status, body) == (206, data[slice(*part)])
            assert headers["Content-Range"] == f"bytes {part[0]}-{part[1] - 1}/{size}"
            assert headers["ETag"] == tag
        for asked in (f"bytes={size}-", f"bytes={size + 9}-{size + 10}", "bytes=-0"):
            status, headers, _ = served.ask(path, Range=asked)
            assert (status, headers["Content-Range"]) == (416, f"bytes */{size}")
        for asked in ("bytes=5-4", "bytes=0-1,5-6", "bytes=-", "lines=0-1", "bytes=x-", "bytes=1"):
            status, _, body = served.ask(path, Range=asked)
            assert (status, body) == (200, data)
        status, _, body = served.ask(path, Range="bytes=0-4", If_Range=tag)
        assert (status, body) == (206, data[:5])
        for other in ('"other"', f"W/{tag}", "Wed, 21 Oct 2015 07:28:00 GMT"):
            assert served.ask(path, Range="bytes=0-4", If_Range=other)[0] == 200
            assert served.ask(path, If_None_Match=other)[0] == 200
        assert served.ask(path, If_Match='"other"')[0] == 412
        for same in (tag, "*", f'"x", {tag}'):
            assert served.ask(path, If_Match=same)[0] == 200
            status, headers, body = served.ask(path, If_None_Match=same)
            assert (status, headers["ETag"], body) == (304, tag, b"")
        assert served.ask("/v1/data/corpus/latest/empty")[::2] == (200, b"")
        assert served.ask("/v1/data/corpus/latest/empty", Range="bytes=0-")[0] == 416
        assert served.ask(path, "POST")[0] == 405


def test_blocks(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with web(tmp_path, files) as served:
        served.node.add("corpus", "d")
        for name in ("big.bin", "sub/mid.bin", "sub/small.txt"):
            data = files[f"d/{name}"]
            path = f"/v1/data/corpus/latest/{name}?block="
            count = -(-len(data) // BLOCK)
            tags = set()
            for i in reversed(range(count)):
                status, headers, body = served.ask(f"{path}{i}")
                assert (status, body) == (200, data[i * BLOCK : (i + 1) * BLOCK])
                tags.add(headers["ETag"])
            assert len(tags) == count
            assert served.get(f"{path}0", Range="bytes=7-9") == data[7:10]
            assert served.ask(f"{path}{count}")[0] == 404
            for wrong in ("-1", "x", "", "1.5", "1_0", "%201", "%EF%BC%91", "9" * 40):
                assert served.ask(f"{path}{wrong}")[0] == 400


def test_what_there_is_not(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with web(tmp_path, files) as served:
        assert served.node.run("status").returncode == 0
        assert served.ask("/v1/data/corpus/latest/big.bin")[0] == 404
        revision = served.node.add("corpus", "d")
        for path, told in {
            "corpas/latest/big.bin": "'corpas': no such dataset: did you mean 'corpus'?",
            "corpus/0000/big.bin": "no such revision",
            "corpus/latest/none": "has no file 'none'\nto list a folder",
            "corpus/latest/sub": "has no file 'sub'",
            "corpus/latest/none/": "there are no files below 'none/'",
            "corpus/latest/big.bin/": "there are no files below",
        }.items():
            status, _, body = served.ask(f"/v1/data/{path}")
            assert (status, told in body.decode()) == (404, True), body
        for wrong in ("..", "%2e%2e", "%2E.", ".", "%00", "a%00b", "%2f", "a%2Fb", "", "%0a"):
            for path in (
                f"corpus/latest/{wrong}/big.bin",
                f"corpus/latest/sub/{wrong}/../big.bin",
                f"corpus/{wrong}/big.bin",
                f"{wrong}/latest/big.bin",
            ):
                # A route has no newline
                assert served.ask(f"/v1/data/{path}")[0] == (404 if wrong == "%0a" else 400), path
        # Decoded once
        assert served.ask("/v1/data/corpus/latest/%252e%252e/big.bin")[0] == 404
        assert served.ask("/v1/data/corpus/latest/%62ig.bin")[0] == 200
        for path in ("/v1/data", "/v1/data/", "/v1/data/corpus", "/etc/passwd", "/v1/pages"):
            assert served.ask(path)[0] in (400, 404)
        assert served.ask(f"/v1/data/corpus/{revision}/{'x' * 9000}")[0] == 400


def test_who_may_ask(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with web(tmp_path, files) as served:
        served.node.add("corpus", "d")
        path = "/v1/data/corpus/latest/big.bin"
        before = count_sent(served.node.source)
        refused: list[dict[str, str]] = [
            {},
            {"Authorization": TOKEN},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": "Bearer"},
            {"Authorization": "Basic !!!"},
            {"Authorization": "Basic bWU6d3Jvbmc="},
            {"Authorization": f"Negotiate {TOKEN}"},
            {"Authorization": "Bearer \u00e9\u00ff"},
            {"Cookie": f"token={TOKEN}"},
        ]
        for headers in refused:
            for each in (
                path,
                "/v1/data/corpus/latest/",
                "/v1/data/nothing/latest/x",
                "/",
                "/none",
            ):
                status, told, body = served.ask(each, token=False, **headers)
                assert (status, body) == (401, b"401: Unauthorized")
                assert told["WWW-Authenticate"].startswith("Basic ")
        for query in (f"?token={TOKEN}", "?signature=", f"?signature={'0' * 64}", "?signature=%ff"):
            assert served.ask(path + query, token=False)[0] == 401
        assert served.ask("/v1/ping", token=False)[::2] == (200, b"")
        assert count_sent(served.node.source) == before
        log = (served.node.folder / "node.log").read_text()
        assert log.count("lacks the token in `token_file`") == 1
        assert TOKEN not in log
        with pytest.raises(OSError, match="refused"):
            # On loopback only
            socket.create_connection((find_address(), served.port), 5).close()


def find_address() -> str:
    """An address of this machine that is not loopback; 127.0.0.2 if there is none, where a port of
    127.0.0.1 does not answer, either."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        try:
            each.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(each.getsockname()[0])


def test_a_list_is_read_by_megablend_and_gives_no_more_than_it_names(tmp_path: Path) -> None:
    files = make_files("d", {**MIXED, ODD: 3 * MB, "sub-other/x": 70_000, "sub0": 5})
    with web(tmp_path, files) as served:
        revision = served.node.add("corpus", "d")
        served.node.add("other", "d")
        listed = served.ask("/v1/data/corpus/latest/sub/")
        assert listed[1]["Content-Type"].startswith("text/uri-list")
        assert served.ask("/v1/data/corpus/latest/sub/", "HEAD")[::2] == (200, b"")
        lines = listed[2].decode().splitlines()
        assert [line.partition("?")[0] for line in lines] == [
            f"{served.url}/v1/data/corpus/{revision}/sub/{name}"
            for name in ("mid.bin", "small.txt")
        ]
        every = served.get("/v1/data/corpus/latest/").decode().splitlines()
        assert len(every) == len(files)
        assert every == served.get("/v1/data/corpus/latest").decode().splitlines()
        assert TOKEN not in "".join(every)
        for line in every:
            assert curl("-g", line).returncode == 0
        signed = lines[0].removeprefix(served.url)
        other = lines[1].removeprefix(served.url).partition("?")[0]
        query = signed.partition("?")[2]
        for path in (
            f"{other}?{query}",
            f"/v1/data/corpus/latest/sub/mid.bin?{query}",
            f"/v1/data/other/{revision}/sub/mid.bin?{query}",
            f"/v1/data/corpus/{revision}/sub/?{query}",
        ):
            assert served.ask(path, token=False)[0] == 401
        assert served.ask(signed, token=False)[0] == 200
        assert served.ask(f"{signed}&block=0", token=False)[2] == files["d/sub/mid.bin"][:BLOCK]


def test_megablend_reads_tokens_by_a_list(tmp_path: Path) -> None:
    data = tmp_path / "data"
    sources = [
        write_source(data, i, kind, documents(i, 400, 200, seed=i), num_files=3) | {"weight": 1 + i}
        for i, kind in enumerate(("parquet", "arrow"))
    ]
    settings = {"sequence_length": 64, "block_bytes": 4096, "samples": 500}
    plain = make_config(tmp_path, sources, cache=str(tmp_path / "plain"), **settings)
    files = {
        f"d/{path.relative_to(data)}": path.read_bytes()
        for path in data.rglob("*")
        if path.is_file()
    }
    with web(tmp_path, files) as served:
        served.node.add("corpus", "d")
        listed = served.get("/v1/data/corpus/latest/").decode().splitlines()
        urls = list[dict[str, Any]]()
        for i, source in enumerate(sources):
            paths = [str(Path(path).relative_to(data)) for path in list_paths(source)]
            lines = [line for line in listed if any(f"/{quote(path)}?" in line for path in paths)]
            assert len(lines) == len(paths)
            (tmp_path / f"{i}.urls").write_text("\n".join(lines))
            urls.append(source | {"path": str(tmp_path / f"{i}.urls")})
        remote = make_config(tmp_path, urls, cache=str(tmp_path / "remote"), **settings)
        megablend.build(plain)
        built = megablend.build(remote)
        assert built.ledger.digest == megablend.open(plain).run.ledger.digest
        before = count_sent(served.node.source)
        assert digest_batches(remote) == digest_batches(plain)
        size = sum(map(len, files.values()))
        # Listings, and of each file one more byte
        assert count_sent(served.node.source) <= size + 20_000
        assert count_sent(served.node.source) - before <= size


def test_safetensors_are_read_by_ranges(tmp_path: Path) -> None:
    tensors = {f"layer{i}": np.arange(i, i + 70_000, dtype=np.float32) for i in range(4)}
    model = safetensors.numpy.save(tensors)
    with web(tmp_path, {"d/model.safetensors": model}) as served:
        served.node.add("model", "d")
        before = count_sent(served.node.source)
        path = "/v1/data/model/latest/model.safetensors"
        size = int.from_bytes(served.get(path, Range="bytes=0-7"), "little")
        header = json.loads(served.get(path, Range=f"bytes=8-{7 + size}"))
        for name in ("layer2", "layer0"):
            begin, stop = (8 + size + each for each in header[name]["data_offsets"])
            part = served.get(path, Range=f"bytes={begin}-{stop - 1}")
            assert np.array_equal(np.frombuffer(part, np.float32), tensors[name])
        assert count_sent(served.node.source) - before < 0.6 * len(model)
        assert served.get(path) == model


def test_a_file_that_is_gone_is_no_answer_that_looks_whole(tmp_path: Path) -> None:
    files = make_files("d", {"a.bin": 12 * MB})
    with web(tmp_path, files) as served:
        served.node.add("corpus", "d")
        path = "/v1/data/corpus/latest/a.bin"
        data = files["d/a.bin"]
        assert served.get(path, Range=f"bytes=0-{2 * MB - 1}") == data[: 2 * MB]
        served.node.source.files["b/d/a.bin"] = data[::-1]
        kill_node(served.node.folder)
        served.node.ask("status")
        status, _, body = served.ask(path, Range=f"bytes={2 * MB}-")
        assert (status, b"was deleted or replaced" in body) == (410, True)
        assert served.get(path, Range=f"bytes=0-{MB}") == data[: MB + 1]
        done = curl("-H", f"Authorization: Bearer {TOKEN}", f"{served.url}{path}")
        assert (done.returncode, done.stdout) == (18, data[: len(done.stdout)])
        assert len(done.stdout) <= 2 * MB


def test_latest_is_the_last_that_is_held_where_it_is_wanted(tmp_path: Path) -> None:
    files = make_files("d", {"a.bin": 300_000})
    with web(tmp_path, files) as served:
        served.node.add("corpus", "d")
        served.node.ask("want", "corpus", "--wait")
        path = "/v1/data/corpus/latest/a.bin"
        old = files["d/a.bin"]
        new = served.node.source.files["b/d/a.bin"] = old[::-1]
        # Nothing of the new revision is fetched before the source is off
        served.node.ask("unwant", "corpus")
        revision = served.node.add("corpus", "d")
        served.node.source.is_down = True
        served.node.ask("want", "corpus")
        until(lambda: len(served.node.goals()) == 2)
        assert served.get(path) == old
        served.node.source.is_down = False
        served.node.ask("want", "corpus", "--wait")
        assert served.get(path) == new
        served.node.ask("unwant", "corpus")
        assert served.get(f"/v1/data/corpus/{revision}/a.bin") == new


def test_a_node_gives_what_another_holds(tmp_path: Path) -> None:
    files = {f"b/{name}": data for name, data in make_files("d", {"a.bin": 20 * MB + 3}).items()}
    own, other = find_ports(2)
    names = [f"127.0.0.1:{port}" for port in (own, other)]
    token = write_token(tmp_path)
    with FaultySource(files) as source, contextlib.ExitStack() as stack:
        nodes = list[Web]()
        for i, port in enumerate((own, other)):
            (data_port,) = find_ports(1)
            settings: dict[str, Any] = {
                "data_port": data_port,
                "token_file": token,
                "nodes": names,
                "port": port,
            }
            node = Machine(tmp_path / f"{i}", source, advertise=names[i], **settings)
            stack.callback(kill_node, node.folder)
            nodes.append(Web(node, data_port))
        for each in nodes:
            each.node.add("corpus", "d")
        before = count_sent(source)
        for each in nodes:
            assert each.get("/v1/data/corpus/latest/a.bin") == files["b/d/a.bin"]
        assert count_sent(source) - before <= len(files["b/d/a.bin"]) + 8


def test_by_tls_from_other_machines(
    tmp_path: Path, authorities: tuple[Authority, Authority]
) -> None:
    ours, others = authorities
    address = find_address()
    tls = ours.issue(f"IP:{address}", "IP:127.0.0.1").model_dump()
    files = make_files("d", MIXED)
    with web(tmp_path, files, tls=tls) as served:
        served.node.add("corpus", "d")
        url = f"https://{address}:{served.port}/v1/data/corpus/latest/"
        bearer = ["-H", f"Authorization: Bearer {TOKEN}"]
        done = curl("--cacert", ours.ca, *bearer, f"{url}big.bin")
        assert done.stdout == files["d/big.bin"], done.stderr
        assert curl("--cacert", ours.ca, f"{url}big.bin").returncode == 22
        assert curl("--cacert", others.ca, *bearer, f"{url}big.bin").returncode == 60
        lines = curl("--cacert", ours.ca, *bearer, url).stdout.decode().splitlines()
        assert curl("--cacert", ours.ca, lines[0]).stdout == files["d/big.bin"]


def test_clients_that_take_nothing_are_cut_off_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web_files, "_BUSY_SECONDS", 0.2)
    monkeypatch.setattr(web_files, "_SLOW_SECONDS", 2.0)  # the last one, beside whom nobody waits
    monkeypatch.setattr(web_files, "_MOST_SENDING", 2)
    (port,) = find_ports(1)
    settings: dict[str, Any] = {"data_port": port, "token_file": write_token(tmp_path)}
    path = "/v1/data/corpus/latest/a.bin"
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()

    async def run() -> None:
        async with NodesOf(tmp_path, source, 1, PATIENT, **settings) as nodes:
            await nodes.start(0)
            datasets = await nodes.nodes[0]._find_datasets()
            await datasets.add("corpus", [f"{source.url}/d/a.bin"])
            slow = list[socket.socket]()
            for _ in range(20):
                each = socket.socket()
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
                each.connect(("127.0.0.1", port))
                each.sendall(head)
                slow.append(each)
            async with aiohttp.ClientSession(headers=AUTHORIZED) as session:
                url = f"http://127.0.0.1:{port}{path}"
                async with session.get(url) as answer:
                    assert await answer.read() == source.files["d/a.bin"]
            served = nodes.nodes[0].web
            assert served is not None
            runner = served._listener._runner
            assert runner is not None
            server = runner.server
            assert server is not None
            # They take nothing still, so that they do not see it
            await until_async(lambda: not server.connections)
            for each in slow:
                each.close()
        assert caplog.text.count("stopped sending") == 1  # each minute

    with FaultySource({"d/a.bin": bytes(range(256)) * (16 << 12)}) as source:
        asyncio.run(run())


def test_clients_that_take_nothing_hold_up_no_other_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_files, "_BUSY_SECONDS", 60.0)
    monkeypatch.setattr(web_files, "_MOST_SENDING", 4)
    monkeypatch.setattr(web_files, "_MOST_OF_ONE", 2)
    (port,) = find_ports(1)
    settings: dict[str, Any] = {"data_port": port, "token_file": write_token(tmp_path)}
    path = "/v1/data/corpus/latest/a.bin"
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()

    async def run() -> None:
        async with NodesOf(tmp_path, source, 1, PATIENT, **settings) as nodes:
            await nodes.start(0)
            datasets = await nodes.nodes[0]._find_datasets()
            await datasets.add("corpus", [f"{source.url}/d/a.bin"])
            slow = list[socket.socket]()
            for _ in range(20):
                each = socket.socket()
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
                each.bind(("127.0.0.2", 0))
                each.connect(("127.0.0.1", port))
                each.sendall(head)
                slow.append(each)
            served = nodes.nodes[0].web
            assert served is not None
            turns = served._files._turns_of
            await until_async(lambda: "127.0.0.2" in turns and turns["127.0.0.2"].locked())
            async with aiohttp.ClientSession(headers=AUTHORIZED) as session:
                url = f"http://127.0.0.1:{port}{path}"
                async with session.get(url, timeout=aiohttp.ClientTimeout(50)) as answer:
                    assert await answer.read() == source.files["d/a.bin"]
            assert turns["127.0.0.2"].locked()
            for each in slow:
                each.close()
            # Nothing is remembered of machines without clients, when tracebacks are collected
            await until_async(lambda: gc.collect() >= 0 and not turns)

    with FaultySource({"d/a.bin": bytes(range(256)) * (16 << 12)}) as source:
        asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_port": 7172}, "data_port and token_file: only one of them is set"),
        ({"token_file": "/t"}, "data_port and token_file: only one of them is set"),
        ({"data_port": 0, "token_file": "/t"}, "data_port: found 0, expected a port"),
        (
            {"data_port": 7171, "token_file": "/t", "nodes": ["a:7171"]},
            "data_port: found 7171, which is `port`",
        ),
        ({"insecure": True}, "insecure: needs `nodes`"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mirror({"folder": "/mirror", **settings})


def test_a_token_or_a_port_that_cannot_be_used(tmp_path: Path) -> None:
    with web(tmp_path, {"d/a": b"x"}) as served:
        token = Path(write_token(tmp_path))
        token.chmod(0o644)
        code, message = served.node.fail("add", "x", "s3://b/d/")
        assert (code, "token_file" in message, "0600" in message) == (2, True, True)
        token.write_text("short")
        token.chmod(0o600)
        code, message = served.node.fail("add", "x", "s3://b/d/")
        assert "found 5 bytes, expected at least 16\ngenerate one" in message
        write_token(tmp_path)
        with socket.create_server(("127.0.0.1", served.port)):
            code, message = served.node.fail("add", "x", "s3://b/d/")
        assert "address already in use\nset `mirror.data_port` to a port" in message.lower()
        assert served.node.add("x", "d")


def test_numbers_for_prometheus(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with web(tmp_path, files) as served:
        served.node.add("corpus", "d")
        data = files["d/big.bin"]
        served.get("/v1/data/corpus/latest/big.bin")
        served.node.ask("want", "corpus", "--wait")
        found = parse_metrics(served.get("/metrics").decode())
        assert found['sent_bytes_total{to="readers"}'] == len(data)
        assert found['bytes_total{from="source"}'] == sum(map(len, files.values()))
        assert found["wanted_bytes"] >= sum(map(len, files.values()))
        assert found["wanted_missing_bytes"] == 0
        assert served.ask("/metrics", token=False)[0] == 401


def test_what_is_damaged_is_got_again_or_refused(tmp_path: Path) -> None:
    files = make_files("d", {"a.bin": 3 * MB})
    with web(tmp_path, files) as served:
        revision = served.node.add("corpus", "d")
        path = f"/v1/data/corpus/{revision}/a.bin"
        assert served.get(path) == files["d/a.bin"]
        (copy,) = (served.node.folder / "files").rglob("*.data")
        copy.chmod(0o600)
        with copy.open("r+b") as file:
            file.seek(MB + 5)
            file.write(b"wrong")
        before = count_sent(served.node.source)
        assert served.get(path) == files["d/a.bin"]
        assert 0 < count_sent(served.node.source) - before <= BLOCK + 1
        kill_node(served.node.folder)
        (manifest,) = (served.node.folder / "manifests").iterdir()
        manifest.write_bytes(b"nothing")
        served.node.ask("list")
        status, _, body = served.ask(path)
        assert (status, b"is damaged" in body) == (502, True)

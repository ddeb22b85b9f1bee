"""Reads through a mirror with a real node process: what is read, from where, and what is said if it fails."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megablend.errors import ChangedFileError, ConfigError, CorruptFileError, MissingFileError
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import pages_of_file
from megablend.mirror.node.frames import Kind
from megablend.prefetch.read_counts import ReadCounts, ReadMeter
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.mirror.nodes import connect, find_node, get_status, kill_node, mirror
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.start import find_ports

pytestmark = pytest.mark.usefixtures("obstore")
DATA = np.random.default_rng(1).integers(0, 256, 1_000_003, np.uint8).tobytes()


def make(settings: dict[str, Any], **options: Any) -> Storage:
    return make_storage(objects=parse_options({"mirror": settings, **options}))


def read(storage: Storage, path: str, *ranges: tuple[int, int]) -> list[bytes]:
    offsets, sizes = np.array(ranges, np.int64).T
    fetched = storage.fetch(path, offsets, sizes, lambda size: np.empty(size, np.uint8))
    out, begins = fetched.result(timeout=500)
    return [out[b : b + s].tobytes() for b, s in zip(begins.tolist(), sizes.tolist(), strict=True)]


def cut(*ranges: tuple[int, int]) -> list[bytes]:
    return [DATA[offset : offset + size] for offset, size in ranges]


def test_ranges_come_once_from_the_source(tmp_path: Path) -> None:
    ranges = ((5, 10), (700_000, 70_000), (1_000_000, 3), (0, 0), (300_000, 4096))
    with (
        FaultySource({"d/x": DATA, "d/small": DATA[:99]}) as source,
        mirror(tmp_path / "m", source.url) as settings,
    ):
        url = f"{source.url}/d/x"
        for storage in (
            make(settings),
            make(settings).for_reading(),
            pickle.loads(pickle.dumps(make(settings))),
        ):
            assert read(storage, url, *ranges) == cut(*ranges)
            assert storage.read(url, 999_990, 13) == DATA[999_990:]
            assert storage.stat(url) == storage.stat_opened(url) == storage.for_checking().stat(url)
            assert storage.stat(url).size == len(DATA)
            assert storage.read(f"{source.url}/d/small", 7, 92) == DATA[7:99]
            with storage.descriptor(url) as fd:
                assert fd == -1
            sent = source.bytes
        assert source.bytes == sent
        pages = {
            page
            for offset, size in (*ranges, (999_990, 13))
            for page in range(offset // 4096, (offset + size + 4095) // 4096)
            if size
        }
        needed = sum(len(DATA[4096 * page : 4096 * page + 4096]) for page in pages)
        assert get_status(settings)["source_bytes"] == needed + 99
        # And a byte or two of each to learn its state
        assert source.bytes <= needed + 99 + 8


def test_other_files_are_not_mirrored(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    with (
        FaultySource({"d/x": DATA, "e/x": DATA}) as source,
        mirror(tmp_path / "m", f"{source.url}/d") as settings,
    ):
        storage = make(settings)
        assert read(storage, f"{source.url}/e/x", (1, 5)) == cut((1, 5))
        assert read(storage, str(tmp_path / "x"), (1, 5)) == cut((1, 5))
        with storage.descriptor(str(tmp_path / "x")) as fd:
            assert fd >= 0
        assert find_node(tmp_path / "m") is None


def test_mounted_folders_are_mirrored_where_they_are_named(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "x").write_bytes(DATA)
    (tmp_path / "y").write_bytes(DATA)
    with mirror(tmp_path / "m", "https://nowhere", prefixes=[str(mounted)]) as settings:
        storage = make(settings)
        assert read(storage, str(mounted / "x"), (9, 100_000)) == cut((9, 100_000))
        assert get_status(settings)["held_bytes"] >= 100_000
        # Another mount of the same export has another inode
        again = tmp_path / "again"
        again.write_bytes(DATA)
        state = (mounted / "x").stat()
        os.utime(again, ns=(state.st_mtime_ns, state.st_mtime_ns))
        again.rename(mounted / "x")
        assert read(make(settings), str(mounted / "x"), (9, 100_000)) == cut((9, 100_000))
        assert get_status(settings)["files"] == 1
        (mounted / "link").symlink_to(tmp_path / "y")
        with pytest.raises(ConfigError, match="is a symbolic link that leads outside the prefixes"):
            make(settings).stat(str(mounted / "link"))


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        storage = make(settings)
        with pytest.raises(MissingFileError, match=r"/d/none"):
            storage.stat(f"{source.url}/d/none")
        with pytest.raises(
            CorruptFileError, match=r"d/x at byte 1000000: is truncated \(expected 100 bytes"
        ):
            storage.read(f"{source.url}/d/x", 1_000_000, 100)
        read(storage, f"{source.url}/d/x", (0, 10))
        source.files["d/x"] = DATA[::-1]
        kill_node(tmp_path / "m")
        # A reader goes on with what it has, and is told when that is not enough
        assert read(storage, f"{source.url}/d/x", (0, 10)) == cut((0, 10))
        with pytest.raises(
            ChangedFileError, match=r"d/x: was replaced.* restore the original file"
        ):
            read(storage, f"{source.url}/d/x", (500_000, 10))


def test_a_new_version_is_seen_by_find(tmp_path: Path) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        storage = make(settings)
        assert read(storage, f"{source.url}/d/x", (0, 10)) == cut((0, 10))
        source.files["d/x"] = DATA[::-1]
        assert len(make(settings).find(f"{source.url}/d/x").files) == 1
        # Others who open it now see it, too
        assert read(make(settings), f"{source.url}/d/x", (0, 10)) == [DATA[::-1][:10]]
        assert len(storage.find(f"{source.url}/d/x").files) == 1
        assert read(storage, f"{source.url}/d/x", (0, 10)) == [DATA[::-1][:10]]


def test_reads_go_on_when_the_node_process_is_killed(tmp_path: Path) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        storage = make(settings)
        rng = np.random.default_rng(0)
        for turn in range(5):
            ranges = [(int(rng.integers(900_000)), int(rng.integers(1, 50_000))) for _ in range(20)]
            with concurrent.futures.ThreadPoolExecutor(5) as threads:
                found = [
                    threads.submit(read, storage, f"{source.url}/d/x", each) for each in ranges
                ]
                kill_node(tmp_path / "m", signal.SIGKILL if turn % 2 else signal.SIGTERM)
                assert [each.result(500) for each in found] == [cut(each) for each in ranges]
        # Each kill loses at most what was in flight: 20 ranges, with the pages that they touch
        assert source.bytes <= len(DATA) + 5 * 20 * (50_000 + 2 * 4096)


def test_without_a_node_process_the_source_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        FaultySource({"d/x": DATA}) as source,
        mirror(tmp_path / "m", source.url, patience=1.0) as settings,
    ):
        storage = make(settings)
        read(storage, f"{source.url}/d/x", (0, 10))
        node = find_node(tmp_path / "m")
        assert node is not None
        os.kill(node, signal.SIGSTOP)
        try:
            with caplog.at_level(logging.WARNING, "megablend"):
                fresh = make({**settings, "patience": 0.5})
                assert read(fresh, f"{source.url}/d/x", (400_000, 9)) == cut((400_000, 9))
            assert "reading the source without the mirror" in caplog.text
        finally:
            os.kill(node, signal.SIGCONT)


def test_a_node_process_that_stops_answering_is_not_waited_for(tmp_path: Path) -> None:
    with (
        FaultySource({"d/x": DATA}) as source,
        mirror(tmp_path / "m", source.url, patience=0.5) as settings,
    ):
        storage = make(settings)
        read(storage, f"{source.url}/d/x", (0, 10))
        node = find_node(tmp_path / "m")
        assert node is not None
        os.kill(node, signal.SIGSTOP)
        try:
            assert read(storage, f"{source.url}/d/x", (400_000, 9)) == cut((400_000, 9))
        finally:
            os.kill(node, signal.SIGCONT)


def test_bytes_are_counted_by_origin(tmp_path: Path) -> None:
    with (
        FaultySource({"d/x": DATA}) as source,
        mirror(tmp_path / "m", source.url, patience=0.5) as settings,
    ):
        storage = make(settings)
        meter = ReadMeter()
        read(storage, f"{source.url}/d/x", (0, 10))
        assert meter.take() == ReadCounts(source_bytes=4096)
        # A third of it is there
        read(storage, f"{source.url}/d/x", (0, 3 * 4096))
        assert meter.take() == ReadCounts(mirror_bytes=4096, source_bytes=2 * 4096)
        read(storage, f"{source.url}/d/x", (5, 100), (5000, 20))
        assert meter.take() == ReadCounts(mirror_bytes=120)
        node = find_node(tmp_path / "m")
        assert node is not None
        os.kill(node, signal.SIGSTOP)
        try:
            read(storage, f"{source.url}/d/x", (400_000, 9))
        finally:
            os.kill(node, signal.SIGCONT)
        assert meter.take() == ReadCounts(direct_bytes=9)


def test_bytes_of_other_nodes_are_counted(tmp_path: Path) -> None:
    ports = find_ports(2)
    nodes = [f"127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(FaultySource({"d/x": DATA}))
        storages = list[Storage]()
        for port in ports:
            own = {"nodes": nodes, "advertise": f"127.0.0.1:{port}", "port": port}
            settings = mirror(tmp_path / str(port), source.url, **own)
            storages.append(make(stack.enter_context(settings)))
        # The second one's node process has to run for the first one's to fetch
        for storage in storages:
            storage.stat(f"{source.url}/d/x")
        meter = ReadMeter()
        for storage in storages:
            assert read(storage, f"{source.url}/d/x", (0, 10)) == cut((0, 10))
        counts = meter.take()
        # One of them is the page's home: it asks the source, for itself or for the other one
        assert counts.peer_bytes == 4096
        assert counts in (
            ReadCounts(peer_bytes=4096, source_bytes=4096),
            ReadCounts(peer_bytes=4096, mirror_bytes=10),
        )
        assert source.bytes <= 2 * 4096


def test_reads_go_on_when_the_folder_is_removed(tmp_path: Path) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        storage = make(settings)
        read(storage, f"{source.url}/d/x", (0, 10))
        shutil.rmtree(tmp_path / "m")
        for start in range(0, 900_000, 100_000):
            assert read(storage, f"{source.url}/d/x", (start, 9)) == cut((start, 9))


def test_a_folder_that_cannot_be_a_mirror_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "full", source.url) as settings:
        with pytest.raises(
            ConfigError,
            match=r"(?s)full: is neither empty nor a mirror.*\nset `mirror.folder` to an empty folder",
        ):
            make(settings).stat(f"{source.url}/d/x")
        assert sorted(each.name for each in (tmp_path / "full").iterdir()) == ["mine"]


def test_a_folder_without_room_for_a_socket_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m" / "node.sock").mkdir(parents=True)
    (tmp_path / "m" / "mirror.json").write_text('{"format": 1, "id": "a"}')
    with mirror(tmp_path / "m", "s3://bucket") as settings:
        with pytest.raises(ConfigError, match=r"^mirror: .*node\.sock: Is a directory; "):
            make(settings).stat("s3://bucket/x")
        (tmp_path / "m" / "node.sock").rmdir()


def test_threads_that_wait_for_a_start_share_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def fail(*_: Any, **__: Any) -> subprocess.CompletedProcess[bytes]:
        starts.append(1)
        time.sleep(1)
        return subprocess.CompletedProcess([], 2, b"", b"m: does not support holes")

    monkeypatch.setattr(subprocess, "run", fail)
    with (
        mirror(tmp_path / "m", "s3://bucket") as settings,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        storage = make(settings)
        for number in (1, 2):  # later calls try again
            asked = [pool.submit(storage.stat, f"s3://bucket/{i}") for i in range(4)]
            assert all("holes" in str(each.exception()) for each in asked)
            assert len(starts) == number


def test_a_job_goes_on_if_its_node_process_cannot_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        storage = make(settings)
        assert read(storage, f"{source.url}/d/x", (0, 10)) == cut((0, 10))
        kill_node(tmp_path / "m")
        failed = subprocess.CompletedProcess([], 2, b"", b"m: Read-only file system")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
        assert read(storage, f"{source.url}/d/x", (500_000, 9)) == cut((500_000, 9))
        assert "the node process cannot be started: m: Read-only file system" in caplog.text


def test_a_new_copy_is_read_without_a_node_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        storage = make(settings)
        assert read(storage, f"{source.url}/d/x", (0, 10)) == cut((0, 10))
        kill_node(tmp_path / "m")
        folder = MirrorFolder.attach(str(tmp_path / "m"))
        with folder.lock():
            store = PageStore(folder, size=None, reserve=0)
            (key,) = store.keys()
            store.remove_file(key)
            store.write(key, pages_of_file(key.size), memoryview(DATA), math.inf)
            store.close()
        failed = subprocess.CompletedProcess([], 2, b"", b"m: Read-only file system")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
        num_bytes = source.bytes
        assert read(storage, f"{source.url}/d/x", (500_000, 9)) == cut((500_000, 9))
        assert source.bytes == num_bytes


def test_a_reserve_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with (
        FaultySource({"d/x": DATA}) as source,
        mirror(tmp_path / "m", source.url, reserve="900TB") as settings,
    ):
        with pytest.raises(
            ConfigError, match=r"leaves nothing for the mirror\nlower `mirror\.reserve`, or set"
        ):
            read(make(settings), f"{source.url}/d/x", (0, 10))
        settings["reserve"] = 0
        assert read(make(settings), f"{source.url}/d/x", (0, 10)) == cut((0, 10))


def test_other_credentials_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        assert read(make(settings), f"{source.url}/d/x", (0, 10)) == cut((0, 10))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-else")
        other = connect(settings)
        with pytest.raises(
            ConfigError, match="uses other credentials or settings for object stores than this"
        ):
            other.stat([f"{source.url}/d/x"])


def test_renewed_credentials_are_taken_when_nobody_reads_with_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        script = (
            "import json, sys; from megablend.storage.by_scheme import make_storage;"
            "from megablend.storage.store_options import parse_options; settings, url = json.loads(sys.argv[1]);"
            "make_storage(objects=parse_options({'mirror': settings})).read(url, 0, 100_000)"
        )
        order = json.dumps([settings, f"{source.url}/d/x"])
        subprocess.run([sys.executable, "-c", script, order], check=True, timeout=500)
        first = find_node(tmp_path / "m")
        before = source.bytes
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
        assert read(make(settings), f"{source.url}/d/x", (5, 10)) == cut((5, 10))
        assert source.bytes <= before + 1  # what was held is
        assert find_node(tmp_path / "m") not in (None, first)


def test_settings_that_a_message_asks_for_are_taken_by_the_next_job(tmp_path: Path) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        script = (
            "import json, sys; from megablend.storage.by_scheme import make_storage;"
            "from megablend.storage.store_options import parse_options; settings, url = json.loads(sys.argv[1]);"
            "make_storage(objects=parse_options({'mirror': settings})).read(url, 0, 900_000)"
        )
        held = []
        for size in ("100kB", "5MB"):
            order = json.dumps([settings | {"size": size}, f"{source.url}/d/x"])
            done = subprocess.run(
                [sys.executable, "-c", script, order], capture_output=True, text=True, timeout=500
            )
            assert done.returncode == 0, done.stderr
            held.append(get_status(settings)["held_bytes"])
        assert held[0] <= 100_000
        assert held[1] >= 900_000


def test_one_node_process_for_many_that_open_a_folder_at_once(tmp_path: Path) -> None:
    """And after it was killed."""
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        script = (
            "import json, sys; from megablend.storage.by_scheme import make_storage;"
            "from megablend.storage.store_options import parse_options; settings, url = json.loads(sys.argv[1]);"
            "storage = make_storage(objects=parse_options({'mirror': settings}));"
            "print(storage.read(url, 500_000, 300_000).hex()[:64], flush=True);"
            "sys.stdin.readline();"
            "print(storage.read(url, 100_000, 300_000).hex()[:64])"
        )
        argument = json.dumps([settings, f"{source.url}/d/x"])
        command = [sys.executable, "-c", script, argument]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(8)
        ]
        try:
            for each in processes:
                assert each.stdout is not None
                assert each.stdout.readline().strip() == DATA[500_000:500_032].hex()
            assert get_status(settings)["clients"] == len(processes) + 1
            kill_node(tmp_path / "m")
            for each in processes:
                out, _ = each.communicate("\n", timeout=500)
                assert out.strip() == DATA[100_000:100_032].hex()
        finally:
            for each in processes:
                each.kill()
        assert source.bytes <= 600_000 + 4 * 4096
        assert len([each for each in Path("/proc").iterdir() if is_node(each, tmp_path / "m")]) == 1


def test_reads_in_flight_end_with_their_process(tmp_path: Path) -> None:
    """Then no thread can be started any more that would read the source."""
    with (
        FaultySource({"d/x": DATA}) as source,
        mirror(tmp_path / "m", source.url) as settings,
    ):
        storage = make(settings)
        read(storage, f"{source.url}/d/x", (0, 10))
        script = (
            "import atexit, json, os, signal, sys; import numpy as np;"
            "from megablend.storage.by_scheme import make_storage;"
            "from megablend.storage.store_options import parse_options; settings, url, node = json.loads(sys.argv[1]);"
            "storage = make_storage(objects=parse_options({'mirror': settings}));"
            "storage.read(url, 0, 10);"
            "os.kill(node, signal.SIGSTOP);"
            "numbers = np.array([400_000]), np.array([9]);"
            "fetched = storage.fetch(url, *numbers, lambda size: np.empty(size, np.uint8));"
            "atexit.register(lambda: print(type(fetched.exception(timeout=100)).__name__));"
            "atexit.register(lambda: os.kill(node, signal.SIGKILL))"
        )
        argument = json.dumps([settings, f"{source.url}/d/x", find_node(tmp_path / "m")])
        command = [sys.executable, "-c", script, argument]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert (done.stdout.strip(), done.stderr) == ("RuntimeError", "")


def is_node(process: Path, folder: Path) -> bool:
    """Whether this is a node process of the folder."""
    try:
        return any(each.readlink() == folder / "node.lock" for each in (process / "fd").iterdir())
    except OSError:
        return False


def test_a_mirror_is_removed(tmp_path: Path) -> None:
    with FaultySource({"d/x": DATA}) as source, mirror(tmp_path / "m", source.url) as settings:
        storage = make(settings)
        read(storage, f"{source.url}/d/x", (0, 400_000))
        assert connect(settings).command(Kind.REMOVE)["files"] == 1
        kill_node(tmp_path / "m")
        assert not list((tmp_path / "m").rglob("*.data"))
        assert read(storage, f"{source.url}/d/x", (0, 10)) == cut((0, 10))


def test_nothing_of_a_mirror_is_loaded_without_one() -> None:
    code = (
        "import sys; from megablend.storage.by_scheme import make_storage; make_storage().route('s3://x/y');"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=500, capture_output=True, text=True
    )
    loaded = done.stdout.split()
    assert "megablend.storage.objects.store" in loaded
    assert not [each for each in loaded if each.startswith(("megablend.mirror", "aiohttp"))]

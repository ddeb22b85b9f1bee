"""Datasets on one machine: real commands, a real node process, a source that counts."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import subprocess
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megablend.errors import ConfigError
from megablend.mirror.node.frames import Kind
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.cli.commands import run
from tests.mirror.nodes import PATIENCE, connect, find_node, kill_node
from tests.mirror.test_clusters import cluster, until
from tests.preloaded import python
from tests.storage.faulty import CHUNK, Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore", "keys")
MB = 1 << 20


@pytest.fixture
def keys(plain_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


class Machine:
    """A mirror on a machine, and its commands."""

    def __init__(
        self,
        place: Path,
        source: FaultySource,
        limits: Mapping[str, object] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        self.folder = place / "mirror"
        self.source = source
        self.config = place / "config.json"
        mirror = {
            "folder": str(self.folder),
            "prefixes": ["s3://b/"],
            "reserve": 0,
            "patience": PATIENCE,
            **settings,
        }
        store = {"endpoint": source.url, "region": "x", **limits}
        self.storage = {"mirror": mirror, "s3://": store}
        place.mkdir(exist_ok=True)
        self.config.write_text(json.dumps({"storage": self.storage}))

    def run(self, *args: object) -> subprocess.CompletedProcess[str]:
        return run("datasets", *args, "--mirror", self.config)

    def ask(self, *args: object) -> dict[str, Any]:
        """The answer of a command, which is well."""
        done = self.run(*args, "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def fail(self, *args: object) -> tuple[int, str]:
        """Exit code and message of a command that is refused, which is one JSON object, too."""
        done = self.run(*args, "--json")
        error = json.loads(done.stdout)["error"]
        assert error["exit_code"] == done.returncode
        assert error["message"] in done.stderr
        return done.returncode, error["message"]

    def add(self, name: str, folder: str) -> str:
        """Returns: the revision."""
        return str(self.ask("add", name, f"s3://b/{folder}/")["digest"])

    def goals(self) -> dict[str, dict[str, Any]]:
        return {each["revision"]: each for each in self.ask("status")["goals"]}

    def read(self, location: str) -> bytes:
        """As a job would."""
        storage = make_storage(objects=parse_options(self.storage))
        return storage.read(location, 0, storage.stat(location).size)


@contextlib.contextmanager
def machine(folder: Path, files: dict[str, bytes], **settings: Any) -> Iterator[Machine]:
    with FaultySource({f"b/{name}": data for name, data in files.items()}) as source:
        made = Machine(folder, source, **settings)
        try:
            yield made
        finally:
            kill_node(made.folder)


def make_files(folder: str, sizes: dict[str, int], seed: int = 0) -> dict[str, bytes]:
    draw = random.Random(seed)
    return {f"{folder}/{name}": draw.randbytes(size) for name, size in sizes.items()}


MIXED = {"big.bin": 2 * MB + 5, "sub/mid.bin": 300_000, "sub/small.txt": 500, "empty": 0}


def count_sent(source: FaultySource) -> int:
    """Bytes that were sent, when all answers have ended: the last part is counted after it has come."""
    until(lambda: source.in_flight == 0)
    return source.bytes


def check_folder(path: object, files: dict[str, bytes], folder: str) -> None:
    found = {
        str(each.relative_to(str(path))): each.read_bytes()
        for each in Path(str(path)).rglob("*")
        if each.is_file()
    }
    assert found == {
        name.removeprefix(f"{folder}/"): data
        for name, data in files.items()
        if name.startswith(f"{folder}/")
    }


def test_a_dataset_is_held_and_is_a_folder(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with machine(tmp_path, files) as node:
        revision = node.add("corpus", "d")
        assert count_sent(node.source) < 20_000  # listings
        assert node.add("corpus", "d") == revision
        assert not node.ask("add", "corpus", "s3://b/d/")["is_new"]
        code, message = node.fail("path", "corpus")
        assert (code, message.splitlines()[1]) == (
            2,
            "request it: megablend datasets want corpus --copies all --wait",
        )
        before = count_sent(node.source)
        held = node.ask("want", "corpus", "--wait")
        assert (held["want"], held["revision"], held["missing"]) == ("corpus@latest", revision, 0)
        # Each byte once, and one more of each file, by which its version is seen
        assert 0 <= count_sent(node.source) - before - sum(map(len, files.values())) <= len(files)
        path = node.ask("path", "corpus")["path"]
        check_folder(path, files, "d")
        before = count_sent(node.source)
        node.source.is_down = True
        kill_node(node.folder)
        assert node.ask("want", "corpus", "--wait")["missing"] == 0
        assert node.ask("path", f"corpus@{revision[:4]}")["path"] == path
        # What jobs read is the same
        assert node.read("s3://b/d/big.bin") == files["d/big.bin"]
        assert count_sent(node.source) == before
        assert node.run("verify", "corpus").stdout == "compared 0.002 GB: 0 files were damaged\n"
        assert "corpus@latest: no longer wanted" in node.run("unwant", "corpus").stdout
        until(lambda: not Path(path).exists())
        assert node.goals() == {}


def test_what_a_folder_linked_to_is_kept_and_never_has_holes(tmp_path: Path) -> None:
    files = make_files("d", {"a": 900_000, "b": 900_000}) | make_files("e", {"c": 2_000_000})
    with machine(tmp_path, files, size="3200kB") as node:
        node.add("corpus", "d")
        node.add("other", "e")
        for _ in range(2):
            node.ask("want", "corpus", "--wait")
            path = Path(node.ask("path", "corpus")["path"])
            check_folder(path, files, "d")
            sent = count_sent(node.source)
            node.ask("unwant", "corpus")
            until(lambda path=path: not path.exists())  # type: ignore[misc]
            kill_node(node.folder)
            node.ask("want", "corpus", "--wait")
            assert count_sent(node.source) == sent
            path = Path(node.ask("path", "corpus")["path"])
            with (path / "a").open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            node.ask("unwant", "corpus")
            kill_node(node.folder)
            node.ask("want", "other", "--wait")
            assert mapped[:] == files["d/a"]
            node.ask("unwant", "other")


def test_what_others_put_into_a_folder_stays(tmp_path: Path) -> None:
    files = make_files("d", {"a": 900_000, "x/b": 900})
    with machine(tmp_path, files) as node:
        node.add("corpus", "d")
        node.ask("want", "corpus", "--wait")
        path = Path(node.ask("path", "corpus")["path"])
        (path / "x" / "notes").write_text("mine")
        node.ask("unwant", "corpus")
        until(lambda: not (path / "a").exists() and not (path / "x" / "b").exists())
        assert (path / "x" / "notes").read_text() == "mine"
        node.ask("want", "corpus", "--wait")
        assert Path(node.ask("path", "corpus")["path"], "a").read_bytes() == files["d/a"]


def test_a_killed_process_costs_what_it_had_not_stored(tmp_path: Path) -> None:
    files = make_files("d", {f"{i}.bin": MB + i for i in range(24)})
    with machine(tmp_path, files) as node:
        revision = node.add("corpus", "d")
        node.source.faults = Faults(rate=8e6)
        node.ask("want", "corpus")
        for number in (1, 2):
            while node.source.bytes < number * 7 * MB:
                time.sleep(0.01)
            kill_node(node.folder)
            node.ask("list")
            until(lambda: revision in node.goals())
            before = node.source.bytes
            missing = node.goals()[revision]["missing"]
            assert missing < 24 * (MB + 4096)
        # It is waited for longer than `patience`
        node.storage["mirror"]["patience"] = 2.0
        node.config.write_text(json.dumps({"storage": node.storage}))
        node.source.faults = Faults(rate=2e6)
        node.ask("want", "corpus", "--wait")
        # Nothing is read again but what was in flight
        assert count_sent(node.source) - before <= missing + len(files) + CHUNK
        check_folder(node.ask("path", "corpus")["path"], files, "d")


def test_the_latest_revision_moves_when_it_is_complete(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with machine(tmp_path, files) as node:
        first = node.add("corpus", "d")
        node.ask("want", "corpus", "--wait")
        path = Path(node.ask("path", "corpus")["path"])
        fd = os.open(path / "big.bin", os.O_RDONLY)
        mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        os.close(fd)
        new = files | make_files("d", {"big.bin": 2 * MB + 7}, seed=1)
        node.source.files = {f"b/{name}": data for name, data in new.items()}
        before = count_sent(node.source)
        node.source.faults = Faults(rate=1e6)
        second = node.add("corpus", "d")
        until(lambda: {first, second} <= node.goals().keys())
        assert node.ask("path", "corpus")["revision"] == first
        code, message = node.fail("path", f"corpus@{second[:8]}")
        assert code == 3
        assert f"corpus@{second[:12]}: " in message
        assert " bytes are missing on this node, in 1 of 4 files\nwait for them: " in message
        node.source.faults = Faults()
        node.ask("want", "corpus", "--wait")
        # Equal files are not fetched again
        assert count_sent(node.source) - before < len(new["d/big.bin"]) + 10_000
        until(lambda: set(node.goals()) == {second})
        check_folder(node.ask("path", "corpus")["path"], new, "d")
        # Whoever has mapped the old one keeps it
        assert mapped[:] == files["d/big.bin"]
        until(lambda: not (path / "big.bin").exists())
        assert mapped[:] == files["d/big.bin"]


def test_a_folder_is_of_the_latest_revision_whichever_others_are_wanted(tmp_path: Path) -> None:
    files = make_files("d", {"a.bin": MB, "b.txt": 3000})
    with machine(tmp_path, files) as node:
        first = node.add("corpus", "d")
        node.ask("want", f"corpus@{first}", "--wait")
        node.source.files["b/d/b.txt"] = b"changed"
        second = node.add("corpus", "d")
        # Twice, since what has a folder is pinned from then on
        for _ in range(2):
            node.ask("want", "corpus", "--wait")
            assert node.ask("path", "corpus")["revision"] == second


def test_a_source_that_moved_is_not_fetched_again(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    moved = {name.replace("d/", "e/"): data for name, data in files.items()}
    moved["e/big.bin"] = bytes(MB)
    with machine(tmp_path, files) as node:
        node.add("corpus", "d")
        node.ask("want", "corpus", "--wait")
        node.source.files = {f"b/{name}": data for name, data in moved.items()}
        before = count_sent(node.source)
        second = node.add("corpus", "e")
        assert node.ask("want", "corpus", "--wait")["revision"] == second
        # The listing, and the file that is another one
        assert MB <= count_sent(node.source) - before <= MB + 20_000
        check_folder(node.ask("path", "corpus")["path"], moved, "e")
        assert "bug" not in (node.folder / "node.log").read_text()


def test_pinned_data_is_never_evicted_and_wants_that_do_not_fit_wait(tmp_path: Path) -> None:
    names = {f"{i}.bin": 250_000 for i in range(4)}
    files = dict[str, bytes]()
    for seed, name in enumerate(("pinned", "first", "second", "job")):
        files |= make_files(name, names, seed)
    with machine(tmp_path, files, size="3200kB") as node:
        revisions = {name: node.add(name, name) for name in ("pinned", "first", "second")}
        node.ask("pin", f"pinned@{revisions['pinned'][:6]}")
        node.ask("want", "first", "--wait")
        node.ask("want", "second", "--wait")
        for _ in range(2):
            for name in names:
                assert node.read(f"s3://b/job/{name}") == files[f"job/{name}"]
        # What a job needs now takes the room of what is wanted, not of what is pinned
        before = count_sent(node.source)
        node.source.is_down = True
        path = node.ask("path", f"pinned@{revisions['pinned'][:6]}")["path"]
        check_folder(path, files, "pinned")
        assert count_sent(node.source) == before
        node.source.is_down = False
        for name in ("first", "second"):
            node.ask("want", name, "--wait")
        # 1.3 times the room is wanted
        third = node.add("third", "job")
        code, message = node.fail("want", "third", "--wait")
        assert code == 3
        assert "third@latest does not fit: " in message
        assert "\nremove other wants with" in message
        before = count_sent(node.source)
        for _ in range(3):
            assert node.goals()[third]["short"] > 700_000
            assert all(not each["missing"] for each in node.goals().values() if not each["short"])
            node.add("third", "job")  # all is computed again
        assert count_sent(node.source) - before < 30_000  # listings
        assert "  does not fit: 0.001 GB more than is left" in node.run("status").stdout
        code, message = node.fail("want", f"third@{third}", "--pin", "--until", "2020-01-01")
        assert (code, message.splitlines()[0]) == (2, "--until: 2020-01-01 is in the past")
        node.ask("unwant", "first")
        node.ask("want", "third", "--wait")


def test_what_can_never_fit_is_refused(tmp_path: Path) -> None:
    files = make_files("d", {"a": 600_000}) | make_files("e", {"b": 600_000}, 1)
    with machine(tmp_path, files, size="1MB") as node:
        first = node.add("d", "d")
        second = node.add("e", "e")
        node.add("both", "")
        code, message = node.fail("want", "both")
        assert code == 2
        assert message.startswith("both@latest cannot fit on this node: 1,204,224 bytes of it")
        node.ask("want", f"d@{first}", "--pin", "--wait")
        code, message = node.fail("pin", f"e@{second}")
        assert code == 2
        assert (
            f"e@{second[:12]} cannot fit on this node: 602,112 bytes of it and 602,112 pinned"
            in message
        )
        node.ask("unpin", f"d@{first}")
        node.ask("pin", f"e@{second}")
        node.ask("want", f"e@{second}", "--pin", "--wait")


def test_bad_input(tmp_path: Path) -> None:
    with machine(tmp_path, make_files("d", MIXED)) as node:
        revision = node.add("corpus", "d")
        assert node.fail("want", "corpse") == (
            2,
            "'corpse': no such dataset: did you mean 'corpus'?\n"
            "list the datasets with `megablend datasets list`, or add one with `megablend datasets add NAME SOURCE...`",
        )
        code, message = node.fail("want", f"corpus@{revision[:11]}x")
        assert code == 2
        assert f"no such revision: did you mean '{revision[:12]}'?\n" in message
        code, message = node.fail("want", "corpus@lates")
        assert "did you mean 'latest'?" in message
        code, message = node.fail("want", "corpus", "--pin")
        assert message.endswith(
            f"only a fixed revision can be pinned\npin the latest revision: corpus@{revision[:12]}"
        )
        assert node.fail("pin", "corpus")[1] == message
        assert node.fail("unwant", "corpus") == (
            2,
            "'corpus' is not wanted on this node\nrequest it with `megablend datasets want corpus`",
        )
        assert node.fail("add", "a/b", "s3://b/d/")[0] == 2
        code, message = node.fail("add", "e", "s3://b/nothing/*")
        assert (code, message.splitlines()[0]) == (2, "s3://b/nothing/*: matches no files")
        for refused, reason in {
            "s3://other/d/": "is outside the prefixes that",
            "/etc/shadow": "is outside the prefixes that",
            "http://169.254.169.254/x": "is outside the prefixes that",
            "s3://b/../x": "has `..`, `?` or a NUL in its path",
            "http://[::ffff:127.0.0.1]:9/x": "is outside the prefixes that",
        }.items():
            code, message = node.fail("add", "e", refused)
            assert code == 2
            assert message.startswith(f"{refused}: {reason}")
            remedy = "rename the file at its source" if ".." in refused else "add a prefix of it to"
            assert message.splitlines()[1].startswith(remedy)
        assert node.fail("want", "corpus", "--until", "soon")[1].startswith("--until: found 'soon'")
        assert node.fail("want", "corpus", "--nodes", ",")[1].startswith("--nodes: found ','")
        assert run("datasets", "list").stderr.startswith("megablend: no mirror given\n")
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("MEGABLEND_DATASETS", str(node.config))
            assert run("datasets", "list").returncode == 0
        done = run("datasets", "list", "--mirror", tmp_path)
        assert done.returncode == 2
        assert len(node.ask("list")["revisions"]) == 1


def test_a_prefix_that_a_message_asks_for_is_taken_at_once(tmp_path: Path) -> None:
    """The node process that the first command has started is of the settings of before."""
    with (
        machine(tmp_path, {"e/x": b"x"}) as node,
        FaultySource({"e/x": b"x"}) as web,
    ):
        url = f"{web.url}/e/x"
        code, message = node.fail("add", "e", url)
        assert (code, message.partition("\n")[0]) == (
            2,
            f"{url}: is outside the prefixes that this node's mirror may fetch",
        )
        assert not web.paths
        node.storage["mirror"]["prefixes"].append(f"{web.url}/")
        node.config.write_text(json.dumps({"storage": node.storage}))
        assert node.ask("add", "e", url)["num_files"] == 1


def test_queries_of_urls_are_kept_in_memory_only(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(100_000)
    with (
        FaultySource({"e/x": data}) as web,
        machine(tmp_path, {}, prefixes=[f"{web.url}/"]) as node,
    ):
        node.ask("add", "e", f"{web.url}/e/x?signature=CANARY")
        node.ask("want", "e", "--copies", "all", "--wait")
        assert (Path(node.ask("path", "e")["path"]) / "x").read_bytes() == data
        assert "CANARY" not in json.dumps(node.ask("list"))
        for path in node.folder.rglob("*"):
            assert not path.is_file() or b"CANARY" not in path.read_bytes()


def test_a_copy_that_was_deleted_behind_the_mirror_s_back_is_got_again(tmp_path: Path) -> None:
    files = make_files("d", {"a": 300_000, "b": 400_000})
    with machine(tmp_path, files) as node:
        node.add("corpus", "d")
        node.ask("want", "corpus", "--wait")
        for path in (node.folder / "files").rglob("*.data"):
            path.unlink()
        for _ in files:
            code, message = node.fail("path", "corpus")
            assert code == 3
            assert "the mirror no longer holds this file\nrequest the folder again" in message
            node.ask("want", "corpus", "--wait")
        check_folder(node.ask("path", "corpus")["path"], files, "d")


def test_a_command_of_another_version_is_told_so(tmp_path: Path) -> None:
    with machine(tmp_path, {}) as node:
        node.ask("list")
        connection = connect({"folder": str(node.folder)})
        for request in ({"verb": "list", "new": 1}, {"verb": "new"}, {}):
            with pytest.raises(ConfigError, match="it runs another version of megablend"):
                connection.command(Kind.DATASETS, request)


def test_a_want_is_past_at_its_time(tmp_path: Path) -> None:
    with machine(tmp_path, make_files("d", {"a": 300_000})) as node:
        node.add("corpus", "d")
        end = datetime.now() + timedelta(seconds=1.5)
        node.ask("want", "corpus", "--until", end.isoformat())
        time.sleep(max(0.0, (end - datetime.now()).total_seconds()))
        assert node.ask("list")["wants"] == []
        assert node.ask("status")["goals"] == []
        assert node.fail("unwant", "corpus")[0] == 2
        assert node.ask("status")["capacity"] > 0


def test_a_list_of_urls_is_remembered_by_its_name(tmp_path: Path) -> None:
    names = [f"e/{i:04}" for i in range(200)]
    with (
        FaultySource(dict.fromkeys(names, b"x")) as web,
        machine(tmp_path, {}, prefixes=[f"{web.url}/"]) as node,
    ):
        listed = tmp_path / "e.urls"
        listed.write_text("".join(f"{web.url}/{name}\n" for name in names))
        assert node.ask("add", "e", listed)["num_files"] == 200
        (revision,) = node.ask("list")["revisions"]
        assert revision["sources"] == [str(listed)]


def test_files_that_are_not_what_was_listed(tmp_path: Path) -> None:
    files = make_files("d", {f"{i}": 100_000 for i in range(3)})
    with machine(tmp_path, files) as node:
        node.add("corpus", "d")
        node.source.files["b/d/1"] = b"other" * 30_000
        code, message = node.fail("want", "corpus", "--wait")
        assert code == 3
        assert message == (
            "s3://b/d/1: was replaced at the source after it was listed\n"
            "make a revision of the files that exist now: `megablend datasets add corpus SOURCE...`"
        )
        del node.source.files["b/d/1"]
        code, message = node.fail("want", "corpus", "--wait")
        assert code == 3
        assert message.startswith("s3://b/d/1: was deleted at the source after it was listed\n")
        (goal,) = node.goals().values()
        assert goal["missing"] == 102_400
        until(lambda: "s3://b/d/1" in next(iter(node.goals().values()))["trouble"])
        # A new revision is what there is
        node.add("corpus", "d")
        node.ask("want", "corpus", "--wait")
        check_folder(
            node.ask("path", "corpus")["path"], {k: v for k, v in files.items() if k != "d/1"}, "d"
        )


def test_wrong_bytes_are_found_and_replaced(tmp_path: Path) -> None:
    files = make_files("d", {"a": 300_000, "b": 400_000})
    with machine(tmp_path, files) as node:
        node.add("corpus", "d")
        node.ask("want", "corpus", "--wait")
        path = Path(node.ask("path", "corpus")["path"])
        (path / "a").chmod(0o600)
        with (path / "a").open("r+b") as file:
            file.seek(5000)
            file.write(b"wrong")
        done = node.run("verify", "corpus")
        assert (done.returncode, done.stdout.splitlines()[0]) == (3, "damaged, and dropped: a")
        node.ask("want", "corpus", "--wait")
        check_folder(node.ask("path", "corpus")["path"], files, "d")


def test_what_nobody_wants_is_forgotten(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with machine(tmp_path, files) as node:
        first = node.add("corpus", "d")
        node.ask("want", f"corpus@{first}", "--wait")
        node.source.files["b/d/big.bin"] = bytes(MB)
        second = node.add("corpus", "d")
        assert node.ask("gc")["revisions"] == []
        node.ask("unwant", f"corpus@{first}")
        assert node.ask("gc") == {
            "revisions": [f"corpus@{first[:12]}"],
            "files": 1,
            "bytes": 2 * MB + 4096,
        }
        node.ask("pin", f"corpus@{second}")
        code, message = node.fail("remove", "corpus")
        assert code == 2
        assert message.endswith(
            f"is pinned\nunpin it first: megablend datasets unpin corpus@{second[:12]}"
        )
        node.ask("want", f"corpus@{second}", "--wait")
        path = Path(node.ask("path", "corpus")["path"])
        done = node.ask("remove", "corpus")
        assert (done["files"], done["bytes"]) == (4, MB + 303_104 + 4096)
        assert not path.exists()
        assert node.ask("list") == {"revisions": [], "wants": [], "listed": {}}
        assert run("node", "remove", node.config).returncode == 0
        until(lambda: not node.folder.exists())


def test_a_want_ends(tmp_path: Path) -> None:
    with machine(tmp_path, make_files("d", MIXED)) as node:
        node.add("corpus", "d")
        end = time.time() + 2
        node.ask(
            "want", "corpus", "--until", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end + 1))
        )
        assert node.ask("list")["wants"] == ["corpus@latest"]
        until(lambda: time.time() > end + 2)
        node.add("corpus", "d")
        until(lambda: node.ask("list")["wants"] == [])


def test_a_catalog_that_is_damaged_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    with machine(tmp_path, make_files("d", MIXED)) as node:
        node.add("corpus", "d")
        node.ask("want", "corpus", "--wait")
        kill_node(node.folder)
        database = node.folder / "datasets.db"
        for end in ("-wal", "-shm"):
            Path(f"{database}{end}").unlink(missing_ok=True)
        database.write_bytes(b"x" * 8192)
        code, message = node.fail("list")
        assert code == 2
        assert f"{database}: is damaged (" in message
        assert "restore this file, or remove it and request the datasets again" in message
        database.unlink()
        assert node.ask("list") == {"revisions": [], "wants": [], "listed": {}}


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_damaged_manifest_holds_up_nothing_else(is_gone: bool, tmp_path: Path) -> None:
    """Nor jobs that read through the mirror; the remedy that the message names is one."""
    files = make_files("d", MIXED) | make_files("e", {"x": 100_000})
    with machine(tmp_path, files) as node:
        lost = node.add("corpus", "d")
        node.add("other", "e")
        node.ask("want", "corpus", "--wait")
        folder = node.ask("path", "corpus")["path"]
        node.ask("want", "other")
        kill_node(node.folder)
        manifest = node.folder / "manifests" / f"{lost}.zlib"
        manifest.write_bytes(manifest.read_bytes()[:-3])
        if is_gone:
            manifest.unlink()
        before = count_sent(node.source)
        assert node.read("s3://b/d/big.bin") == files["d/big.bin"]
        assert node.ask("want", "other", "--wait")["missing"] == 0
        trouble = node.goals()[lost]["trouble"]
        assert f"{manifest}: " in trouble
        assert "add the dataset again with `megablend datasets add`" in trouble
        assert node.fail("want", "corpus", "--wait")[0] == 3
        assert node.fail("path", "corpus")[0] == 3
        # It is of the same files: nothing is fetched
        assert node.add("corpus", "d") == lost
        assert node.ask("want", "corpus", "--wait")["missing"] == 0
        assert count_sent(node.source) <= before + 100_000 + 10_000  # with listings
        check_folder(folder, files, "d")
        manifest.write_bytes(b"")
        kill_node(node.folder)
        assert node.ask("unwant", "corpus")["want"] == "corpus@latest"
        assert node.ask("remove", "corpus")["revisions"] == [f"corpus@{lost[:12]}"]
        assert not Path(folder).exists()
        assert [each["dataset"] for each in node.ask("list")["revisions"]] == ["other"]


def test_a_small_file_that_a_power_failure_cut_is_written_again(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with machine(tmp_path, files) as node:
        node.add("corpus", "d")
        node.ask("want", "corpus", "--wait")
        folder = Path(node.ask("path", "corpus")["path"])
        (folder / "sub/small.txt").unlink()
        (folder / "sub/small.txt").write_bytes(b"")
        node.ask("path", "corpus")
        check_folder(folder, files, "d")


def test_nodes_hold_their_shares(tmp_path: Path) -> None:
    files = make_files("d", {f"{i}.bin": 9 * MB for i in range(4)})
    with (
        FaultySource({f"b/{name}": data for name, data in files.items()}) as source,
        cluster(tmp_path, source, 3) as settings,
    ):
        nodes = [
            Machine(tmp_path / f"c{i}", source, **{**each, "prefixes": ["s3://b/"]})
            for i, each in enumerate(settings)
        ]
        for i, each in enumerate(nodes):
            each.folder = tmp_path / f"node{i}"
        (revision,) = {each.add("corpus", "d") for each in nodes}
        before = count_sent(source)
        for each in nodes:
            each.ask("want", "corpus")
        held = [each.ask("want", "corpus", "--wait")["bytes"] for each in nodes]
        assert sum(held) == 36 * MB
        assert 0 <= count_sent(source) - before - 36 * MB <= 3 * len(files)
        source.is_down = True
        code, message = nodes[0].fail("path", "corpus")
        assert code == 3
        assert " bytes are missing on this node, in " in message
        assert nodes[0].ask("want", "corpus", "--copies", "all", "--wait")["bytes"] == 36 * MB
        check_folder(nodes[0].ask("path", f"corpus@{revision}")["path"], files, "d")


def test_jobs_without_wants_import_nothing_of_it(tmp_path: Path) -> None:
    code = (
        "import sys, megablend.cli.main, megablend.mirror.process, megablend.mirror.rank.mirror_storage\n"
        "print([name for name in sys.modules if name.startswith('megablend.mirror.catalog')])"
    )
    done = subprocess.run([*python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with machine(tmp_path, make_files("d", MIXED)) as node:
        node.read("s3://b/d/big.bin")
        assert find_node(node.folder) is not None
        assert not (node.folder / "datasets.db").exists()

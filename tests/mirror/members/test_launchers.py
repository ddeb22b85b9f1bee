"""Lists of nodes, and which of them this machine is."""

import socket
from pathlib import Path

import pytest

from megablend.errors import ConfigError
from megablend.mirror.members.launchers import (
    Torchrun,
    find_address_towards,
    find_self,
    find_torchrun,
    list_nodes,
    make_name,
)


def test_a_list_with_and_without_ports() -> None:
    assert list_nodes(("Node1", "node2:80", "[fd00::1]"), 7171, {}) == [
        "[fd00::1]:7171",
        "node1:7171",
        "node2:80",
    ]


def test_a_file_has_a_line_a_node(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("# rack 1\n\nn1\n n2:99 # spare\n")
    assert list_nodes(str(path), 7171, {}) == ["n1:7171", "n2:99"]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", "gpu1"),
        ("gpu[01-03,7],login", "gpu01 gpu02 gpu03 gpu7 login"),
        ("r[1-2]n[08-10]", "r1n08 r1n09 r1n10 r2n08 r2n09 r2n10"),
        ("a[0]-ib,b", "a0-ib b"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("b,a[2,1]", "a1 a2 b"),
    ],
)
def test_slurms_notation(text: str, hosts: str) -> None:
    names = list_nodes("slurm", 7171, {"SLURM_JOB_NODELIST": text})
    assert names == [f"{host}:7171" for host in hosts.split()]


def test_a_steps_machines_before_the_jobs() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[1-2]"}
    assert list_nodes("slurm", 1, environ) == ["n1:1", "n2:1"]


@pytest.mark.parametrize(
    ("nodes", "environ", "message"),
    [
        ((), {}, r"0 nodes in the list, expected 1 to \d+ different nodes\nlist"),
        (("a", "a:7171"), {}, r"found a:7171 2 times in the list"),
        (("a b",), {}, r"found 'a b', expected host or host:port\ngive"),
        (("a:0",), {}, r"found 'a:0', expected"),
        (("a:70000",), {}, r"found 'a:70000', expected"),
        (("http://a",), {}, r"found 'http://a', expected"),
        (
            "slurm",
            {},
            r"found neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST\nrun this in a Slurm job",
        ),
        (
            "slurm",
            {"SLURM_JOB_NODELIST": "n[1-x]"},
            r"cannot parse 'n\[1-x\]' in .*\nlist",
        ),
        (
            "slurm",
            {"SLURM_JOB_NODELIST": "n[3-1]"},
            r"cannot parse 'n\[3-1\]' in .*\nlist",
        ),
        ("slurm", {"SLURM_JOB_NODELIST": "n[]"}, r"cannot parse 'n\[\]' in .*\nlist"),
        ("slurm", {"SLURM_JOB_NODELIST": "n[1-2,b"}, r"found 'n\[1-2', expected host"),
        ("slurm", {"SLURM_JOB_NODELIST": "n1,,n2"}, r"found '', expected host"),
        ("slurm", {"SLURM_JOB_NODELIST": "n[1-99999]m[1-99999]"}, r"found 65537 nodes in SLURM"),
        (
            "/nowhere/nodes",
            {},
            r"/nowhere/nodes: cannot be read as a list of nodes: .*\ngive a file",
        ),
    ],
)
def test_lists_that_are_none(
    nodes: tuple[str, ...] | str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        list_nodes(nodes, 7171, environ)


def test_a_port_that_is_none() -> None:
    assert make_name("a", 7171) == "a:7171"
    with pytest.raises(ConfigError, match="found 'a:123456', expected"):
        make_name("a:123456", 7171)


def test_this_machine_by_name_by_address_and_by_setting() -> None:
    name = socket.gethostname().lower()
    assert find_self([f"{name}:7171", "other:7171"], 7171, None, {}) == f"{name}:7171"
    assert find_self(["127.0.0.1:1", "127.0.0.1:2"], 2, None, {}) == "127.0.0.1:2"
    assert find_self(["n1:1", "n2:1"], 1, None, {"SLURMD_NODENAME": "N2"}) == "n2:1"
    assert find_self(["n1:1", "n2:2"], 1, "n2:2", {}) == "n2:2"


@pytest.mark.parametrize(
    ("names", "advertise", "message"),
    [
        (
            ["198.51.100.1:7171", "198.51.100.2:7171"],
            None,
            r"none of 198.51.100.1:7171, .* match this machine \(.*, port 7171\)\nset `advertise`",
        ),
        (["127.0.0.1:80"], None, r"none of 127.0.0.1:80 match this machine"),
        (["127.0.0.1:7171", "localhost:7171"], None, r"several of 127.0.0.1:7171, localhost:7171"),
        (
            ["n1:7171"],
            "n2",
            r"advertise: n2:7171 is not one of the nodes \(n1:7171\)\nset `advertise`",
        ),
    ],
)
def test_no_or_several_entries_for_this_machine(
    names: list[str], advertise: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_self(names, 7171, advertise, {"SLURMD_NODENAME": "elsewhere"})


def test_torchrun_names_the_first_machine() -> None:
    environ = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "n1"}
    assert find_torchrun(7171, environ) == Torchrun(1, 4, "n1:7171")
    assert find_torchrun(7171, environ | {"MASTER_ADDR": "fd00::1"}).first == "[fd00::1]:7171"
    for name in environ:
        with pytest.raises(ConfigError, match=rf"torch: found .*{name}=None.*\nstart the job with"):
            find_torchrun(7171, {key: environ[key] for key in environ.keys() - {name}})
    for rank in ("4", "-1", "²"):
        with pytest.raises(ConfigError, match=f"GROUP_RANK={rank}, "):
            find_torchrun(7171, environ | {"GROUP_RANK": rank})


def test_the_address_towards_another_machine() -> None:
    assert find_address_towards("127.0.0.1:80") == "127.0.0.1"
    for name in ("nothing.invalid:80", "a..b:80"):
        with pytest.raises(
            ConfigError, match=rf"{name} \(MASTER_ADDR\) cannot be reached: .*\nset"
        ):
            find_address_towards(name)

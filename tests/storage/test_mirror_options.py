"""The settings of a mirror: what they may be, what a node may fetch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from megablend.storage.mirror_options import EtcdOptions, MirrorOptions, TlsFiles, parse_mirror
from megablend.storage.store_options import find_options, make_files_absolute, parse_options

TLS = {"certificate": "c.pem", "key": "k.pem", "ca": "ca.pem"}

ETCD = {"endpoints": ["http://a:2379"], "nodes_expected": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, r"mirror: found 7, expected a folder, or settings with `folder`"),
        ({}, "mirror: has no `folder`"),
        ({"folder": ""}, "mirror: folder: found '', expected text"),
        ({"folder": None}, "mirror: folder: found None, expected text"),
        ({"folder": "m", "sise": "1TB"}, "mirror: sise: unknown setting; did you mean 'size'"),
        (
            {"folder": "m", "size": "big"},
            "mirror: size: found 'big', expected a size such as 512MiB",
        ),
        ({"folder": "m", "size": -1}, "mirror: size: found -1, expected a size"),
        ({"folder": "m", "size": True}, "mirror: size: found True, expected a size"),
        ({"folder": "m", "patience": 0}, "mirror: patience: found 0, expected a number above 0"),
        ({"folder": "m", "prefixes": "s3://"}, "mirror: prefixes: found 's3://', expected a list"),
        ({"folder": "m", "prefixes": []}, "mirror: prefixes: found .*, expected a list"),
        ({"folder": "m", "size": 0}, "mirror: size: found 0, expected at least 4096 bytes"),
        ({"folder": "m", "size": "0.1"}, "mirror: size: found '0.1', expected at least 4096"),
        ({"folder": "m", "size": 1.5}, "mirror: size: found 1.5, expected at least 4096 bytes"),
        ({"folder": "m", "size": "1KB"}, "size: found '1KB', expected at least 4096 bytes"),
        ({"folder": "m", "size": 4095}, "size: found 4095, expected at least 4096 bytes"),
        ({"folder": "m", "size": "5i"}, "mirror: size: found '5i', expected a size"),
        ({"folder": "m", "size": "1..5"}, "mirror: size: found '1..5', expected a size"),
        ({"folder": "m", "size": "1e999999999"}, "mirror: size: found .*, expected a size"),
        ({"folder": "m", "reserve": "i"}, "mirror: reserve: found 'i', expected a size"),
        ({"folder": "m", "prefixes": ["s3://", "data"]}, "prefixes: found 'data', expected a URL"),
        ({"folder": "m", "prefixes": ["s4://b"]}, "prefixes: found 's4://b', expected a URL pre"),
        ({"folder": "m", "prefixes": [7]}, "prefixes: found 7, expected text"),
        ({"folder": "s3://b"}, "folder: found 's3://b', expected a path on this machine"),
        ("s3://b", "folder: found 's3://b', expected a path on this machine"),
        (
            {"folder": "m", "nodes": []},
            r"nodes: found \[\], expected a list of host:port, the path",
        ),
        ({"folder": "m", "nodes": ["a"]}, "nodes: found 'a', expected host:port"),
        ({"folder": "m", "nodes": ["a:70000"]}, "nodes: found 'a:70000', expected host:port"),
        ({"folder": "m", "nodes": ["x/a:1"]}, "nodes: found 'x/a:1', expected host:port"),
        ({"folder": "m", "nodes": ["a:1", "a:1"]}, "nodes: found 'a:1' twice"),
        ({"folder": "m", "nodes": "a:1"}, r"nodes: found 'a:1', expected a list .*\[a:1"),
        ({"folder": "m", "nodes": "s3://a"}, "nodes: found 's3://a', expected a path"),
        ({"folder": "m", "nodes": "slurm", "copies": 0}, "copies: found 0, expected a whole"),
        ({"folder": "m", "nodes": "slurm", "copies": "both"}, "copies: found 'both', .* or `all`"),
        (
            {"folder": "m", "nodes": ["a:1", "b:1"], "copies": 3},
            "copies: found 3, expected at most 2, the number of `nodes`",
        ),
        ({"folder": "m", "nodes": "slurm", "port": 0}, "port: found 0, expected a port, 1 to"),
        ({"folder": "m", "nodes": "slurm", "port": True}, "port: found True, expected a port"),
        ({"folder": "m", "nodes": "slurm", "advertise": "a:b"}, "advertise: found 'a:b', expe"),
        ({"folder": "m", "nodes": "slurm", "strict": 1}, "strict: found 1, expected true or"),
        ({"folder": "m", "nodes": "slurm", "max_peer_rate": 0}, "max_peer_rate: found 0, expec"),
        ({"folder": "m", "nodes": "slurm", "secret_file": "s3://x"}, "secret_file: found 's3://x'"),
        (
            {"folder": "m", "nodes": "slurm", "tls": {"key": "k"}},
            "tls: has no `certificate`; set it",
        ),
        (
            {"folder": "m", "nodes": "slurm", "tls": {**TLS, "crl": "x"}},
            "tls: crl: unknown setting",
        ),
        ({"folder": "m", "nodes": "slurm", "tls": {**TLS, "ca": None}}, "tls: ca: found None"),
        (
            {"folder": "m", "nodes": "slurm", "tls": TLS, "secret_file": "s"},
            "secret_file: found together with `tls`; keep one",
        ),
        ({"folder": "m", "nodes": "etcd"}, "nodes: found etcd, but no `etcd` with `endpoints` and"),
        ({"folder": "m", "nodes": "slurm", "etcd": ETCD}, "etcd: found without `nodes: etcd`"),
        ({"folder": "m", "etcd": ETCD}, "etcd: needs `nodes`"),
        ({"folder": "m", "nodes": "etcd", "etcd": "a:1"}, "etcd: found 'a:1', expected settings"),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {"nodes_expected": 2}},
            "etcd: has no `endpoints`; set it",
        ),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {"endpoints": ["http://a:1"]}},
            "etcd: has no `nodes_expected`; set it",
        ),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {**ETCD, "endpoints": "http://a:1"}},
            "etcd: endpoints: found 'http://a:1', expected a list of URLs",
        ),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {**ETCD, "endpoints": ["a:2379"]}},
            "etcd: endpoints: found 'a:2379', expected a URL such as",
        ),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {**ETCD, "endpoints": ["http://u:p@a:1"]}},
            "etcd: endpoints: contains a user or password",
        ),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {**ETCD, "prefix": "/a"}},
            "etcd: prefix: found '/a', expected letters",
        ),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {**ETCD, "nodes_expected": 0.5}},
            "etcd: nodes_expected: found 0.5, expected a whole number",
        ),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {**ETCD, "lease": 0.5}},
            "etcd: lease: found 0.5, expected 1 second or more",
        ),
        (
            {"folder": "m", "nodes": "etcd", "etcd": {**ETCD, "leese": 3}},
            "etcd: leese: unknown setting; did you mean 'lease'",
        ),
        ({"folder": "m", "copies": 2}, "mirror: copies: needs `nodes`"),
        ({"folder": "m", "copies": "all"}, "copies: needs `nodes`"),
        ({"folder": "m", "port": 7}, "port: needs `nodes`"),
        ({"folder": "m", "advertise": "a"}, "advertise: needs `nodes`"),
        ({"folder": "m", "strict": True}, "strict: needs `nodes`"),
        ({"folder": "m", "secret_file": "s"}, "secret_file: needs `nodes`"),
        ({"folder": "m", "tls": TLS}, "tls: needs `nodes`"),
        ({"folder": "m", "insecure": True}, "insecure: needs `nodes`"),
        ({"folder": "m", "max_peer_rate": 7}, "max_peer_rate: needs `nodes`"),
    ],
)
def test_wrong_settings_are_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options({"mirror": given})


def test_sizes_paths_and_the_rest_of_storage() -> None:
    given = {
        "mirror": {
            "folder": "m",
            "size": "1.5 TB",
            "reserve": "10GiB",
            "prefixes": ["s3://b/", "/base/x/../data"],
            "group": None,
        },
        "s3://b/": {"region": "eu-west-1"},
    }
    options = make_files_absolute(parse_options(given), Path("/base"))
    expected = MirrorOptions(
        folder="/base/m",
        size=1_500_000_000_000,
        reserve=10 << 30,
        prefixes=("s3://b/", "/base/data"),
    )
    assert options.mirror == expected
    assert find_options(options, "s3://b/x").region == "eu-west-1"
    assert pickle.loads(pickle.dumps(options)) == options
    assert parse_mirror(expected.as_json()) == expected
    assert parse_options({"mirror": "/m"}).mirror == MirrorOptions(folder="/m")
    assert parse_options({"mirror": None}).mirror is None


def test_settings_of_etcd() -> None:
    etcd = {**ETCD, "endpoints": ["https://a:2379", "http://[::1]:1/"], "prefix": "a/b", "lease": 5}
    given = {"folder": "/m", "nodes": "etcd", "copies": 9}
    more = {"user": "u", "password_file": "pw", "tls": TLS}
    found = make_files_absolute(
        parse_options({"mirror": {**given, "etcd": {**etcd, **more}}}), Path("/base")
    ).mirror
    assert found is not None
    assert found.etcd == EtcdOptions(
        endpoints=("https://a:2379", "http://[::1]:1/"),
        nodes_expected=3,
        prefix="a/b",
        lease=5.0,
        user="u",
        password_file="/base/pw",
        tls=TlsFiles(certificate="/base/c.pem", key="/base/k.pem", ca="/base/ca.pem"),
    )
    for options in (found, parse_mirror({**given, "etcd": etcd})):
        assert parse_mirror(json.loads(json.dumps(options.as_json()))) == options
        assert pickle.loads(pickle.dumps(options)) == options
        assert hash(options) == hash(pickle.loads(pickle.dumps(options)))
    assert found.alone() == MirrorOptions(folder="/m")


def test_settings_of_several_nodes() -> None:
    given = {
        "folder": "/m",
        "nodes": ["a:7171", "[::1]:7"],
        "copies": 2,
        "port": 7,
        "advertise": "10.0.0.1:8",
        "strict": True,
        "tls": TLS,
        "max_peer_rate": 1e9,
    }
    options = make_files_absolute(parse_options({"mirror": given}), Path("/base"))
    expected = MirrorOptions(
        folder="/m",
        nodes=("a:7171", "[::1]:7"),
        copies=2,
        port=7,
        advertise="10.0.0.1:8",
        strict=True,
        tls=TlsFiles(certificate="/base/c.pem", key="/base/k.pem", ca="/base/ca.pem"),
        max_peer_rate=1_000_000_000,
    )
    assert options.mirror == expected
    assert hash(expected) == hash(pickle.loads(pickle.dumps(expected)))
    assert parse_mirror(json.loads(json.dumps(expected.as_json()))) == expected


@pytest.mark.parametrize(
    ("written", "nodes"), [("slurm", "slurm"), ("torch", "torch"), ("hosts", "/base/hosts")]
)
def test_nodes_of_a_launcher_or_a_file(written: str, nodes: str) -> None:
    given = {
        "folder": "/m",
        "nodes": written,
        "copies": "all",
        "secret_file": "s",
        "insecure": True,
    }
    options = make_files_absolute(parse_options({"mirror": given}), Path("/base"))
    expected = MirrorOptions(
        folder="/m", nodes=nodes, copies="all", secret_file="/base/s", insecure=True
    )
    assert options.mirror == expected
    assert parse_mirror(expected.as_json()) == expected
    assert parse_mirror(MirrorOptions(folder="/m").as_json()) == MirrorOptions(folder="/m")


@pytest.mark.parametrize(
    ("prefixes", "location", "is_allowed"),
    [
        (None, "s3://bucket/key", True),
        (None, "https://host/x", True),
        (None, "http://169.254.169.254/latest/meta-data/", False),
        (None, "http://127.0.0.1:8000/x", False),
        (None, "http://[::1]/x", False),
        (None, "http://[::ffff:127.0.0.1]/x", False),
        (None, "http://localhost./x", False),
        (None, "http://127.1/x", False),
        (None, "http://2130706433/x", False),
        (None, "http://0x7f000001/x", False),
        (None, "http://metadata.google.internal/x", False),
        (None, "/etc/shadow", False),
        (None, "https://host/x?sig=1", False),
        (("http://127.0.0.1:8000/",), "http://127.0.0.1:8000/x", True),
        (("http://127.0.0.1:8000/",), "http://127.0.0.1:8001/x", False),
        (("s3://bucket/team/",), "s3://bucket/team/../other", False),
        (("s3://bucket/team/",), "s3://bucket/team2/x", False),
        (("s3://bucket/team",), "s3://bucket/team2/x", False),
        (("s3://bucket/team",), "s3://bucket/team/x", True),
        (("/usr",), "/usr/../etc/shadow", False),
    ],
)
def test_a_node_fetches_below_its_prefixes_only(
    prefixes: tuple[str, ...] | None, location: str, is_allowed: bool
) -> None:
    options = (
        MirrorOptions(folder="/m")
        if prefixes is None
        else MirrorOptions(folder="/m", prefixes=prefixes)
    )
    assert (not options.find_refusal(location)) is is_allowed


def test_links_out_of_a_mounted_folder_are_not_followed(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "x").write_text("x")
    (tmp_path / "secret").write_text("x")
    (inside / "link").symlink_to(tmp_path / "secret")
    options = MirrorOptions(folder="/m", prefixes=(str(inside),))
    assert not options.find_refusal(str(inside / "x"))
    assert options.find_refusal(str(inside / "link")).startswith(
        "is a symbolic link that leads outside"
    )

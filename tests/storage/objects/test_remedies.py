"""Remedies in messages about object stores and web servers: each is done as its message says, and then the object is read."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

from megablend.config import load_config
from megablend.errors import ConfigError, MegablendError
from megablend.storage.by_scheme import make_storage
from megablend.storage.object_options import parse_options
from megablend.storage.objects.before_fork import BeforeForkStorage
from megablend.storage.objects.clients import forget_sources
from megablend.storage.objects.helper import close_helper, get_helper
from tests.runs import make_config
from tests.storage.faulty import Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
DATA = b"0123456789"
Settings = dict[str, Any]


class Proxy(FaultySource):
    """A proxy that asks for a password, and has the files of the servers behind it."""

    async def _answer(self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]) -> bool:
        if "proxy-authorization" not in headers:
            return await self._send(writer, method, 407, {}, b"")
        return await super()._answer(writer, method, target, headers)


class Case:
    """An object that is read with settings and an environment, which break it or mend it."""

    def __init__(self, source: FaultySource, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.folder, self.location = source, folder, "s3://b/x"
        self.settings: Settings = {"endpoint": source.url, "give_up_after": 1.0}
        self._monkeypatch = monkeypatch
        self.env(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y", AWS_REGION="us-east-1")

    def env(self, **values: str | None) -> None:
        """Change the environment, as for a new process."""
        forget_sources()
        for name, value in values.items():
            if value is None:
                self._monkeypatch.delenv(name, raising=False)
            else:
                self._monkeypatch.setenv(name, value)

    def set(self, **settings: object) -> None:
        """Change the settings of the location's prefix; None removes one."""
        self.settings = {name: value for name, value in {**self.settings, **settings}.items() if value is not None}

    def at(self, location: str) -> None:
        self.location = location

    def answer(self, status: int, code: str = "") -> None:
        """The server answers with an error, until status 0."""
        self.source.body = f"<Error><Code>{code}</Code></Error>".encode()
        self.source.faults = Faults(status={status: 1.0}) if status else Faults()

    def read(self) -> bytes:
        scheme = self.location.partition("//")[0]
        storage = make_storage(objects=parse_options({f"{scheme}//": self.settings} if ":" in scheme else {}))
        (match,) = storage.find(self.location).files
        return storage.read(match.path, 0, len(DATA))


Step = Callable[[Case], None]


def then(*steps: Step) -> Step:
    """Several steps, one after the other."""

    def take(case: Case) -> None:
        for step in steps:
            step(case)

    return take


class Fault(NamedTuple):
    make: Step
    says: str
    remedies: list[Step]

    def check(self, case: Case, remedy: Step) -> None:
        """What is wrong is said; after one of the remedies the object can be read."""
        self.make(case)
        with pytest.raises(MegablendError) as caught:
            case.read()
        assert re.search(self.says, str(caught.value)), str(caught.value)
        remedy(case)
        assert case.read() == DATA


def no_credentials(case: Case) -> None:
    case.env(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None)


def write_pem(case: Case) -> None:
    openssl = shutil.which("openssl")
    assert openssl is not None
    import ssl

    path = case.folder / "ca.pem"
    path.write_text("".join(map(ssl.DER_cert_to_PEM_cert, ssl.create_default_context().get_ca_certs(True)[:1])))
    case.set(ca_file=str(path))


def close_to_keys(case: Case) -> None:
    """Only what is not signed is answered."""
    case.source.is_expired = bool


def open_to(case: Case, key: str) -> None:
    """Only a new key has not expired."""
    case.source.is_expired = lambda used: used != key


def copy_to(case: Case, path: str, location: str) -> None:
    """Copy the object to another key, and read that."""
    case.source.files[path] = DATA
    case.at(location)


FAULTS: dict[str, Fault] = {
    "no bucket": Fault(
        lambda case: case.at("s3://buckett/x"),
        r"there is no such bucket \(NoSuchBucket\): check its name, `endpoint` and `region`",
        [lambda case: case.at("s3://b/x")],
    ),
    "no server": Fault(
        lambda case: case.set(endpoint="http://127.0.0.1:9"),
        "no connection to the server; .*check `endpoint`, `proxy` and the network",
        [lambda case: case.set(endpoint=case.source.url)],
    ),
    "no server at the proxy": Fault(
        lambda case: case.set(proxy="http://127.0.0.1:9"),
        "check `endpoint`, `proxy` and the network",
        [lambda case: case.set(proxy=None)],
    ),
    "an unknown name": Fault(
        lambda case: case.set(endpoint="http://no.such.invalid"),
        "the server's name cannot be resolved; .*check the name in the location, `endpoint` and `region`",
        [lambda case: case.set(endpoint=case.source.url)],
    ),
    "an endpoint without a scheme": Fault(
        then(
            lambda case: case.set(endpoint=None),
            lambda case: case.env(AWS_ENDPOINT_URL=f"127.0.0.1:{case.source.port}"),
        ),
        r"AWS_ENDPOINT_URL: found '127\.0\.0\.1:\d+', expected a URL such as https://host:port",
        [lambda case: case.env(AWS_ENDPOINT_URL=case.source.url)],
    ),
    "no credentials": Fault(
        no_credentials,
        "no credentials were found; .*set them in the environment; or `anonymous: true` for public data",
        [
            lambda case: case.env(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y"),
            lambda case: case.set(anonymous=True),
        ],
    ),
    "credentials that have expired": Fault(
        close_to_keys,
        r"the credentials have expired \(ExpiredToken\): renew the credentials",
        [then(lambda case: open_to(case, "new"), lambda case: case.env(AWS_ACCESS_KEY_ID="new"))],
    ),
    "a wrong secret": Fault(
        lambda case: case.answer(403, "SignatureDoesNotMatch"),
        r"the secret key is wrong \(SignatureDoesNotMatch\): check the credentials of the environment",
        [lambda case: case.answer(0)],
    ),
    "no permission": Fault(
        lambda case: case.answer(403, "AccessDenied"),
        r"access is denied \(AccessDenied\): get permission to read it .*; or set `anonymous: true` where it is public",
        [lambda case: case.answer(0)],
    ),
    "public data and a user's keys": Fault(
        close_to_keys,
        "the credentials have expired",
        [lambda case: case.set(anonymous=True)],
    ),
    "an archived object": Fault(
        lambda case: case.answer(403, "InvalidObjectState"),
        r"the object is archived \(InvalidObjectState\): restore it from the archive first",
        [lambda case: case.answer(0)],
    ),
    "a proxy with a password": Fault(
        then(
            lambda case: case.set(endpoint="http://behind.invalid"),
            lambda case: case.env(HTTP_PROXY=case.source.url),
        ),
        r"the proxy asks for credentials \(HTTP 407\): give them in HTTPS_PROXY",
        [lambda case: case.env(HTTP_PROXY=case.source.url.replace("//", "//user:password@"))],
    ),
    "a missing ca_file": Fault(
        lambda case: case.set(ca_file=str(case.folder / "none.pem")),
        "ca_file .*none.pem: cannot be read",
        [write_pem, lambda case: case.set(ca_file=None)],
    ),
    "an empty ca_file": Fault(
        then(
            lambda case: (case.folder / "none.pem").touch(),
            lambda case: case.set(ca_file=str(case.folder / "none.pem")),
        ),
        "ca_file .*none.pem: is empty; expected certificates in PEM format",
        [write_pem, lambda case: case.set(ca_file=None)],
    ),
    "a region of the environment": Fault(
        lambda case: case.env(AWS_REGION="us-east-1/"),
        "AWS_REGION: found 'us-east-1/', expected the name of a region such as us-east-1",
        [lambda case: case.env(AWS_REGION="us-east-1"), lambda case: case.env(AWS_REGION=None)],
    ),
    "an empty part of a key": Fault(
        lambda case: case.at("s3://b/a//x"),
        "its key has an empty part, .*; copy the object to a key without these",
        [lambda case: copy_to(case, "b/a/x", "s3://b/a/x")],
    ),
    "a user in a URL": Fault(
        lambda case: case.at(f"http://u:p@127.0.0.1:{case.source.port}/b/x"),
        "contains a user or password; remove it from the URL",
        [lambda case: case.at(case.location.replace("u:p@", ""))],
    ),
    "an encoded slash": Fault(
        lambda case: case.at(f"{case.source.url}/b%2Fx"),
        "has an encoded slash .* use a URL without it",
        [lambda case: case.at(f"{case.source.url}/b/x")],
    ),
    "no host": Fault(
        lambda case: case.at("http:///b/x"),
        "names no server, expected http://host/path",
        [lambda case: case.at(f"{case.source.url}/b/x")],
    ),
    "a star of a web server": Fault(
        lambda case: case.at(f"{case.source.url}/b/[x]"),
        r"write \[ and \* of a file's name as %5B and %2A",
        [lambda case: copy_to(case, "b/[x]", f"{case.source.url}/b/%5Bx]")],
    ),
    "no bucket in a location": Fault(
        lambda case: case.at("s3:///x"),
        "found '' for a bucket, expected s3://bucket/key",
        [lambda case: case.at("s3://b/x")],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    for remedy in fault.remedies:
        with (Proxy if "proxy with" in name else FaultySource)({"b/x": DATA}) as source:
            for variable in ("AWS_ENDPOINT_URL", "HTTP_PROXY"):
                monkeypatch.delenv(variable, raising=False)
            case = Case(source, tmp_path, monkeypatch)
            fault.check(case, remedy)


SETTINGS = [
    ({"endpoint": "h:80"}, "expected a URL such as (http)s://host:port", {"endpoint": "http://h:80"}),
    ({"endpoint": "http://u:p@h"}, "contains a user or password; set it in the environment", {"endpoint": "http://h"}),
    ({"endpont": "http://h"}, "unknown setting; did you mean '(endpoint)'", {"endpoint": "http://h"}),
    ({"secret_access_key": "x"}, "credentials do not belong in configs; use environment variables or a profile", {}),
    ({"region": 3}, "expected text", {"region": "3"}),
    *(
        ({"region": wrong}, "expected the name of a region such as (us-east-1)", {"region": "us-east-1"})
        for wrong in ("eu west 1", "us-east-1/", "us-east-1.example.com/", "us:1", "us?1", "u@h", "é", "-")
    ),
    ({"read_timeout": 0}, "expected a number above 0", {"read_timeout": 1}),
    ({"anonymous": "yes"}, "expected true or false", {"anonymous": True}),
    ([], "expected settings such as `endpoint: https://...`", {"endpoint": "https://..."}),
]


@pytest.mark.parametrize(("settings", "says", "instead"), SETTINGS)
def test_a_setting(settings: Any, says: str, instead: Settings) -> None:
    with pytest.raises(ValueError, match=says):
        parse_options({"s3://b": settings})
    parse_options({"s3://b": instead})


def test_prefixes() -> None:
    with pytest.raises(ValueError, match=r"found 's3://b', expected URL prefixes, each with its settings"):
        parse_options("s3://b")
    with pytest.raises(ValueError, match=r"b: expected a URL prefix such as (s3://bucket/)"):
        parse_options({"b": {}})
    parse_options({"s3://bucket/": {}})


class WholeFiles(SimpleHTTPRequestHandler):
    """Answers with whole files, as Python's own server does."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def whole_files(tmp_path: Path) -> Iterator[str]:
    """The URL of a server that does not answer requests for ranges."""
    (tmp_path / "x").write_bytes(DATA)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(WholeFiles, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_without_ranges(whole_files: str, tmp_path: Path) -> None:
    says = "the server does not answer requests for ranges of bytes: use a server that does, or copy the file"
    with pytest.raises(MegablendError, match=says):
        make_storage().read(f"{whole_files}/x", 2, 3)
    with FaultySource({"x": DATA}) as source:
        assert make_storage().read(f"{source.url}/x", 2, 3) == DATA[2:5]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    (tmp_path / "copy").write_bytes(opener.open(f"{whole_files}/x", timeout=30).read())
    assert make_storage().read(str(tmp_path / "copy"), 2, 3) == DATA[2:5]


def test_a_server_without_tls(whole_files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    options = {"endpoint": whole_files.replace("http:", "https:"), "give_up_after": 1.0}
    says = "the server does not speak TLS at this port; .*check `http` or `https` of `endpoint`"
    with pytest.raises(MegablendError, match=says):
        make_storage(objects=parse_options({"s3://": options})).stat("s3://b/x")
    with FaultySource({"b/x": DATA}) as source:
        options["endpoint"] = source.url
        assert make_storage(objects=parse_options({"s3://": options})).stat("s3://b/x").size == len(DATA)


def paths_of(folder: Path, path: str) -> list[str]:
    config = make_config(folder, [{"name": "a", "path": path, "weight": 1}], samples=1)
    return list(load_config(config).sources["train"][0].path)


def test_a_list_of_urls(tmp_path: Path) -> None:
    url = "https://h/part-*.parquet"
    with pytest.raises(
        ConfigError, match=r"with braces \(\{00\.\.12\}\) or in a text file of URLs, one per line, .* \.urls"
    ):
        make_storage().find(url)
    assert len(paths_of(tmp_path, "https://h/part-{00..12}.parquet")) == 13
    listed = tmp_path / "parts.urls"
    for content, says in (
        ("", "contains no URLs; expected one per line"),
        ("/local\n", r"entry 1 is '/local', expected a URL \(http:// or https://\)"),
    ):
        listed.write_text(content)
        with pytest.raises(ConfigError, match=says):
            paths_of(tmp_path, str(listed))
    listed.write_text("https://h/part-0.parquet\nhttps://h/part-1.parquet\n")
    assert len(paths_of(tmp_path, str(listed))) == 2


def test_too_many_urls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its braces stand for 2,000,000 URLs, expected at most (1,000,000)"):
        paths_of(tmp_path, "https://h/{0..999999}-{a,b}.parquet")


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultySource({"x": DATA}) as source:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "obstore", None)
            with pytest.raises(
                ConfigError, match=r"needs obstore: install megablend\[objects\] \(`pip install '(.*)'`\)"
            ):
                make_storage().stat(f"{source.url}/x")
        assert make_storage().stat(f"{source.url}/x").size == len(DATA)


def test_a_helper_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeforeForkStorage, "_is_direct", lambda *_: False)
    with FaultySource({"x": DATA}) as source:
        storage = BeforeForkStorage(make_storage())
        url = f"{source.url}/x"
        assert storage.read(url, 0, 4) == DATA[:4]
        get_helper()._process.kill()
        get_helper()._process.wait(timeout=60)
        with pytest.raises(MegablendError, match="the helper process for object stores has ended"):
            storage.read(url, 0, 4)
        close_helper()
        assert storage.read(url, 0, 4) == DATA[:4]
        close_helper()

"""Remedies in messages about servers that answer in unusual ways, and about profiles: each is done as its message says."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from megablend.errors import CacheError, ConfigError, MegablendError
from megablend.storage.by_scheme import make_storage
from megablend.storage.object_options import parse_options
from megablend.storage.objects.clients import forget_sources
from megablend.storage.objects.prefix import ObjectPrefix
from tests.storage.faulty import FaultySource
from tests.storage.objects.conftest import KEYS, READER_KEYS, S3Server
from tests.storage.objects.servers.fill import AzureContainer
from tests.storage.objects.test_failures import tls
from tests.storage.objects.test_profiles import START_URL, profiles
from tests.storage.objects.test_remedies import DATA, Case, Fault, Step, then

__all__ = ["profiles", "tls"]
pytestmark = pytest.mark.usefixtures("obstore")
NO_PROXY = "check `proxy` or HTTPS_PROXY, HTTP_PROXY and NO_PROXY"


class OddSource(FaultySource):
    """A source whose answers can be changed; it may refuse or redirect requests by what is in their headers."""

    redirect: str | None = None
    """Where all requests without a query are sent."""
    change: Callable[[dict[str, str], bytes], tuple[dict[str, str], bytes]] | None = None
    """Of the headers and the body of answers with a file."""
    refuses: Callable[[dict[str, str]], tuple[int, str] | None] | None = None
    """The status and the code of the answer to a request with these headers."""

    async def _answer(self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]) -> bool:
        if self.redirect is not None and "?" not in target:
            return await self._send(writer, method, 302, {"Location": self.redirect}, b"")
        if self.refuses is not None and (refused := self.refuses(headers)):
            status, code = refused
            return await self._send(writer, method, status, {}, f"<Error><Code>{code}</Code></Error>".encode())
        return await super()._answer(writer, method, target, headers)

    async def _send(
        self, writer: asyncio.StreamWriter, method: str, status: int, headers: dict[str, str], body: bytes
    ) -> bool:
        if self.change is not None and status in (200, 206):
            headers, body = self.change(headers, body)
        return await super()._send(writer, method, status, headers, body)


Answer = tuple[int, str] | None


def odd(**attributes: Any) -> Step:
    def change(case: Case) -> None:
        for name, value in attributes.items():
            setattr(case.source, name, value)

    return change


def web(path: str = "b/x") -> Step:
    """Read from the source as from a web server."""
    return lambda case: case.at(f"{case.source.url}/{path}")


def outside(region: str, code: str) -> Callable[[dict[str, str]], Answer]:
    """A bucket of a region refuses requests that are signed for another one."""
    return lambda headers: None if f"/{region}/s3/" in headers["authorization"] else (400, code)


def with_clock(seconds: float) -> Callable[[dict[str, str]], Answer]:
    """A store compares a request's time with its clock, from which this machine's differs."""

    def refuse(headers: dict[str, str]) -> Answer:
        sent = time.mktime(time.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")) - time.timezone
        return (403, "RequestTimeTooSkewed") if abs(sent - time.time() - seconds) > 900 else None

    return refuse


def redirect_in_a_circle(case: Case) -> None:
    odd(redirect=f"{case.source.url}/login")(case)
    web()(case)


def compress(headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
    return headers | {"Content-Encoding": "gzip"}, gzip.compress(body)


def copy_to_a_file(case: Case) -> None:
    (case.folder / "x").write_bytes(DATA)
    case.at(str(case.folder / "x"))


def with_time(value: str | None) -> Callable[[dict[str, str], bytes], tuple[dict[str, str], bytes]]:
    def change(headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        return {k: v for k, v in (headers | {"Last-Modified": value}).items() if v is not None}, body

    return change


def busy_for(seconds: float) -> Step:
    """The source is busy, and answers again later."""

    def make(case: Case) -> None:
        case.answer(503)
        timer = Timer(seconds, case.answer, [0])
        timer.daemon = True
        timer.start()

    return make


def add_bad_key(case: Case) -> None:
    """A pattern whose folder has a key that cannot be requested."""
    case.source.files = {"b/dir//x": DATA, "b/dir/other": b"", "b/good/x": DATA}
    case.at("s3://b/d*/**/x")


def copy_and_remove(case: Case) -> None:
    case.source.files["b/dir/sub/x"] = case.source.files.pop("b/dir//x")


def with_endpoint(endpoint: str) -> Step:
    return then(lambda case: case.set(endpoint=None), lambda case: case.env(AWS_ENDPOINT_URL=endpoint))


FAULTS: dict[str, Fault] = {
    "a busy source": Fault(
        then(busy_for(0.7), lambda case: case.set(give_up_after=0.2)),
        "check the source and the network, or increase `give_up_after`",
        [lambda case: case.answer(0), lambda case: case.set(give_up_after=30)],
    ),
    "a key with an empty part": Fault(
        add_bad_key,
        r"the object s3://b/dir//x has an empty part, .*: copy it to a key without these and remove it, or use a pattern of",
        [copy_and_remove, lambda case: case.at("s3://b/g*/**/x")],
    ),
    "a clock that differs": Fault(
        odd(refuses=with_clock(3600)),
        r"clocks of this machine and the store differ \(RequestTimeTooSkewed\): set the clock of this machine",
        [odd(refuses=with_clock(0))],
    ),
    **{
        f"another region, {code}": Fault(
            odd(refuses=outside("eu-west-1", code)),
            r"the bucket is in another region \(\w+\): set `region` of this prefix under `storage`, or AWS_REGION",
            [lambda case: case.set(region="eu-west-1"), lambda case: case.env(AWS_REGION="eu-west-1")],
        )
        for code in ("AuthorizationHeaderMalformed", "PermanentRedirect")
    },
    "a request that is refused": Fault(
        odd(refuses=outside("eu-west-1", "Odd")),
        r"the store refuses the request \(HTTP 400, Odd\): check `endpoint` and `region`",
        [lambda case: case.set(region="eu-west-1")],
    ),
    "an endpoint that refuses": Fault(
        then(lambda case: case.set(endpoint=f"{case.source.url}/none"), lambda case: case.answer(418)),
        r"found an answer of HTTP 418: check the location and `endpoint`",
        [then(lambda case: case.answer(0), lambda case: case.set(endpoint=case.source.url))],
    ),
    "a redirect in a circle": Fault(
        redirect_in_a_circle,
        "the server redirects in a circle: check the location, and whether it needs a login",
        [then(odd(redirect=None), web()), web("b/x?signature=of-a-login")],
    ),
    "a redirect to what is not HTTP": Fault(
        then(odd(redirect="ftp://h/x"), web()),
        r"the server redirects to a URL that cannot be requested .*: check the location",
        [odd(redirect=None), web("b/x?token=1")],
    ),
    "a server that compresses": Fault(
        then(odd(change=compress), web()),
        "the server compresses its answers .*: switch that off for these files, or copy them",
        [odd(change=None), copy_to_a_file],
    ),
    "a time that is none": Fault(
        odd(change=with_time("yesterday")),
        "Last-Modified header that is not a time: correct the server's clock or settings, or leave the header out",
        [odd(change=with_time("Wed, 21 Oct 2015 07:28:00 GMT")), odd(change=with_time(None))],
    ),
    "a proxy that does not connect": Fault(
        lambda case: case.set(proxy=case.source.url, endpoint="https://localhost:9"),
        f"the proxy does not connect; .*: {NO_PROXY}",
        [lambda case: case.set(proxy=None, endpoint=case.source.url)],
    ),
    "settings of the environment": Fault(
        lambda case: case.env(AWS_SKIP_SIGNATURE="maybe"),
        "refuses its settings .*: check `storage`, and the variables of the environment that begin with AWS_",
        [lambda case: case.env(AWS_SKIP_SIGNATURE=None), lambda case: case.env(AWS_SKIP_SIGNATURE="true")],
    ),
    "credentials of Google that are not there": Fault(
        then(
            lambda case: case.env(GOOGLE_APPLICATION_CREDENTIALS=str(case.folder / "none")),
            lambda case: case.at("gs://b/x"),
        ),
        "correct GOOGLE_APPLICATION_CREDENTIALS; or unset it, and set `anonymous: true` under `storage` for public data",
        [
            lambda case: case.env(GOOGLE_APPLICATION_CREDENTIALS=write_key_of_google(case)),
            then(
                lambda case: case.env(GOOGLE_APPLICATION_CREDENTIALS=None),
                lambda case: case.set(anonymous=True),
            ),
        ],
    ),
    "a ca_file that is not PEM": Fault(
        lambda case: case.set(ca_file=__file__),
        r"ca_file .*\.py: expected certificates in PEM format",
        [lambda case: case.set(ca_file=None)],
    ),
    "a server that is none": Fault(
        lambda case: case.at("http://h:99999/b/x"),
        "found 'h:99999' for a server, expected http://host/path or http://host:port/path",
        [web()],
    ),
    **{
        f"an endpoint of {endpoint!r}": Fault(
            with_endpoint(endpoint),
            "AWS_ENDPOINT_URL: found '.*', expected a URL such as https://host:port",
            [lambda case: case.env(AWS_ENDPOINT_URL=case.source.url)],
        )
        for endpoint in ("http://h:99999", "http://a b", "http://[::1", "https://h:port", "http://")
    },
}


def write_key_of_google(case: Case) -> str:
    """A service account's key, for a server that does not ask for a login."""
    command = "openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048"
    private = subprocess.run(command.split(), check=True, capture_output=True).stdout
    path = case.folder / "google.json"
    account = {
        "type": "service_account",
        "private_key": private.decode(),
        "client_email": "me",
        "private_key_id": "x",
        "disable_oauth": True,
    }
    path.write_text(json.dumps({**account, "disable_oauth": True, "gcs_base_url": case.source.url}))
    return str(path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    for remedy in fault.remedies:
        with OddSource({"b/x": DATA}) as source, monkeypatch.context() as patch:
            case = Case(source, tmp_path, patch)
            fault.check(case, remedy)


@pytest.mark.parametrize("remedy", [{"ca_file": True}, {"endpoint": True}])
def test_a_certificate_that_is_not_trusted(
    tls: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remedy: dict[str, bool]
) -> None:
    url, certificate = tls
    with FaultySource({"x/x": b"0123"}) as source:
        case = Case(source, tmp_path, monkeypatch)
        case.at("s3://x/x")
        case.set(endpoint=url.removesuffix("/x"))
        says = "TLS certificate is not trusted; .*: set `ca_file` to the PEM file of .*, or correct `endpoint`"
        with pytest.raises(MegablendError, match=says):
            case.read()
        case.set(**({"ca_file": str(certificate)} if "ca_file" in remedy else {"endpoint": source.url}))
        storage = make_storage(objects=parse_options({"s3://": case.settings}))
        assert storage.stat("s3://x/x").size == 4


@pytest.mark.parametrize("variable", ["NO_PROXY", "HTTPS_PROXY"])
def test_a_proxy_of_the_environment(
    tls: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    url, certificate = tls
    with FaultySource({}) as proxy:
        case = Case(proxy, tmp_path, monkeypatch)
        storage = make_storage(objects=parse_options({"https://": {"ca_file": str(certificate), "give_up_after": 0.5}}))
        case.env(HTTPS_PROXY=proxy.url)
        with pytest.raises(MegablendError, match=f"the proxy does not connect; .*: {NO_PROXY}"):
            storage.stat(url)
        case.env(**({"NO_PROXY": "localhost"} if variable == "NO_PROXY" else {"HTTPS_PROXY": None}))
        assert storage.stat(url).size == 4


AZURE = [
    # (what is wrong in the environment or the location, what is said, settings and location that do as it says)
    (
        {"AZURE_STORAGE_ACCOUNT_NAME": None},
        "az://{}/x",
        r"set AZURE_STORAGE_ACCOUNT_NAME \(or `account` under `storage`\) and its credentials",
        [({}, {"AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1"}), ({"account": "devstoreaccount1"}, {})],
    ),
    (
        {},
        "az://none/x",
        r"there is no such container \(ContainerNotFound\): check its name and the account",
        [({}, {})],
    ),
    ({}, "abfs://{}/x", "write az://container/key, and the account under `storage` or in", [({}, {})]),
    ({}, "abfss://{}/x", "write az://container/key, and the account under `storage` or in", [({}, {})]),
    ({}, "azure://{}/x", "azure:// is not supported: write az://", [({}, {})]),
    ({}, "msc://{}/x", "use the bucket's s3://, gs:// or az:// URL, and set its endpoint under `storage`", [({}, {})]),
]


@pytest.mark.parametrize(("wrong", "location", "says", "remedies"), AZURE, ids=[says[:30] for _, _, says, _ in AZURE])
def test_azure(
    azurite: str,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, str | None],
    location: str,
    says: str,
    remedies: list[tuple[dict[str, str], dict[str, str]]],
) -> None:
    box = AzureContainer(azurite, f"box{secrets.token_hex(4)}")

    def set_environment(values: Mapping[str, str | None]) -> None:
        forget_sources()
        for name, value in values.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    set_environment(box.environment)
    box.put("x", DATA)
    for settings, environment in remedies:
        set_environment(box.environment | wrong)
        options = {"endpoint": azurite, "give_up_after": 1.0}
        with pytest.raises(MegablendError, match=says):
            make_storage(objects=parse_options({"az://": options})).read(location.format(box.name), 0, 10)
        set_environment(environment)
        storage = make_storage(objects=parse_options({"az://": options | settings}))
        assert storage.read(f"az://{box.name}/x", 0, 10) == DATA


@pytest.mark.parametrize(
    ("scheme", "instead", "says"),
    [("s3a", "s3", "s3a:// is not supported: write (s3://)"), ("s3n", "s3", "s3n:// is not supported: write (s3://)")],
)
def test_another_name_of_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, instead: str, says: str
) -> None:
    with FaultySource({"b/x": DATA}) as source:
        case = Case(source, tmp_path, monkeypatch)
        case.env(AWS_ENDPOINT_URL=source.url)
        with pytest.raises(ConfigError, match=says):
            make_storage().read(f"{scheme}://b/x", 0, 10)
        assert make_storage().read(f"{instead}://b/x", 0, 10) == DATA


def test_a_cache_without_permission(swift: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    swift.admin.make_bucket_if_missing("mine")
    prefix = ObjectPrefix("s3://mine/c", parse_options({"s3://": {"give_up_after": 1.0}}))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_KEYS[1])
    says = "cannot access the cache: access is denied .*: get permission to read, write, list and delete objects there"
    for call in (lambda: prefix.read("x"), prefix.list_objects):
        with pytest.raises(CacheError, match=says):
            call()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    forget_sources()
    prefix.write("x", b"1")
    assert prefix.read("x") == b"1"
    assert [each.key for each in prefix.list_objects()] == ["x"]
    prefix.remove(["x"])
    assert prefix.list_objects() == []


def test_a_cache_with_a_key_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultySource({"b/c/runs/x": b"1", "b/c/runs//y": b"1"}) as source:
        case = Case(source, tmp_path, monkeypatch)
        prefix = ObjectPrefix("s3://b/c", parse_options({"s3://": case.settings}))
        says = r"s3://b/c: cannot access the cache: the object c/runs//y has an empty part, .*: remove it"
        with pytest.raises(CacheError, match=says):
            prefix.list_objects()
        del source.files["b/c/runs//y"]
        assert [each.key for each in prefix.list_objects()] == ["runs/x"]


def sign_in(home: Path) -> None:
    """What `aws sso login` writes."""
    token = {"accessToken": "signed-in-token", "startUrl": START_URL}
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    path = home / ".aws/sso/cache" / f"{hashlib.sha1(START_URL.encode()).hexdigest()}.json"
    path.write_text(json.dumps(token | {"expiresAt": expires}))


def sign_out(home: Path) -> None:
    for path in (home / ".aws/sso/cache").glob("*.json"):
        path.unlink()


def add_keys(home: Path) -> None:
    """What `aws configure --profile empty` writes."""
    with (home / ".aws/credentials").open("a") as file:
        file.write("[empty]\naws_access_key_id = X\naws_secret_access_key = s\n")


def read(source: FaultySource, **settings: object) -> bytes:
    forget_sources()
    options = {"endpoint": source.url, "give_up_after": 1.0, **settings}
    return make_storage(objects=parse_options({"s3://b": options})).read("s3://b/x", 0, 10)


@pytest.mark.usefixtures("profiles")
def test_a_profile_without_keys(tmp_path: Path) -> None:
    with FaultySource({"b/x": DATA}) as source:
        says = r"contains no credentials; add them \(`aws configure --profile empty`\), or name another profile"
        with pytest.raises(ConfigError, match=says):
            read(source, profile="empty")
        assert read(source, profile="file") == DATA
        add_keys(tmp_path)
        assert read(source, profile="empty") == DATA


@pytest.mark.usefixtures("profiles")
def test_a_profile_that_nobody_is_signed_in_with(tmp_path: Path) -> None:
    sign_out(tmp_path)
    with FaultySource({"b/x": DATA}) as source:
        with pytest.raises(MegablendError, match="nobody is signed in with the profile: run `aws sso login` with it"):
            read(source, profile="signed-in")
        sign_in(tmp_path)
        assert read(source, profile="signed-in") == DATA


@pytest.mark.usefixtures("profiles")
def test_profiles_without_botocore(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    says = "read by botocore: `pip install botocore`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and remove "
    with FaultySource({"b/x": DATA}) as source:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "botocore", None)
            patch.setitem(sys.modules, "botocore.session", None)
            with pytest.raises(ConfigError, match=f"{says}`profile`"):
                read(source, profile="file")
            patch.setenv("AWS_PROFILE", "file")
            with pytest.raises(ConfigError, match=f"{says}AWS_PROFILE"):
                read(source)
            patch.setenv("AWS_ACCESS_KEY_ID", "x")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "y")
            patch.delenv("AWS_PROFILE")
            assert read(source) == DATA
            patch.delenv("AWS_ACCESS_KEY_ID")
            caplog.clear()
            with pytest.raises(MegablendError):
                read(source)
            assert "credentials in ~/.aws are not read: they are read by botocore: `pip install" in caplog.text
        assert read(source, profile="file") == DATA  # where it is installed
        assert "AWS_ACCESS_KEY_ID" not in os.environ
        assert read(source) == DATA

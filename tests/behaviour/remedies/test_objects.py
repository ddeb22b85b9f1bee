"""Messages about object stores and web servers: what they say is done, and then the object is read."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest

from megablend.errors import CacheError, ConfigError, MegablendError
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.clients import forget_clients
from megablend.storage.objects.fork_safe import ForkSafeStorage
from megablend.storage.objects.helper import close_helper, get_helper
from megablend.storage.objects.prefix import ObjectPrefix
from megablend.storage.store_options import parse_options
from tests.behaviour.remedies.driver import Step, fault, misuse, table
from tests.behaviour.remedies.objects import (
    DATA,
    Case,
    Headers,
    OddSource,
    answers,
    at,
    env,
    has,
    source,
)
from tests.storage.faulty import FaultySource
from tests.storage.objects.conftest import KEYS, READER_KEYS, S3Server, plain_environment
from tests.storage.objects.servers.fill import AzureContainer
from tests.storage.objects.test_failures import tls
from tests.storage.objects.test_profiles import START_URL, profiles

__all__ = ["plain_environment", "profiles", "tls"]
pytestmark = pytest.mark.usefixtures("obstore")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    with OddSource({"b/x": DATA}) as source:
        yield Case(source, tmp_path, monkeypatch)


def no_credentials() -> Step:
    return env(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None)


def write_pem(case: Case) -> None:
    path = case.folder / "ca.pem"
    path.write_text(
        "".join(map(ssl.DER_cert_to_PEM_cert, ssl.create_default_context().get_ca_certs(True)[:1]))
    )
    case.change({"ca_file": str(path)})


def write_key_of_google(case: Case) -> None:
    """A service account's key, for a server that does not ask for a login."""
    command = "openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048"
    private = subprocess.run(command.split(), check=True, capture_output=True).stdout
    account = {
        "type": "service_account",
        "client_email": "me",
        "private_key_id": "x",
        "private_key": private.decode(),
    }
    path = case.folder / "google.json"
    path.write_text(json.dumps(account | {"disable_oauth": True, "gcs_base_url": case.source.url}))
    case.env(GOOGLE_APPLICATION_CREDENTIALS=str(path))


def expired(*, but: str | None = None) -> Step:
    """Keys have expired, but for this one; what is not signed is answered."""
    return lambda case: setattr(
        case.source, "is_expired", (lambda key: key != but) if but else bool
    )


def asks_for_password(headers: Headers) -> tuple[int, str] | None:
    """As a proxy, which has the files of the servers behind it."""
    return None if "proxy-authorization" in headers else (407, "")


def outside(region: str, code: str) -> Callable[[Headers], tuple[int, str] | None]:
    """A bucket of a region refuses requests that are signed for another one."""
    return lambda headers: None if f"/{region}/s3/" in headers["authorization"] else (400, code)


def with_clock(seconds: float) -> Callable[[Headers], tuple[int, str] | None]:
    """A store compares a request's time with its clock, from which this machine's differs."""

    def refuse(headers: Headers) -> tuple[int, str] | None:
        sent = time.mktime(time.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")) - time.timezone
        return (403, "RequestTimeTooSkewed") if abs(sent - time.time() - seconds) > 900 else None

    return refuse


def compress(headers: Headers, body: bytes) -> tuple[Headers, bytes]:
    return headers | {"Content-Encoding": "gzip"}, gzip.compress(body)


def with_time(value: str | None) -> Callable[[Headers, bytes], tuple[Headers, bytes]]:
    def change(headers: Headers, body: bytes) -> tuple[Headers, bytes]:
        return {
            k: v for k, v in (headers | {"Last-Modified": value}).items() if v is not None
        }, body

    return change


def copy_to_a_file(case: Case) -> None:
    (case.folder / "x").write_bytes(DATA)
    case.location = str(case.folder / "x")


def answer_later(case: Case) -> None:
    """The source is busy, and answers again when the timer ends."""
    timer = Timer(0.7, lambda: answers(0)(case))
    timer.daemon = True
    timer.start()


def add_bad_key(case: Case) -> None:
    """A pattern whose folder has a key that cannot be requested."""
    case.source.files = {"b/dir//x": DATA, "b/dir/other": b"", "b/good/x": DATA}
    case.location = "s3://b/d*/**/x"


def copy_and_remove(case: Case) -> None:
    case.source.files["b/dir/sub/x"] = case.source.files.pop("b/dir//x")


def stat(case: Case) -> None:
    make_storage().stat(f"{case.url}/b/x")


def without_package(*names: str) -> Step:
    return lambda case: [case.patch.setitem(sys.modules, name, None) for name in names]


def with_package(*names: str) -> Step:
    return lambda case: [case.patch.delitem(sys.modules, name) for name in names]


def kill_helper(case: Case) -> None:
    """What object stores are read by where processes are forked has ended."""
    case.patch.setattr(ForkSafeStorage, "route", lambda self, _: self._helper)
    case.helped = ForkSafeStorage(make_storage())  # type: ignore[attr-defined]
    read_helped(case)
    get_helper()._process.kill()
    get_helper()._process.wait()


def read_helped(case: Any) -> None:
    assert case.helped.read(f"{case.url}/b/x", 0, 4) == DATA[:4]


WEB = "{url}/b/x"
NO_PROXY = "check `proxy` or HTTPS_PROXY, HTTP_PROXY and NO_PROXY"

# fmt: off
test_objects = table(
    fault("no bucket", at("s3://buckett/x"), r"there is no such bucket \(NoSuchBucket\); check its name, `endpoint` and `region`",
          at("s3://b/x")),
    fault("no server", {"endpoint": "http://127.0.0.1:9"},
          "no connection to the server; .*check `endpoint`, `proxy` and the network",
          {"endpoint": "{url}"}),
    fault("no server at the proxy", {"proxy": "http://127.0.0.1:9"}, "check `endpoint`, `proxy` and the network",
          {"proxy": None}),
    fault("an unknown name", {"endpoint": "http://no.such.invalid"},
          "the server's name cannot be resolved; .*check the name in the location, `endpoint` and `region`",
          {"endpoint": "{url}"}),
    fault("an endpoint without a scheme", ({"endpoint": None}, env(AWS_ENDPOINT_URL="127.0.0.1:{port}")),
          r"AWS_ENDPOINT_URL: found '127\.0\.0\.1:\d+', expected a URL such as https://host:port", env(AWS_ENDPOINT_URL="{url}")),
    *(fault(f"an endpoint of {endpoint!r}", ({"endpoint": None}, env(AWS_ENDPOINT_URL=endpoint)),
            "AWS_ENDPOINT_URL: found '.*', expected a URL such as https://host:port", env(AWS_ENDPOINT_URL="{url}"))
      for endpoint in ("http://h:99999", "http://a b", "http://[::1", "https://h:port", "http://")),
    fault("no credentials", no_credentials(),
          "no credentials were found; .*set them in the environment; or set `anonymous: true` for public data",
          env(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y"), {"anonymous": True}),
    fault("a key with a line break", env(AWS_SESSION_TOKEN="x\n"),
          "AWS_SESSION_TOKEN: found a line break or another control character\nremove it from the value",
          env(AWS_SESSION_TOKEN=None)),
    fault("a token file that is not there",
          env(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, AWS_ROLE_ARN="x", AWS_WEB_IDENTITY_TOKEN_FILE="{folder}/none"),
          "the token file cannot be read; .*check AWS_WEB_IDENTITY_TOKEN_FILE or AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
          env(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y")),
    fault("credentials that have expired", expired(), r"the credentials have expired \(ExpiredToken\); renew the credentials",
          (expired(but="new"), env(AWS_ACCESS_KEY_ID="new"))),
    fault("public data and a user's keys", expired(), "the credentials have expired", {"anonymous": True}),
    fault("a wrong secret", answers(403, "SignatureDoesNotMatch"),
          r"the secret key is wrong \(SignatureDoesNotMatch\); check the credentials in the environment", answers(0)),
    fault("no permission", answers(403, "AccessDenied"),
          r"access is denied \(AccessDenied\); grant these credentials read access .*, or set `anonymous: true` for public data",
          answers(0)),
    fault("an archived object", answers(403, "InvalidObjectState"),
          r"the object is archived \(InvalidObjectState\); restore it from the archive first", answers(0)),
    fault("a proxy with a password",
          ({"endpoint": "http://behind.invalid"}, source(refuses=asks_for_password), env(HTTP_PROXY="{url}")),
          r"the proxy asks for credentials \(HTTP 407\); set them in HTTPS_PROXY",
          env(HTTP_PROXY="http://user:password@127.0.0.1:{port}")),
    fault("a proxy that does not connect", {"proxy": "{url}", "endpoint": "https://localhost:9"},
          f"the proxy does not connect; .*; {NO_PROXY}", {"proxy": None, "endpoint": "{url}"}),
    fault("a missing ca_file", {"ca_file": "{folder}/none.pem"}, "ca_file .*none.pem cannot be read", write_pem,
          {"ca_file": None}),
    fault("an empty ca_file", (lambda case: (case.folder / "none.pem").touch(), {"ca_file": "{folder}/none.pem"}),
          "ca_file .*none.pem is empty; expected certificates in PEM format", write_pem, {"ca_file": None}),
    fault("a ca_file that is not PEM", {"ca_file": __file__}, r"ca_file .*\.py: expected certificates in PEM format",
          {"ca_file": None}),
    fault("a region of the environment", env(AWS_REGION="us-east-1/"),
          "AWS_REGION: found 'us-east-1/', expected the name of a region such as (us-east-1)", env(AWS_REGION="{1}"),
          env(AWS_REGION=None)),
    *(fault(f"another region, {code}", source(refuses=outside("eu-west-1", code)),
            r"the bucket is in another region \(\w+\); set `region` of this prefix under `storage`, or AWS_REGION",
            {"region": "eu-west-1"}, env(AWS_REGION="eu-west-1")) for code in ("AuthorizationHeaderMalformed",
            "PermanentRedirect")),
    fault("a request that is refused", source(refuses=outside("eu-west-1", "Odd")),
          r"the store refuses the request \(HTTP 400, Odd\); check the location, `endpoint` and `region`",
          {"region": "eu-west-1"}),
    fault("an endpoint that refuses", ({"endpoint": "{url}/none"}, answers(418)),
          r"the server responded with HTTP 418; check the location and `endpoint`", (answers(0), {"endpoint": "{url}"})),
    fault("settings of the environment", env(AWS_SKIP_SIGNATURE="maybe"),
          "refuses its settings .*; check `storage`, and the environment variables that begin with AWS_",
          env(AWS_SKIP_SIGNATURE=None), env(AWS_SKIP_SIGNATURE="true")),
    fault("credentials of Google that are not there", (env(GOOGLE_APPLICATION_CREDENTIALS="{folder}/none"), at("gs://b/x")),
          "correct GOOGLE_APPLICATION_CREDENTIALS; or unset it, and set `anonymous: true` under `storage` for public data",
          write_key_of_google, (env(GOOGLE_APPLICATION_CREDENTIALS=None), {"anonymous": True})),
    fault("a busy source", (answers(503), {"give_up_after": 0.2}),
          "check the source and the network, or increase `give_up_after`",
          answers(0), (answer_later, {"give_up_after": 30})),
    fault("a clock that differs", source(refuses=with_clock(3600)),
          r"clocks of this machine and the store differ \(RequestTimeTooSkewed\); set the clock of this machine",
          source(refuses=with_clock(0))),
    fault("a time that is none", source(change=with_time("yesterday")),
          "Last-Modified header that is not a time; correct the server's clock or settings, or remove the header",
          source(change=with_time("Wed, 21 Oct 2015 07:28:00 GMT")), source(change=with_time(None))),
    # locations
    fault("an empty part of a key", at("s3://b/a//x"),
        "its key has an empty part, .*; copy the object to a key without such parts",
          has("b/a/x", "s3://b/a/x")),
    fault("an empty part of a pattern", at("s3://b/a//*"),
          "the pattern has an empty part, .*; remove that part from the pattern",
          has("b/a/x", "s3://b/a/*")),
    fault("a key with an empty part among others", add_bad_key,
          r"the object s3://b/dir//x has an empty part, .*; copy it to a key without such parts and remove it, or "
          r"use a pattern for",
          copy_and_remove, at("s3://b/g*/**/x")),
    fault("a user in a URL", at("http://u:p@127.0.0.1:{port}/b/x"), "contains a user or password; remove it from the URL",
          at(WEB)),
    fault("an encoded slash", at("{url}/b%2Fx"), "has an encoded slash .* use a URL without it", at(WEB)),
    fault("no host", at("http:///b/x"), "contains no server name, expected http://host/path", at(WEB)),
    fault("a star of a web server", at("{url}/b/[x]"), r"write \[ and \* in a file's name as %5B and %2A",
          has("b/[x]", "{url}/b/%5Bx]")),
    fault("no bucket in a location", at("s3:///x"), "found '' as the bucket, expected s3://bucket/key", at("s3://b/x")),
    fault("a server that is none", at("http://h:99999/b/x"),
          "found 'h:99999' as the server, expected http://host/path or http://host:port/path", at(WEB)),
    *(misuse(lambda _, scheme=scheme: make_storage().stat(f"{scheme}://b/x"), f"{scheme}:// is not supported: write (s3://)",
             (env(AWS_ENDPOINT_URL="{url}"), lambda case: make_storage().stat(f"{case.said[1]}b/x")), name=f"a scheme {scheme}")
      for scheme in ("s3a", "s3n")),
    # web servers
    fault("a redirect in a circle", (source(redirect="{url}/login"), at(WEB)),
          "the server redirects in a loop; check the location, and whether it needs a login",
          source(redirect=None), at("{url}/b/x?signature=of-a-login")),
    fault("a redirect to what is not HTTP", (source(redirect="ftp://h/x"), at(WEB)),
          r"the server redirects from https:// to http://, or to a URL of another scheme, .*; check the location",
          source(redirect=None), at("{url}/b/x?token=1")),
    fault("a server that compresses", (source(change=compress), at(WEB)),
          "the server compresses its responses .*; turn off compression for these files, or copy them", source(change=None),
          copy_to_a_file),
    # packages
    fault("a client that is not installed", without_package("obstore"),
          r"needs obstore: install megablend\[objects\] \(`pip install '(.*)'`\)", with_package("obstore"), fails=stat),
    fault("a helper that was killed", kill_helper, "the helper process for object stores has exited",
          lambda _: close_helper(), fails=read_helped, works=(read_helped, lambda _: close_helper())),
)
# fmt: on


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
    says = (
        "the server does not support byte-range requests; use a server that does, or copy the file"
    )
    with pytest.raises(MegablendError, match=says):
        make_storage().read(f"{whole_files}/x", 2, 3)
    with OddSource({"x": DATA}) as source:
        assert make_storage().read(f"{source.url}/x", 2, 3) == DATA[2:5]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    (tmp_path / "copy").write_bytes(opener.open(f"{whole_files}/x", timeout=500).read())
    assert make_storage().read(str(tmp_path / "copy"), 2, 3) == DATA[2:5]


def test_a_server_without_tls(whole_files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    options = {"endpoint": whole_files.replace("http:", "https:"), "give_up_after": 1.0}
    says = "the server does not speak TLS on this port; .*check `http` or `https` in `endpoint`"
    with pytest.raises(MegablendError, match=says):
        make_storage(objects=parse_options({"s3://": options})).stat("s3://b/x")
    with OddSource({"b/x": DATA}) as source:
        options["endpoint"] = source.url
        assert make_storage(objects=parse_options({"s3://": options})).stat("s3://b/x").size == len(
            DATA
        )


@pytest.mark.parametrize("remedy", [{"ca_file": True}, {"endpoint": True}])
def test_a_certificate_that_is_not_trusted(
    tls: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remedy: dict[str, bool]
) -> None:
    url, certificate = tls
    with OddSource({"x/x": b"0123"}) as source:
        case = Case(source, tmp_path, monkeypatch)
        case.location = "s3://x/x"
        case.change({"endpoint": url.removesuffix("/x")})
        says = "TLS certificate is not trusted; .*; set `ca_file` to the PEM file of .*, or correct `endpoint`"
        with pytest.raises(MegablendError, match=says):
            case.use()
        case.change(
            {"ca_file": str(certificate)} if "ca_file" in remedy else {"endpoint": source.url}
        )
        storage = make_storage(objects=parse_options({"s3://": case.settings}))
        assert storage.stat("s3://x/x").size == 4


@pytest.mark.parametrize("variable", ["NO_PROXY", "HTTPS_PROXY"])
def test_a_proxy_of_the_environment(
    tls: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    url, certificate = tls
    with OddSource({}) as proxy:
        case = Case(proxy, tmp_path, monkeypatch)
        storage = make_storage(
            objects=parse_options({"https://": {"ca_file": str(certificate), "give_up_after": 0.5}})
        )
        case.env(HTTPS_PROXY=proxy.url)
        with pytest.raises(MegablendError, match=f"the proxy does not connect; .*; {NO_PROXY}"):
            storage.stat(url)
        case.env(**({"NO_PROXY": "localhost"} if variable == "NO_PROXY" else {"HTTPS_PROXY": None}))
        assert storage.stat(url).size == 4


AZURE = [
    # (what is wrong in the environment or the location, what is said, settings and location that do as it says)
    (
        {"AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1\n"},
        "az://{}/x",
        "AZURE_STORAGE_ACCOUNT_NAME: found a line break or another control character\nremove it from the value",
        [({}, {"AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1"})],
    ),
    (
        {"AZURE_STORAGE_ACCOUNT_NAME": None},
        "az://{}/x",
        r"set AZURE_STORAGE_ACCOUNT_NAME \(or `account` under `storage`\) and its credentials",
        [
            ({}, {"AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1"}),
            ({"account": "devstoreaccount1"}, {}),
        ],
    ),
    (
        {},
        "az://none/x",
        r"there is no such container \(ContainerNotFound\); check its name and the account",
        [({}, {})],
    ),
    (
        {},
        "abfs://{}/x",
        "write az://container/key, and set the account under `storage` or in",
        [({}, {})],
    ),
    (
        {},
        "abfss://{}/x",
        "write az://container/key, and set the account under `storage` or in",
        [({}, {})],
    ),
    ({}, "azure://{}/x", "azure:// is not supported: write az://", [({}, {})]),
    (
        {},
        "msc://{}/x",
        "use the bucket's s3://, gs:// or az:// URL, and set its endpoint under `storage`",
        [({}, {})],
    ),
]


@pytest.mark.parametrize(
    ("wrong", "location", "says", "remedies"), AZURE, ids=[says[:30] for _, _, says, _ in AZURE]
)
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
        forget_clients()
        for name, value in values.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
                name, value
            )

    set_environment(box.environment)
    box.put("x", DATA)
    for settings, environment in remedies:
        set_environment(box.environment | wrong)
        options = {"endpoint": azurite, "give_up_after": 1.0}
        with pytest.raises(MegablendError, match=says):
            make_storage(objects=parse_options({"az://": options})).read(
                location.format(box.name), 0, 10
            )
        set_environment(environment)
        storage = make_storage(objects=parse_options({"az://": options | settings}))
        assert storage.read(f"az://{box.name}/x", 0, 10) == DATA


def test_a_cache_without_permission(swift: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    swift.admin.make_bucket_if_missing("mine")
    prefix = ObjectPrefix("s3://mine/c", parse_options({"s3://": {"give_up_after": 1.0}}))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_KEYS[1])
    says = "cannot access the cache: access is denied .*; grant these credentials permission to read, write, list and"
    for call in (lambda: prefix.read("x"), prefix.list_objects):
        with pytest.raises(CacheError, match=says):
            call()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    forget_clients()
    prefix.write("x", b"1")
    assert prefix.read("x") == b"1"
    assert [each.key for each in prefix.list_objects()] == ["x"]
    prefix.remove(["x"])
    assert prefix.list_objects() == []


def test_a_cache_with_a_key_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OddSource({"b/c/runs/x": b"1", "b/c/runs//y": b"1"}) as source:
        case = Case(source, tmp_path, monkeypatch)
        prefix = ObjectPrefix("s3://b/c", parse_options({"s3://": case.settings}))
        says = r"s3://b/c: cannot access the cache: the object c/runs//y has an empty part, .*; remove it"
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
    forget_clients()
    options = {"endpoint": source.url, "give_up_after": 1.0, **settings}
    return make_storage(objects=parse_options({"s3://b": options})).read("s3://b/x", 0, 10)


@pytest.mark.usefixtures("profiles")
def test_a_profile_without_keys(tmp_path: Path) -> None:
    with OddSource({"b/x": DATA}) as source:
        says = r"contains no credentials; add them \(`aws configure --profile empty`\), or choose another profile"
        with pytest.raises(ConfigError, match=says):
            read(source, profile="empty")
        assert read(source, profile="file") == DATA
        add_keys(tmp_path)
        assert read(source, profile="empty") == DATA


@pytest.mark.usefixtures("profiles")
def test_a_profile_that_nobody_is_signed_in_with(tmp_path: Path) -> None:
    sign_out(tmp_path)
    with OddSource({"b/x": DATA}) as source:
        with pytest.raises(
            MegablendError,
            match=r"profile 'signed-in' of .*; run `aws sso login --profile signed-in`",
        ):
            read(source, profile="signed-in")
        sign_in(tmp_path)
        assert read(source, profile="signed-in") == DATA


@pytest.mark.usefixtures("profiles")
def test_profiles_without_botocore(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    says = "its credentials in ~/.aws cannot be read without botocore; .*, or remove {} and set AWS_ACCESS_KEY_ID and "
    with OddSource({"b/x": DATA}) as source:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "botocore", None)
            patch.setitem(sys.modules, "botocore.session", None)
            with pytest.raises(ConfigError, match=says.format("`profile`")):
                read(source, profile="file")
            patch.setenv("AWS_PROFILE", "file")
            with pytest.raises(ConfigError, match=says.format("AWS_PROFILE")):
                read(source)
            patch.setenv("AWS_ACCESS_KEY_ID", "x")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "y")
            patch.delenv("AWS_PROFILE")
            assert read(source) == DATA
            patch.delenv("AWS_ACCESS_KEY_ID")
            caplog.clear()
            with pytest.raises(MegablendError):
                read(source)
            assert (
                "credentials in ~/.aws cannot be read without botocore; install it (`pip install botocore`), or set"
                in caplog.text
            )
        assert read(source, profile="file") == DATA  # where it is installed
        assert "AWS_ACCESS_KEY_ID" not in os.environ
        assert read(source) == DATA

"""What is said of a store that does not answer as it should, with which exit code, and how soon."""

from __future__ import annotations

import re
import ssl
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megablend.errors import DataError, MegablendError
from megablend.storage.by_scheme import make_storage
from megablend.storage.object_options import ObjectOptions
from megablend.storage.store_options import parse_options
from tests.storage.faulty import Faults, FaultySource
from tests.storage.objects.conftest import READER_KEYS

CANARY = "CANARYsecretCANARY"


def replace_object(source: FaultySource) -> None:
    source.files["b/x"] = b"9876543210"


def replace_silently(source: FaultySource) -> None:
    source.ignores_conditions = True
    replace_object(source)


def delete_object(source: FaultySource) -> None:
    source.files = {"b/other": b""}


def truncate_object(source: FaultySource) -> None:
    source.files["b/x"] = b"0123"
    source.ignores_conditions = True


def let_keys_expire(source: FaultySource) -> None:
    source.body = b"<Error><Code>ExpiredToken</Code></Error>"
    source.faults = Faults(status={400: 1.0})


def close_to_all(source: FaultySource) -> None:
    source.body = b"<Error><Code>AccessDenied</Code></Error>"
    source.faults = Faults(status={403: 1.0})


def break_down(source: FaultySource) -> None:
    source.faults = Faults(status={500: 1.0})


def go_away(source: FaultySource) -> None:
    source.is_down = True
    source.faults = Faults(reset=1.0)


def lie_about_sizes(source: FaultySource) -> None:
    source.listed_bytes = 12


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and what is said of it."""

    message: str
    """A pattern."""
    code: int = 3
    """The exit code of commands."""
    seconds: float = 2.0
    """In which it is said, apart from what a loaded machine takes more."""
    location: str = "s3://failures/a"
    settings: Mapping[str, object] = field(default_factory=dict)
    keys: tuple[str, str] | None = None
    """Credentials in place of the server's own."""
    server: str = "swift"
    """The fixture of the server."""
    before: Callable[[FaultySource], None] | None = None
    """What is wrong with the faulty source from the beginning."""
    happens: Callable[[FaultySource], None] | None = None
    """What happens to it while the object is read."""


def no_server(what: str, **settings: object) -> Fault:
    return Fault(message=what, settings=settings)


def while_reading(happens: Callable[[FaultySource], None], message: str) -> Fault:
    return Fault(server="source", location="s3://b/x", happens=happens, message=message)


FAULTS = {
    "bucket is missing": Fault(
        location="s3://nobucket/a",
        message=r"cannot be read: there is no such bucket \(NoSuchBucket\); check",
    ),
    "bucket is missing, LIST": Fault(
        location="s3://nobucket/*",
        message=r"nobucket/\*: cannot be listed: there is no such bucket",
    ),
    "key is missing": Fault(
        location="s3://failures/none", message=r"s3://failures/none: no such object"
    ),
    "no bucket is named": Fault(
        location="s3://", code=2, message=r"found '' as the bucket, expected s3://bucket/key"
    ),
    "region is wrong": Fault(
        settings={"region": "eu-west-1"}, message=r"in another region \(\w+\); set `region`"
    ),
    "secret is wrong": Fault(
        keys=("test:tester", CANARY),
        message=r"the secret key is wrong \(\w+\); check the credentials",
    ),
    "access key is wrong": Fault(
        keys=(CANARY, "x"), message=r"InvalidAccessKeyId|SignatureDoesNotMatch"
    ),
    "403": Fault(
        keys=READER_KEYS, message=r"cannot be read: access is denied \(AccessDenied\); grant"
    ),
    "403, LIST": Fault(
        location="s3://failures/*",
        keys=READER_KEYS,
        message=r"cannot be listed: access is denied \(AccessDenied\); grant",
    ),
    "DNS": no_server(r"cannot be resolved; tried \d+ times", endpoint="http://no.such.invalid"),
    "no server": no_server(r"no connection to the server; tried \d", endpoint="http://127.0.0.1:9"),
    "proxy": no_server(r"no connection to the server; .*`proxy`", proxy="http://127.0.0.1:9"),
    "CA file": Fault(
        settings={"ca_file": "/no/such.pem"},
        code=2,
        message=r"ca_file /no/such.pem cannot be read",
    ),
    "TLS": Fault(
        server="tls", message=r"TLS certificate is not trusted.*set `ca_file` to the PEM file"
    ),
    "replaced": while_reading(
        replace_object, r"s3://b/x: was replaced while it was in use; restore"
    ),
    "replaced, conditions ignored": while_reading(
        replace_silently, r"was replaced while it was in use \(its etag is \w+, but was"
    ),
    "deleted": while_reading(delete_object, r"s3://b/x: was deleted while it was in use; restore"),
    "truncated": while_reading(
        truncate_object, r"was replaced while it was in use \(it has 4 bytes, but had 10\)"
    ),
    "keys expired": while_reading(
        let_keys_expire, r"the credentials have expired \(ExpiredToken\); renew"
    ),
    "access is taken away": while_reading(
        close_to_all, r"cannot be read: access is denied \(AccessDenied\); grant these credentials"
    ),
    "broken": while_reading(break_down, r"the source failed \(HTTP 500\); tried \d+ times in \d s"),
    "gone": while_reading(
        go_away, r"(the connection broke|no connection to the server); tried \d+ times in \d s"
    ),
    "listing is wrong": Fault(
        server="source",
        location="s3://b/x",
        before=lie_about_sizes,
        message=r"s3://b/x: was replaced while it was in use \(it has 10 bytes, but had 12\)",
    ),
}


@pytest.fixture
def source(obstore: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultySource]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    with FaultySource({"b/x": b"0123456789"}) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_fault_has_its_message_exit_code_and_time(
    fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = request.getfixturevalue(fault.server)
    location = fault.location
    if fault.server == "swift":
        server.admin.make_bucket_if_missing("failures")
        server.admin.put("failures", "a", b"0123")
    elif fault.server == "tls":
        location = server[0]
    if fault.keys is not None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", fault.keys[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", fault.keys[1])
    is_read = fault.server == "source"
    error = (
        fail_while_reading(server, fault)
        if is_read
        else fail(location, fault.seconds, **fault.settings)
    )
    assert error.exit_code == fault.code
    assert re.search(fault.message, str(error)), str(error)
    shown = "".join(traceback.format_exception(error)) + repr(error.__dict__)
    assert CANARY not in shown
    assert error.__context__ is None or CANARY not in repr(error.__context__)


def fail_while_reading(source: FaultySource, fault: Fault) -> MegablendError:
    """The error of a read of an object that was listed and read before."""
    storage = make_storage(objects=parse_options({"s3://": {"give_up_after": 1.0}}))
    if fault.before is not None:
        fault.before(source)
    # Sizes and etags of the listing
    assert [each.path for each in storage.find("s3://b/*").files] == ["s3://b/x"]
    if fault.happens is not None:
        assert storage.read("s3://b/x", 0, 4) == b"0123"
        fault.happens(source)
    begin = time.monotonic()
    with pytest.raises(MegablendError) as caught:
        storage.read("s3://b/x", 0, 4)
    assert time.monotonic() - begin < fault.seconds + 200
    return caught.value


def fail(location: str, seconds: float, **settings: object) -> MegablendError:
    """The error of a read, which comes within so many seconds (and what a loaded machine takes more)."""
    storage = make_storage(
        objects=parse_options({location.split("//")[0] + "//": {"give_up_after": 1.0, **settings}})
    )
    begin = time.monotonic()
    with pytest.raises(MegablendError) as caught:
        storage.find(location).files or storage.stat(location)
    assert time.monotonic() - begin < seconds + 200
    return caught.value


@pytest.mark.usefixtures("obstore")
def test_expired_credentials_are_asked_for_again_and_then_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    with FaultySource({"b/x": b"0123"}) as source:
        source.body = f"<Error><Code>ExpiredToken</Code><Token>{CANARY}</Token></Error>".encode()
        source.faults = Faults(status={400: 1.0})
        error = fail("s3://b/x", 5, endpoint=source.url)
        assert isinstance(error, DataError)
        assert error.problem.startswith(
            "cannot be read: the credentials have expired (ExpiredToken); renew"
        )
        assert source.requests == 3 + 1  # and one for the end of the object
        assert CANARY not in "".join(traceback.format_exception(error))


EXPIRED = {
    "se=2026-09-02T00%3A01%3A00Z&sig=CANARY": "2026-09-02 00:01:00",
    "se=2026-09-02&sig=CANARY": "2026-09-02 00:00:00",
    "X-Amz-Date=20260902T000000Z&X-Amz-Expires=60&X-Amz-Signature=CANARY": "2026-09-02 00:01:00",
    "X-Goog-Date=20260902T000000Z&X-Goog-Expires=60&X-Goog-Signature=CANARY": "2026-09-02 00:01:00",
    "AWSAccessKeyId=CANARY&Expires=1788307260&Signature=CANARY": "2026-09-02 00:01:00",
    "si=policy&sig=CANARY": "2026-09-02 00:02:00",
}
"""When signatures expired, by queries of signed URLs; the last one is said by the server alone."""
POLICY = b"<Error><Code>AuthenticationFailed</Code>Expiry [Wed, 02 Sep 2026 00:02:00 GMT]</Error>"


@pytest.mark.parametrize(("query", "time"), EXPIRED.items(), ids=[*map(str, range(6))])
def test_a_signature_that_has_expired(obstore: None, query: str, time: str) -> None:
    with FaultySource({"x": b"0123"}) as source:
        source.body = POLICY if "si=" in query else b"<Error><Code>AccessDenied</Code></Error>"
        source.faults = Faults(status={403: 1.0})
        settings = ObjectOptions(urls=((f"{source.url}/x", query),))
        with pytest.raises(DataError) as caught:
            make_storage(objects=settings).stat(f"{source.url}/x")
    assert f"the URL's signature expired at {time} UTC; sign it again" in str(caught.value)
    assert "CANARY" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("query", ["se=2999-01-01&sig=s", "se=soon&sig=s", "X-Amz-Expires=60"])
def test_a_signature_that_has_not_expired(obstore: None, query: str) -> None:
    with FaultySource({"x": b"0123"}) as source:
        source.faults = Faults(status={403: 1.0})
        settings = ObjectOptions(urls=((f"{source.url}/x", query),))
        with pytest.raises(DataError, match="access is denied"):
            make_storage(objects=settings).stat(f"{source.url}/x")


@pytest.fixture
def tls(tmp_path: Path, obstore: None) -> Iterator[tuple[str, Path]]:
    """A server with a certificate that only the PEM file beside it makes valid."""
    key = tmp_path / "key.pem"
    certificate = tmp_path / "ca.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        " -addext basicConstraints=critical,CA:FALSE"
    )
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            elsewhere = {"/plain": {"Location": "http://localhost/x"}, "/nowhere": {}}
            self.send_response(302 if self.path in elsewhere else 206)
            for name, value in elsewhere.get(self.path, {}).items():
                self.send_header(name, value)
            for name, value in {
                "Content-Range": "bytes 0-0/4",
                "Content-Length": "1",
                "ETag": '"a"',
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"0")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://localhost:{server.server_port}/x", certificate
    server.shutdown()
    server.server_close()


def test_a_certificate_of_a_ca_file_is_trusted(tls: tuple[str, Path]) -> None:
    storage = make_storage(
        objects=parse_options({"https://localhost": {}, "https://": {"ca_file": str(tls[1])}})
    )
    assert storage.stat(tls[0]).size == 4


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("plain", r"redirects from https:// to http://, or to a URL of another scheme"),
        ("nowhere", "redirects without saying where.*; for a web server, check the location"),
    ],
)
def test_a_redirect_that_cannot_be_followed(tls: tuple[str, Path], key: str, says: str) -> None:
    location = f"{tls[0].removesuffix('x')}{key}"
    error = fail(location, seconds=5, ca_file=str(tls[1]), give_up_after=0.1)
    assert re.search(f"{location}: cannot be read: the server {says}", str(error))


@pytest.mark.usefixtures("obstore")
def test_a_header_that_is_not_a_time_is_named_at_once() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(206)
            headers = {
                "Content-Range": "bytes 0-0/4",
                "Content-Length": "1",
                "Last-Modified": "yesterday",
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"0")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        error = fail(f"http://127.0.0.1:{server.server_port}/x", seconds=5, give_up_after=600.0)
    finally:
        server.shutdown()
        server.server_close()
    assert "the server's response has a Last-Modified header that is not a time" in str(error)

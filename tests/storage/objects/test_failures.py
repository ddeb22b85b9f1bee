"""What is said of a store that does not answer as it should, with which exit code, and how soon."""

from __future__ import annotations

import logging
import os
import pickle
import re
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megablend.errors import ConfigError, DataError, MegablendError
from megablend.storage.by_scheme import make_storage
from megablend.storage.object_options import parse_options
from tests.storage.faulty import Faults, FaultySource
from tests.storage.objects.conftest import READER_KEYS, S3Server

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


WHILE_READING = {
    "replaced": (replace_object, r"s3://b/x: was replaced while it was in use; restore", 3),
    "replaced, conditions ignored": (replace_silently, r"was replaced while it was in use \(its etag is \w+, was", 3),
    "deleted": (delete_object, r"s3://b/x: was deleted while it was in use; restore", 3),
    "truncated": (truncate_object, r"was replaced while it was in use \(it has 4 bytes, had 10\)", 3),
    "keys expired": (let_keys_expire, r"the credentials have expired \(ExpiredToken\): renew", 3),
    "access taken away": (close_to_all, r"cannot be read: access is denied \(AccessDenied\): get permission", 3),
    "broken": (break_down, r"the source failed \(HTTP 500\); tried \d+ times in \d s", 3),
    "gone": (go_away, r"(the connection broke|no connection to the server); tried \d+ times in \d s", 3),
}
"""What happens to an object while a run reads it: the message of the next read, and its exit code; `give_up_after` is 1 s."""


@pytest.mark.usefixtures("obstore")
@pytest.mark.parametrize(("happens", "message", "code"), WHILE_READING.values(), ids=WHILE_READING)
def test_each_failure_while_reading_has_its_message_and_exit_code(
    happens: Callable[[FaultySource], None], message: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    with FaultySource({"b/x": b"0123456789"}) as source:
        options = parse_options({"s3://": {"endpoint": source.url, "give_up_after": 1.0}})
        storage = make_storage(objects=options)
        assert [each.path for each in storage.find("s3://b/*").files] == ["s3://b/x"]  # sizes and etags of the listing
        assert storage.read("s3://b/x", 0, 4) == b"0123"
        happens(source)
        begin = time.monotonic()
        with pytest.raises(DataError, match=message) as caught:
            storage.read("s3://b/x", 0, 4)
        assert time.monotonic() - begin < 1 + 20  # and what a loaded machine takes more
    assert caught.value.exit_code == code
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def fail(location: str, seconds: float, **settings: object) -> MegablendError:
    """The error of a read, which comes within so many seconds (and what a loaded machine takes more)."""
    storage = make_storage(objects=parse_options({location.split("//")[0] + "//": {"give_up_after": 1.0, **settings}}))
    begin = time.monotonic()
    with pytest.raises(MegablendError) as caught:
        storage.find(location).files or storage.stat(location)
    assert time.monotonic() - begin < seconds + 20
    return caught.value


@pytest.mark.parametrize(
    ("location", "settings", "keys", "code", "message"),
    [
        ("s3://nobucket/a", {}, None, 3, r"cannot be read: there is no such bucket \(NoSuchBucket\): check"),
        ("s3://nobucket/*", {}, None, 3, r"nobucket/\*: cannot be listed: there is no such bucket"),
        ("s3://failures/none", {}, None, 3, r"s3://failures/none: no such object"),
        ("s3://failures/a", {"region": "eu-west-1"}, None, 3, r"in another region \(\w+\): set `region`"),
        ("s3://failures/a", {}, ("test:tester", CANARY), 3, r"the secret key is wrong \(\w+\): check the credentials"),
        ("s3://failures/a", {}, (CANARY, "x"), 3, r"InvalidAccessKeyId|SignatureDoesNotMatch"),
        ("s3://failures/a", {}, READER_KEYS, 3, r"cannot be read: access is denied \(AccessDenied\): get"),
        ("s3://failures/*", {}, READER_KEYS, 3, r"cannot be listed: access is denied \(AccessDenied\): get"),
        ("s3://failures/a", {"endpoint": "http://no.such.invalid"}, None, 3, r"cannot be resolved; tried \d+ times"),
        ("s3://failures/a", {"endpoint": "http://127.0.0.1:9"}, None, 3, r"no connection to the server; tried \d"),
        ("s3://failures/a", {"proxy": "http://127.0.0.1:9"}, None, 3, r"no connection to the server; .*`proxy`"),
        ("s3://failures/a", {"ca_file": "/no/such.pem"}, None, 2, r"ca_file /no/such.pem: cannot be read"),
        ("s3://", {}, None, 2, r"found '' for a bucket, expected s3://bucket/key"),
    ],
)  # fmt: skip
def test_each_failure_has_its_message_and_exit_code(
    swift: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    location: str,
    settings: dict[str, object],
    keys: tuple[str, str] | None,
    code: int,
    message: str,
) -> None:
    swift.admin.make_bucket_if_missing("failures")
    swift.admin.put("failures", "a", b"0123")
    if keys is not None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys[1])
    error = fail(location, 2, **settings)
    assert error.exit_code == code
    assert re.search(message, str(error)), str(error)
    shown = "".join(traceback.format_exception(error)) + repr(error.__dict__)
    assert CANARY not in shown
    assert error.__context__ is None or CANARY not in repr(error.__context__)


@pytest.mark.usefixtures("obstore")
def test_expired_credentials_are_asked_for_again_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    with FaultySource({"b/x": b"0123"}) as source:
        source.body = f"<Error><Code>ExpiredToken</Code><Token>{CANARY}</Token></Error>".encode()
        source.faults = Faults(status={400: 1.0})
        error = fail("s3://b/x", 5, endpoint=source.url)
        assert isinstance(error, DataError)
        assert error.problem.startswith("cannot be read: the credentials have expired (ExpiredToken): renew")
        assert source.requests == 3
        assert CANARY not in "".join(traceback.format_exception(error))


@pytest.fixture
def tls(tmp_path: Path, obstore: None) -> Iterator[tuple[str, Path]]:
    """A server with a certificate that only the PEM file beside it makes valid."""
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        " -addext basicConstraints=critical,CA:FALSE"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(206)
            for name, value in {"Content-Range": "bytes 0-0/4", "Content-Length": "1", "ETag": '"a"'}.items():
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


def test_a_certificate_that_is_not_trusted_is_named_and_a_ca_file_mends_it(tls: tuple[str, Path]) -> None:
    error = fail(tls[0], 2)
    assert "the server's TLS certificate is not trusted" in str(error)
    assert "set `ca_file` to the PEM file" in str(error)
    storage = make_storage(objects=parse_options({"https://localhost": {}, "https://": {"ca_file": str(tls[1])}}))
    assert storage.stat(tls[0]).size == 4


def test_without_the_client_one_line_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        ConfigError, match=r"^s3://b/x: reading object stores needs obstore: install megablend\[objects\]"
    ):
        make_storage().stat("s3://b/x")


def test_credentials_and_unknown_settings_are_refused_in_configs() -> None:
    for settings, message in (
        ({"secret_access_key": "x"}, "credentials do not belong in configs"),
        ({"endpont": "http://x"}, "unknown setting; did you mean endpoint"),
        ({"endpoint": "http://u:p@h"}, "contains a user or password"),
        ({"endpoint": "h:80"}, "expected a URL"),
        ({"read_timeout": 0}, "expected a number above 0"),
        ({"anonymous": "yes"}, "expected true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_options({"s3://b": settings})
    with pytest.raises(ValueError, match=r"b: expected a URL prefix such as s3://bucket/"):
        parse_options({"b": {}})


def test_a_secret_is_in_no_pickle_repr_or_log(swift: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    swift.admin.make_bucket_if_missing("failures")
    swift.admin.put("failures", "a", b"0123")
    with caplog.at_level(logging.DEBUG):
        storage = make_storage()
        assert storage.read("s3://failures/a", 0, 4) == b"0123"
    for shown in (repr(storage), str(vars(storage)), pickle.dumps(storage).decode("latin-1"), caplog.text):
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in shown

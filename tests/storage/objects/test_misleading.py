"""Sources that once led a user astray: what the message says now, and after how many seconds at most.

Each row is {situation | message contains | at most s}; all of them are real servers.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import megablend
from megablend.errors import ConfigError, DataError, MegablendError
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import Faults, FaultySource

pytestmark = [pytest.mark.usefixtures("obstore"), pytest.mark.long]
Settings = dict[str, Any]


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def answering(
    status: int, body: bytes = b"", context: ssl.SSLContext | None = None
) -> Iterator[str]:
    """A server with the same answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"{'http' if context is None else 'https'}://localhost:{server.server_address[1]}"
        finally:
            server.shutdown()


def authority(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """The context of a server whose certificate is that of an authority (CA:TRUE), and its file."""
    request = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.pem")]
    done = [*request.split(), "-addext", "basicConstraints=critical,CA:TRUE", *files]
    subprocess.run(done, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    return context, folder / "ca.pem"


MOST_SECONDS = 200
"""What tries again goes on for ten minutes."""


class Situation(NamedTuple):
    """What is there, and what is said."""

    name: str
    prepare: Callable[[ExitStack, Path, pytest.MonkeyPatch], tuple[str, Settings]]
    """Starts servers; returns what is read, and settings."""
    says: str
    says_not: str = "restore the file"


def silent(stack: ExitStack, _: Path, patch: pytest.MonkeyPatch) -> tuple[str, Settings]:
    return f"{stack.enter_context(silent_server())}/a.parquet", {}


def silent_store(stack: ExitStack, _: Path, patch: pytest.MonkeyPatch) -> tuple[str, Settings]:
    return "s3://bucket/a.parquet", {
        "s3://bucket": {"endpoint": stack.enter_context(silent_server()), "anonymous": True}
    }


def metadata_refuses(stack: ExitStack, _: Path, patch: pytest.MonkeyPatch) -> tuple[str, Settings]:
    patch.setenv("AWS_METADATA_ENDPOINT", stack.enter_context(answering(403)))
    return "s3://bucket/a.parquet", {
        "s3://bucket": {"endpoint": stack.enter_context(answering(200))}
    }


def certificate_of_an_authority(
    stack: ExitStack, folder: Path, patch: pytest.MonkeyPatch
) -> tuple[str, Settings]:
    context, path = authority(folder)
    url = stack.enter_context(answering(200, context=context))
    return f"{url}/a.parquet", {url: {"ca_file": str(path)}}


def refused_handshake(
    stack: ExitStack, folder: Path, patch: pytest.MonkeyPatch
) -> tuple[str, Settings]:
    """As by a server that has no certificate for the name."""
    context, path = authority(folder)
    context.sni_callback = lambda *_: ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
    url = stack.enter_context(answering(200, context=context))
    return f"{url}/a.parquet", {url: {"ca_file": str(path)}}


def newline(stack: ExitStack, _: Path, patch: pytest.MonkeyPatch) -> tuple[str, Settings]:
    return "s3://bucket/a.parquet\n", {
        "s3://bucket": {"endpoint": stack.enter_context(answering(200)), "anonymous": True}
    }


def tab(stack: ExitStack, _: Path, patch: pytest.MonkeyPatch) -> tuple[str, Settings]:
    return "s3://bucket/a\tb.parquet", {
        "s3://bucket": {"endpoint": stack.enter_context(answering(200)), "anonymous": True}
    }


def expired(stack: ExitStack, _: Path, patch: pytest.MonkeyPatch) -> tuple[str, Settings]:
    patch.setenv("AWS_ACCESS_KEY_ID", "a")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    body = b"<Error><Code>ExpiredToken</Code></Error>"
    return "s3://bucket/a.parquet", {
        "s3://bucket": {"endpoint": stack.enter_context(answering(400, body))}
    }


def bucket_in_the_path(
    stack: ExitStack, _: Path, patch: pytest.MonkeyPatch
) -> tuple[str, Settings]:
    source = stack.enter_context(FaultySource({"bucket/a.parquet": b"PAR1"}))
    return "s3://bucket/*.parquet", {
        "s3://bucket": {"endpoint": f"{source.url}/bucket/", "anonymous": True}
    }


def bucket_in_the_path_of_a_key(
    stack: ExitStack, folder: Path, patch: pytest.MonkeyPatch
) -> tuple[str, Settings]:
    return "s3://bucket/a.parquet", bucket_in_the_path(stack, folder, patch)[1]


def bucket_in_the_host(
    stack: ExitStack, _: Path, patch: pytest.MonkeyPatch
) -> tuple[str, Settings]:
    source = stack.enter_context(FaultySource({"127/a.parquet": b"PAR1"}))
    patch.setenv("AWS_ENDPOINT_URL", source.url)
    return "s3://127/b/*.parquet", {"s3://127": {"anonymous": True}}


def console(stack: ExitStack, status: int, key: str) -> tuple[str, Settings]:
    url = stack.enter_context(answering(status, b"<!doctype html><title>Console</title>"))
    return f"s3://bucket/{key}", {"s3://bucket": {"endpoint": url, "anonymous": True}}


SITUATIONS = [
    Situation(
        "a server that never answers", silent, "the server has never responded: check the location"
    ),
    Situation(
        "a store that never answers",
        silent_store,
        "the server has never responded: check the location",
    ),
    Situation(
        "a metadata address that refuses",
        metadata_refuses,
        "no credentials were found",
        "grant these credentials",
    ),
    Situation(
        "a certificate of an authority",
        certificate_of_an_authority,
        "certificate is a CA certificate (CA:TRUE)",
        "is not trusted",
    ),
    Situation(
        "a server that refuses the handshake",
        refused_handshake,
        "the server refuses the TLS connection; tried",
        "no connection to the server",
    ),
    Situation(
        "a newline in a key",
        newline,
        "its key contains a control character, such as a newline or a tab",
    ),
    Situation(
        "a tab in a key",
        tab,
        "its key contains a control character, such as a newline or a tab",
        "empty part",
    ),
    Situation(
        "credentials that have expired", expired, "the credentials have expired (ExpiredToken)"
    ),
]


def find_and_read(storage: Storage, location: str) -> bytes:
    """What a build does with a location first."""
    storage.find(location)
    return storage.read(location, 0, 8)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_what_is_said_and_how_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: Situation
) -> None:
    with ExitStack() as stack:
        location, settings = situation.prepare(stack, tmp_path, monkeypatch)
        storage = make_storage(objects=parse_options(settings))
        started = time.monotonic()
        with pytest.raises(MegablendError) as caught:
            find_and_read(storage, location)
        assert time.monotonic() - started < MOST_SECONDS
    assert situation.says in str(caught.value)
    assert situation.says_not not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_credentials_that_expire_during_a_run_are_not_a_file_to_restore(tmp_path: Path) -> None:
    written = write_source(tmp_path, 0, "parquet", documents(0, 60, 40, 3), num_files=1)
    data = next(Path(written["path"]).parent.glob("*")).read_bytes()
    with FaultySource({"b/a.parquet": data}) as source:
        settings = {"s3://b": {"endpoint": source.url, "anonymous": True}}
        listed = [
            {"name": "a", "path": "s3://b/a.parquet", "column": written["column"], "weight": 1}
        ]
        config = make_config(
            tmp_path, listed, samples=64, storage=settings, file_checks_per_second=0
        )
        megablend.build(config)
        dataset = megablend.open(config)
        source.body = b"<Error><Code>ExpiredToken</Code></Error>"
        source.faults = Faults(status={400: 1.0})
        with pytest.raises(DataError, match=r"needed for sample 0 of train, source 'a'") as caught:
            dataset[0]
    assert "the credentials have expired (ExpiredToken); renew the credentials" in str(caught.value)
    assert "restore" not in str(caught.value)


@pytest.mark.parametrize(
    "prepare",
    [
        bucket_in_the_path,
        bucket_in_the_path_of_a_key,
        bucket_in_the_host,
        *(
            lambda stack, *_, s=status, k=key: console(stack, s, k)
            for status, key in ((200, "*.parquet"), (404, "a.parquet"), (404, "**/*.parquet"))
        ),
    ],
)
def test_a_wrong_endpoint_at_which_nothing_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[ExitStack, Path, pytest.MonkeyPatch], tuple[str, Settings]],
) -> None:
    """It contains the bucket, or is the address of a store's web console."""
    with ExitStack() as stack:
        location, settings = prepare(stack, tmp_path, monkeypatch)
        sources = [{"name": "a", "path": location, "weight": 1}]
        config = make_config(tmp_path, sources, samples=64, storage=settings)
        with pytest.raises(ConfigError) as caught:
            megablend.build_index(config)
    says = f"{location} matches no file; check the bucket, and `endpoint` if it is set"
    assert str(caught.value).endswith(says)

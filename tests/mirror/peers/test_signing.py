"""Requests and answers that somebody on the path has altered, or sends again, are refused."""

import asyncio
import os
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import ClientError, ClientSession, web
from yarl import URL

from megablend.errors import ConfigError
from megablend.mirror.node.frames import PROTOCOL
from megablend.mirror.peers import signing
from megablend.mirror.peers.signing import (
    ANSWER,
    SESSION,
    SessionError,
    SignatureError,
    Signer,
    Verifier,
    check_openness,
    make_contexts,
    read_secret,
)
from megablend.storage.mirror_options import MirrorOptions, TlsFiles
from megablend.system.tls import make_tls_context
from tests.certificates import Authority, authorities

__all__ = ["authorities"]

SECRET = b"0123456789abcdef"
PATH = "/v1/blocks?n=1"
BODY = b"which pages"
Answer: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.Response]]
NAMES = {
    name: f"Megablend-{name}"
    for name in ("Protocol", "Node", "To", "Client", "Count", "Session", "Body", "Signature")
}


@pytest.fixture
def server() -> Verifier:
    return Verifier(SECRET, "b:1")


@pytest.fixture
def client() -> Signer:
    return Signer(SECRET, "a:1")


def sign(client: Signer, server: Verifier) -> dict[str, str]:
    return client.sign("POST", PATH, BODY, to="b:1", session=server.session)


def accept(server: Verifier, headers: dict[str, str]) -> None:
    server.check("POST", PATH, headers)
    server.check_body(headers, BODY)


def test_a_signed_request_is_accepted(client: Signer, server: Verifier) -> None:
    headers = sign(client, server)
    assert headers.keys() == set(NAMES.values())
    assert SECRET.decode() not in str(headers)
    accept(server, headers)


def test_method_and_path_are_signed(client: Signer, server: Verifier) -> None:
    headers = sign(client, server)
    for method, path in [("GET", PATH), ("POST", "/v1/blocks?n=2"), ("POST/v1", "/blocks?n=1")]:
        with pytest.raises(SignatureError, match=r"signature is wrong \(all nodes need the same"):
            server.check(method, path, headers)
    accept(server, headers)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Protocol", f"Megablend-Protocol is '.*', expected '{PROTOCOL}'"),
        ("Node", "signature is wrong"),
        ("To", "Megablend-To is '.*', expected 'b:1'"),
        ("Client", "signature is wrong"),
        ("Count", "signature is wrong"),
        ("Body", "signature is wrong"),
        ("Signature", "signature is wrong"),
    ],
)
@pytest.mark.parametrize("value", [None, "", "7", "-1", "²", "9" * 5000, "\udcff", "x\n"])
def test_altered_headers_are_refused(
    client: Signer, server: Verifier, name: str, message: str, value: str | None
) -> None:
    headers = sign(client, server)
    altered = {key: text for key, text in headers.items() if key != NAMES[name]}
    if value is not None:
        altered[NAMES[name]] = value
    elif name == "Signature":
        message = "is not signed"
    elif name in ("Protocol", "To"):
        message = f"{NAMES[name]} is None"
    with pytest.raises(SignatureError, match=message):
        server.check("POST", PATH, altered)
    # What was refused takes nothing away from the right request
    accept(server, headers)


def test_text_does_not_move_from_one_header_to_the_next(client: Signer, server: Verifier) -> None:
    """Else a request could be sent again as another asker's, with another count."""
    headers = sign(client, server)
    moved = {
        NAMES["Client"]: headers[NAMES["Client"]][:-1],
        NAMES["Count"]: headers[NAMES["Client"]][-1] + headers[NAMES["Count"]],
    }
    with pytest.raises(SignatureError, match="signature is wrong"):
        server.check("POST", PATH, headers | moved)


@pytest.mark.parametrize("count", ["", "x", "-1", "1.0", "²", "9" * 5000])
def test_a_count_that_is_none_is_refused_though_it_is_signed(
    client: Signer, server: Verifier, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_count", iter([count]))
    with pytest.raises(SignatureError, match=r"Megablend-Count is '.*', expected a number"):
        server.check("POST", PATH, sign(client, server))


def test_another_body_is_refused(client: Signer, server: Verifier) -> None:
    headers = sign(client, server)
    server.check("POST", PATH, headers)
    for body in (b"", BODY + b" "):
        with pytest.raises(SignatureError, match="body is not the one"):
            server.check_body(headers, body)


def test_another_session_or_another_server_accepts_nothing(client: Signer) -> None:
    first = Verifier(SECRET, "b:1")
    restarted = Verifier(SECRET, "b:1")
    headers = sign(client, first)
    with pytest.raises(SessionError):
        accept(restarted, headers)
    with pytest.raises(SignatureError, match="signature is wrong"):
        accept(restarted, headers | {SESSION: restarted.session})
    other = Verifier(SECRET, "c:1")
    # Somebody on the path has told a client of b:1 the session of c:1
    with pytest.raises(SignatureError, match="Megablend-To is 'b:1', expected 'c:1'"):
        accept(other, client.sign("POST", PATH, BODY, to="b:1", session=other.session))
    with pytest.raises(SignatureError, match="signature is wrong"):
        accept(other, sign(client, other) | {"Megablend-To": "c:1"})


def test_another_secret_or_none(server: Verifier) -> None:
    with pytest.raises(SignatureError, match="signature is wrong"):
        accept(server, sign(Signer(b"fedcba9876543210", "a:1"), server))
    with pytest.raises(SignatureError, match=r"not signed \(all nodes need the same"):
        accept(server, sign(Signer(None, "a:1"), server))


def test_each_request_is_accepted_once_in_any_order(server: Verifier) -> None:
    clients = [Signer(SECRET, "a:1"), Signer(SECRET, "a:1")]
    requests = [sign(client, server) for client in clients for _ in range(100)]
    order = sorted(range(200), key=lambda i: i * 7919 % 211)
    for i, number in enumerate(order):
        accept(server, requests[number])
        for earlier in order[: i + 1]:
            with pytest.raises(SignatureError, match="has been received before"):
                accept(server, requests[earlier])


def test_late_requests_are_accepted_within_the_window(server: Verifier) -> None:
    client = Signer(SECRET, "a:1")
    requests = [sign(client, server) for _ in range(signing._WINDOW + 2)]
    accept(server, requests[-1])
    for late in (0, 1):
        with pytest.raises(SignatureError, match="has been received before"):
            accept(server, requests[late])
    for late in (2, signing._WINDOW):
        accept(server, requests[late])
        with pytest.raises(SignatureError, match="has been received before"):
            accept(server, requests[late])


def test_answers_are_signed(client: Signer, server: Verifier) -> None:
    request = sign(client, server)
    accept(server, request)
    answer = {ANSWER: server.sign_answer(request, 200, b"pages")}
    client.check_answer(request, 200, answer, b"pages")
    other = sign(client, server)
    for asked, status, headers, body in [
        (request, 200, answer, b"Pages"),
        (request, 404, answer, b"pages"),
        (other, 200, answer, b"pages"),
        (request, 200, {}, b"pages"),
        (request, 200, {ANSWER: "\udcff"}, b"pages"),
        (request, 200, {ANSWER: request["Megablend-Signature"]}, b"pages"),
        (request, 200, {ANSWER: Verifier(None, "b:1").sign_answer(request, 200, b"pages")}, b""),
    ]:
        with pytest.raises(SignatureError, match=r"response is not signed by b:1 \(all nodes need"):
            client.check_answer(asked, status, headers, body)


def test_without_a_secret_requests_say_who_asks() -> None:
    client = Signer(None, "a:1")
    server = Verifier(None, "b:1")
    headers = sign(client, server)
    assert headers == {
        "Megablend-Protocol": str(PROTOCOL),
        "Megablend-Node": "a:1",
        "Megablend-To": "b:1",
    }
    for _ in range(2):
        accept(server, headers)
    client.check_answer(headers, 200, {ANSWER: server.sign_answer(headers, 200, b"")}, b"x")
    with pytest.raises(SignatureError, match=f"Megablend-Protocol is '0', expected '{PROTOCOL}'"):
        accept(server, headers | {"Megablend-Protocol": "0"})


@asynccontextmanager
async def served(answer: Answer, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server on a free port of 127.0.0.1; its URL."""
    server = web.Server(answer)
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_signatures_pass_through_a_real_connection(client: Signer) -> None:
    """Headers, and the path with its query, arrive as they were signed."""
    server = Verifier(SECRET, "b:1")
    path = "/v1/data/a%20b%2Fc?block=7&x=%C3%BC"

    async def answer(request: web.BaseRequest) -> web.Response:
        try:
            server.check(request.method, request.raw_path, request.headers)
            body = await request.read()
            server.check_body(request.headers, body)
        except SessionError:
            return web.Response(status=401, headers={SESSION: server.session})
        except SignatureError as error:
            return web.Response(status=403, text=str(error))
        signature = server.sign_answer(request.headers, 200, body[::-1])
        return web.Response(body=body[::-1], headers={ANSWER: signature})

    async def talk() -> None:
        async with served(answer) as url, ClientSession() as session:

            async def post(headers: dict[str, str]) -> tuple[int, Mapping[str, str], bytes]:
                target = URL(url + path, encoded=True)
                async with session.post(target, data=BODY, headers=headers) as response:
                    return response.status, response.headers, await response.read()

            status, refusal, _ = await post(client.sign("POST", path, BODY, to="b:1", session=""))
            assert status == 401
            request = client.sign("POST", path, BODY, to="b:1", session=refusal[SESSION])
            status, headers, data = await post(request)
            assert (status, data) == (200, BODY[::-1])
            client.check_answer(request, status, headers, data)
            with pytest.raises(SignatureError):
                client.check_answer(request, status, headers, data + b" ")
            status, _, data = await post(request)
            assert (status, data) == (403, b"the request has been received before")

    asyncio.run(talk())


def options(**settings: Any) -> MirrorOptions:
    return MirrorOptions(folder="/mirror", nodes=("localhost:4",), **settings)


def test_the_secret_is_the_files_content(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    assert read_secret(options(secret_file=str(path))) == SECRET
    assert read_secret(options()) is None
    for mode in (0o640, 0o604, 0o610, 0o666):
        path.chmod(mode)
        message = (
            rf"secret_file: {path}: found mode {mode:04o}, expected 0600.*\nrun `chmod 600 {path}`"
        )
        with pytest.raises(ConfigError, match=message):
            read_secret(options(secret_file=str(path)))


def test_files_that_hold_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    wanted = options(secret_file=str(path))
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: No such file.*\ngive"):
        read_secret(wanted)
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: not a regular file"):
        read_secret(wanted)
    path.unlink()
    path.write_bytes(SECRET[:-1] + b" \n")
    path.chmod(0o600)
    with pytest.raises(
        ConfigError, match=f"{path}: found 15 bytes, expected at least 16\ngenerate one"
    ):
        read_secret(wanted)


LOCAL = ["127.0.0.1:1", "127.9.9.9:2", "[::1]:3", "localhost:4"]
TLS = TlsFiles(certificate="/c", key="/k", ca="/a")


@pytest.mark.parametrize("name", ["127.0.0.1.example:1", "10.0.0.1:1", "[fd00::1]:1", "n1:7171"])
def test_nobody_talks_in_the_open_unasked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_openness(options(), LOCAL)
    with pytest.raises(
        ConfigError,
        match=rf"nodes: {re.escape(name)} can be reached over the network, but neither.*\nset one",
    ):
        check_openness(options(), [*LOCAL, name])
    check_openness(options(secret_file="/s"), [name])
    check_openness(options(tls=TLS), [name])
    check_openness(options(insecure=True), LOCAL)
    assert not caplog.records
    check_openness(options(insecure=True), [name])
    assert "anyone who reaches this node's port can read" in caplog.text


def make_pair(tls: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    contexts = make_contexts(tls)
    assert contexts is not None
    return contexts


async def get(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(text="pages")

    async with (
        served(answer, server) as url,
        ClientSession() as session,
        session.get(url, ssl=client) as response,
    ):
        return await response.text()


def test_certificates_of_one_authority(authorities: tuple[Authority, Authority]) -> None:
    ours, others = authorities
    server, client = make_pair(ours.issue("IP:127.0.0.1"))
    assert asyncio.run(get(server, client)) == "pages"
    foreign_server, foreign_client = make_pair(others.issue("IP:127.0.0.1"))
    trusting = make_tls_context(ca_file=str(ours.ca))
    misnamed, _ = make_pair(ours.issue("IP:127.0.0.2", "DNS:localhost"))
    for refusing, asking, reason in [
        (foreign_server, client, "certificate verify failed"),
        (server, foreign_client, "certificate verify failed"),
        (server, trusting, "certificate required|Connection reset|Server disconnected"),
        (misnamed, client, "IP address mismatch"),
    ]:
        with pytest.raises((ClientError, OSError), match=f"(?i){reason}"):
            asyncio.run(get(refusing, asking))


def test_files_that_are_no_certificates(authorities: tuple[Authority, Authority]) -> None:
    assert make_contexts(None) is None
    ours, others = authorities
    tls = ours.issue("IP:127.0.0.1")
    foreign = others.issue("IP:127.0.0.1")
    for field, value in [("certificate", "/nowhere"), ("ca", "/nowhere"), ("ca", tls.key)]:
        with pytest.raises(ConfigError, match=r"tls: .* cannot be used: .*\ngive PEM files"):
            make_contexts(tls.model_copy(update={field: value}))
    with pytest.raises(ConfigError, match=r"tls: .* cannot be used: .*(?i:mismatch)"):
        make_contexts(tls.model_copy(update={"key": foreign.key}))
    encrypt = f"openssl ec -in {tls.key} -out {tls.key}.locked -aes128 -passout pass:abcd"
    subprocess.run(encrypt.split(), check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"tls: .* cannot be used: .*\n.*unencrypted key"):
        make_contexts(tls.model_copy(update={"key": f"{tls.key}.locked"}))
    Path(foreign.key).chmod(0o644)
    with pytest.raises(
        ConfigError, match=rf"tls: key: {foreign.key}: found mode 0644.*\nrun `chmod"
    ):
        make_contexts(foreign)

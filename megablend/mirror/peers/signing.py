"""Who may ask, and whose answer it is: a shared secret, which is never sent, or certificates.

A request is signed by HMAC-SHA256 of its method, path, body's digest, who asks whom, the server's
session and the asker's count of requests; an answer, by that of the request's signature, its status
and body's digest. A session is drawn when a server starts, so no request is valid at another
server, or after a restart; within one, a count is accepted once. No clock is compared. Nothing is
encrypted: that is what certificates are for.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
import re
import ssl
from collections.abc import Iterable, Mapping

from megablend.errors import ConfigError
from megablend.mirror.members.launchers import is_loopback
from megablend.mirror.node.frames import PROTOCOL
from megablend.storage.mirror_options import MirrorOptions, TlsFiles
from megablend.system.log import LOG
from megablend.system.safe_open import open_regular

SESSION = "Megablend-Session"
"""Header of a request, and of the answer that refuses one for its session."""
ANSWER = "Megablend-Answer"
"""Header of an answer: what `sign_answer` returns."""
NODE = "Megablend-Node"
PROTOCOL_HEADER = "Megablend-Protocol"
_TO = "Megablend-To"
_CLIENT = "Megablend-Client"
_COUNT = "Megablend-Count"
_BODY = "Megablend-Body"
_SIGNATURE = "Megablend-Signature"
_SIGNED = (PROTOCOL_HEADER, NODE, _TO, _CLIENT, _COUNT, SESSION, _BODY)
_SAME = "(all nodes need the same `secret_file`)"
_COUNTED = re.compile("[0-9]{1,18}")
_MIN_SECRET = 16
_WINDOW = 1024
"""Requests of one asker may arrive in another order than they were counted in, by so many."""


class SessionError(Exception):
    """A request was signed for another session: it is signed again for this one."""


class SignatureError(Exception):
    """A request or an answer without a signature that is right, or that has come before."""


def read_secret(options: MirrorOptions) -> bytes | None:
    """The secret that all nodes share; None if there is none. Raises: ConfigError."""
    path = options.secret_file
    return None if path is None else read_token("secret_file", path)


def read_token(setting: str, path: str) -> bytes:
    """The secret in a file that no other user may read. Raises: ConfigError."""
    secret = read_private(setting, path).strip()
    if len(secret) < _MIN_SECRET:
        raise ConfigError(
            f"{setting}: {path}: found {len(secret)} bytes, expected at least {_MIN_SECRET}\n"
            "generate one: `openssl rand -hex 32`"
        )
    return secret


def read_private(setting: str, path: str) -> bytes:
    """The content of a file that no other user may read. Raises: ConfigError."""
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {path}: cannot be read: {error.strerror}\n"
            "give a file that the user of the node process can read"
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"{setting}: {path}: found mode {mode:04o}, expected 0600: users other than its owner can read it\n"
            f"run `chmod 600 {path}`; if others have read it, generate another"
        )
    return data


def make_contexts(tls: TlsFiles | None) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """TLS as a server and as a client, each asking for a certificate of its `ca`; a server's has to
    be for the host in its name. None without files. Raises: ConfigError."""
    if tls is None:
        return None
    read_private("tls: key", tls.key)
    try:
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
        client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.ca)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED
            # An encrypted key is an error; without a password, OpenSSL would ask the terminal.
            context.load_cert_chain(tls.certificate, tls.key, password="")
    except OSError as error:
        raise ConfigError(
            f"tls: {tls.certificate}, {tls.key} and {tls.ca} cannot be used: {error}\n"
            "give PEM files: this node's certificate, its unencrypted key, and the authority's certificate"
        ) from None
    return server, client


def make_reader_context(options: MirrorOptions) -> ssl.SSLContext | None:
    """TLS for who has a token, and no certificate. Raises: ConfigError."""
    contexts = make_contexts(options.tls)
    if contexts is None:
        return None
    contexts[0].verify_mode = ssl.CERT_NONE
    return contexts[0]


def check_openness(options: MirrorOptions, nodes: Iterable[str]) -> None:
    """Raises: ConfigError without a secret, certificates or `insecure`, unless all nodes are on
    this machine."""
    exposed = next((name for name in nodes if not is_loopback(name)), None)
    if options.secret_file is not None or options.tls is not None or exposed is None:
        return
    if not options.insecure:
        raise ConfigError(
            f"nodes: {exposed} is on the network, with neither secret_file nor tls\n"
            "set one of them; or set `insecure: true` if nobody else is on that network"
        )
    LOG.warning(
        "insecure: anyone who reaches this node's port can read everything that its mirror holds"
    )


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _is(found: str | None, expected: str) -> bool:
    return hmac.compare_digest((found or "").encode("utf-8", "replace"), expected.encode())


class _Signatures:
    """Of requests and answers.

    Args:
        secret: None: nothing is signed, and all is accepted, since TLS, or a loopback address, keeps
            others away.
        node: this node's name.
    """

    def __init__(self, secret: bytes | None, node: str) -> None:
        self._secret = secret
        self._node = node

    def _of_request(self, method: str, path: str, headers: Mapping[str, str]) -> str:
        return self._sign("request", method, path, *(headers.get(name, "") for name in _SIGNED))

    def _of_answer(self, request: Mapping[str, str], status: int, body: bytes) -> str:
        return self._sign("answer", request.get(_SIGNATURE, ""), str(status), _digest(body))

    def _sign(self, *parts: str) -> str:
        # As JSON, so that no text can be divided in another way
        text = json.dumps(parts).encode()
        assert self._secret is not None
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


class Signer(_Signatures):
    """Signs this node's requests, and checks their answers."""

    def __init__(self, secret: bytes | None, node: str) -> None:
        super().__init__(secret, node)
        self._client = os.urandom(16).hex()
        self._count = itertools.count(1)

    def sign(self, method: str, path: str, body: bytes, *, to: str, session: str) -> dict[str, str]:
        """The headers of a request.

        Args:
            path: with the query, as it is sent.
            to: the server's name.
            session: the one that `to` has named last, "" before.
        """
        headers = {PROTOCOL_HEADER: str(PROTOCOL), NODE: self._node, _TO: to}
        if self._secret is not None:
            headers |= {_CLIENT: self._client, _COUNT: str(next(self._count)), SESSION: session}
            headers[_BODY] = _digest(body)
            headers[_SIGNATURE] = self._of_request(method, path, headers)
        return headers

    def check_answer(
        self, request: Mapping[str, str], status: int, headers: Mapping[str, str], body: bytes
    ) -> None:
        """Raises: SignatureError unless the node that got the request with these headers has written
        the answer. Refusals (status 401) are not signed."""
        if self._secret is None:
            return
        if not _is(headers.get(ANSWER), self._of_answer(request, status, body)):
            raise SignatureError(f"the answer is not signed by {request[_TO]} {_SAME}")


class Verifier(_Signatures):
    """Checks the requests that come to this node, and signs its answers."""

    def __init__(self, secret: bytes | None, node: str) -> None:
        super().__init__(secret, node)
        self.session = os.urandom(16).hex()
        self._clients: dict[str, tuple[int, int]] = {}
        """Of each asker the highest count, and bits of those that came: bit i is i below. None is
        forgotten: only who has the secret gets here, one for each start of a node."""

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Accept a request before its body is read. Raises: SessionError, SignatureError."""
        for name, own in ((PROTOCOL_HEADER, str(PROTOCOL)), (_TO, self._node)):
            if headers.get(name) != own:
                raise SignatureError(f"{name}: found {headers.get(name)!r}, expected {own!r}")
        if self._secret is None:
            return
        if _SIGNATURE not in headers:
            raise SignatureError(f"the request is not signed {_SAME}")
        if headers.get(SESSION) != self.session:
            raise SessionError
        if not _is(headers.get(_SIGNATURE), self._of_request(method, path, headers)):
            raise SignatureError(f"the request's signature is wrong {_SAME}")
        count = headers.get(_COUNT, "")
        if _COUNTED.fullmatch(count) is None:
            raise SignatureError(f"{_COUNT}: found {count!r}, expected a number")
        self._accept_once(headers.get(_CLIENT, ""), int(count))

    def _accept_once(self, client: str, count: int) -> None:
        highest, bits = self._clients.get(client, (-1, 0))
        behind = highest - count
        if behind >= _WINDOW or (behind >= 0 and bits >> behind & 1):
            raise SignatureError("the request has been received before")
        if behind >= 0:
            bits |= 1 << behind
        else:
            bits = (bits << min(-behind, _WINDOW) | 1) & ((1 << _WINDOW) - 1)
        self._clients[client] = (max(highest, count), bits)

    def check_body(self, headers: Mapping[str, str], body: bytes) -> None:
        """Raises: SignatureError if the body is not the one that was signed."""
        if self._secret is not None and not _is(headers.get(_BODY), _digest(body)):
            raise SignatureError("the request's body is not the one that was signed")

    def sign_answer(self, request: Mapping[str, str], status: int, body: bytes) -> str:
        """The header ANSWER of the answer to an accepted request with these headers."""
        return "" if self._secret is None else self._of_answer(request, status, body)

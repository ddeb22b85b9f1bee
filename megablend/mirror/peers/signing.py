"""Authentication of requests and answers between nodes: by a shared secret, which is never sent, or
by certificates.

A request is signed by the HMAC-SHA256 of its method, its path, its body's digest, the names of
client and server, the server's session and the client's count of requests. An answer is signed by
the HMAC of the request's signature, its own status and its body's digest. A session is a random id
that a server chooses when it starts; so no request is valid at another server, or after a restart.
Within a session each count is accepted once. No clocks are compared. Nothing is encrypted unless
certificates are used.
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
from megablend.system.tls import make_tls_context

SESSION = "Megablend-Session"
"""The header of requests and answers that contains the session of the server."""
ANSWER = "Megablend-Answer"
"""The header of an answer that contains its signature, from `sign_answer`."""
NODE = "Megablend-Node"
PROTOCOL_HEADER = "Megablend-Protocol"
_TO = "Megablend-To"
_CLIENT = "Megablend-Client"
_COUNT = "Megablend-Count"
_BODY = "Megablend-Body"
_SIGNATURE = "Megablend-Signature"
_SIGNED = (PROTOCOL_HEADER, NODE, _TO, _CLIENT, _COUNT, SESSION, _BODY)
_HINT = "(all nodes need the same `secret_file`)"
_COUNT_PATTERN = re.compile("[0-9]{1,18}")
_MIN_SECRET = 16
_WINDOW = 1024
"""A request is refused if its count is lower, by this number or more, than the highest count that
has arrived from the client."""


class SessionError(Exception):
    """Raised if a request was signed for another session of this server, and must be signed
    again."""


class SignatureError(Exception):
    """Raised if a signature of a request or an answer is missing or wrong, or a request is
    repeated."""


def read_secret(options: MirrorOptions) -> bytes | None:
    """Return the secret that all nodes share; None if no secret is set. Raises: see
    `read_token`."""
    path = options.secret_file
    return None if path is None else read_token("secret_file", path)


def read_token(setting: str, path: str) -> bytes:
    """Return the secret in a file that no other user may read. Raises: ConfigError if it is too
    short; the errors of `read_private`."""
    secret = read_private(setting, path).strip()
    if len(secret) < _MIN_SECRET:
        raise ConfigError(
            f"{setting}: {path}: found {len(secret)} bytes, expected at least {_MIN_SECRET}\n"
            "generate one: `openssl rand -hex 32`"
        )
    return secret


def read_private(setting: str, path: str) -> bytes:
    """Return the content of a file that no other user may read. Raises: ConfigError if it cannot be
    read, or other users may read it."""
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
            f"{setting}: {path}: found mode {mode:04o}, expected 0600, since other users can read it\n"
            f"run `chmod 600 {path}`, and replace the file if others have read it"
        )
    return data


def make_contexts(tls: TlsFiles | None) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Make the TLS contexts of a server and of a client; None if TLS is not set. Both require the
    other side to have a certificate that is signed by `ca`. The certificate of a server must name
    its host. Raises: ConfigError if a file cannot be used."""
    if tls is None:
        return None
    read_private("tls: key", tls.key)
    try:
        server = make_tls_context(ssl.Purpose.CLIENT_AUTH, tls.ca)
        client = make_tls_context(ssl.Purpose.SERVER_AUTH, tls.ca)
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
    """Make the TLS context of a server whose clients send a token instead of a certificate; None if
    TLS is not set. Raises: see `make_contexts`."""
    contexts = make_contexts(options.tls)
    if contexts is None:
        return None
    contexts[0].verify_mode = ssl.CERT_NONE
    return contexts[0]


def check_openness(options: MirrorOptions, nodes: Iterable[str]) -> None:
    """Check that only nodes of the cluster can read from this node. Raises: ConfigError if there
    are neither a secret nor certificates, `insecure` is not set, and not all nodes are on this
    machine."""
    exposed = [name for name in nodes if not is_loopback(name)]
    if options.secret_file is not None or options.tls is not None or not exposed:
        return
    if not options.insecure:
        raise ConfigError(
            f"nodes: {exposed[0]} can be reached over the network, but neither secret_file nor tls is set\n"
            "set one of them; or set `insecure: true` if nobody else is on that network"
        )
    LOG.warning(
        "insecure: anyone who reaches this node's port can read all that its mirror holds; set `secret_file` or `tls`"
    )


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _matches(received: str | None, expected: str) -> bool:
    """Compare a signature or a digest with the expected one, in constant time."""
    return hmac.compare_digest((received or "").encode("utf-8", "replace"), expected.encode())


class _Signatures:
    """Computes the signatures of requests and answers.

    Args:
        secret: the secret that all nodes share. If it is None, nothing is signed and everything is
            accepted, since TLS or a loopback address protects the node.
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
        # As JSON, so that different parts never give the same text
        text = json.dumps(parts).encode()
        assert self._secret is not None
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


class Signer(_Signatures):
    """Signs the requests of this node, and checks the answers."""

    def __init__(self, secret: bytes | None, node: str) -> None:
        super().__init__(secret, node)
        self._client = os.urandom(16).hex()
        self._count = itertools.count(1)

    def sign(self, method: str, path: str, body: bytes, *, to: str, session: str) -> dict[str, str]:
        """Return the headers of a request, with its signature.

        Args:
            path: the path with the query, as it is sent.
            to: the server's name.
            session: the last known session of the server; empty if no session is known.
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
        """Check that an answer was signed by the node to which the request was sent. Raises:
        SignatureError.

        Args:
            request: the headers of the request.
            headers: the headers of the answer.
        """
        if self._secret is None:
            return
        if not _matches(headers.get(ANSWER), self._of_answer(request, status, body)):
            raise SignatureError(f"the response is not signed by {request[_TO]} {_HINT}")


class Verifier(_Signatures):
    """Checks the requests that this node receives, and signs the answers."""

    def __init__(self, secret: bytes | None, node: str) -> None:
        super().__init__(secret, node)
        self.session = os.urandom(16).hex()
        self._clients: dict[str, tuple[int, int]] = {}
        """The counts of requests that have arrived, by client: the highest count, and a mask in
        which bit i is set if the highest count minus i has arrived. Clients are never removed,
        since there are few: they must have the secret, and each start of a node makes one
        client."""

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Check a request before its body is read. Raises: SessionError, SignatureError."""
        for name, own in ((PROTOCOL_HEADER, str(PROTOCOL)), (_TO, self._node)):
            if headers.get(name) != own:
                raise SignatureError(f"header {name} is {headers.get(name)!r}, expected {own!r}")
        if self._secret is None:
            return
        if _SIGNATURE not in headers:
            raise SignatureError(f"the request is not signed {_HINT}")
        if headers.get(SESSION) != self.session:
            raise SessionError
        if not _matches(headers.get(_SIGNATURE), self._of_request(method, path, headers)):
            raise SignatureError(f"the request's signature is wrong {_HINT}")
        count = headers.get(_COUNT, "")
        if _COUNT_PATTERN.fullmatch(count) is None:
            raise SignatureError(f"header {_COUNT} is {count!r}, expected a number")
        self._accept_once(headers.get(_CLIENT, ""), int(count))

    def _accept_once(self, client: str, count: int) -> None:
        """Record the count of a request. Raises: SignatureError if this count has arrived before,
        or is too old."""
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
        """Check that the body of a request is the one that was signed. Raises: SignatureError."""
        if self._secret is not None and not _matches(headers.get(_BODY), _digest(body)):
            raise SignatureError("the request's body is not the one that was signed")

    def sign_answer(self, request: Mapping[str, str], status: int, body: bytes) -> str:
        """Return the signature of an answer, which is the value of the header ANSWER.

        Args:
            request: the headers of the request.
        """
        return "" if self._secret is None else self._of_answer(request, status, body)

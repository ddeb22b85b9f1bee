"""Certificates of authorities that state nothing of their key's usage are accepted by each Python."""

import contextlib
import socket
import ssl
import threading

import pytest

from megablend.system.tls import make_tls_context
from tests.mirror.peers.test_signing import Authority, authorities

__all__ = ["authorities"]


def test_an_authority_without_key_usage_is_trusted(
    authorities: tuple[Authority, Authority],
) -> None:
    ours, others = authorities
    tls = ours.issue("IP:127.0.0.1")
    server = make_tls_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tls.certificate, tls.key)

    def shake_hands(context: ssl.SSLContext) -> None:
        asking, answering = socket.socketpair()

        def answer() -> None:
            with answering, contextlib.suppress(OSError):
                server.wrap_socket(answering, server_side=True).close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with asking:
                context.wrap_socket(asking, server_hostname="127.0.0.1").close()
        finally:
            thread.join(timeout=60)

    shake_hands(make_tls_context(ca_file=str(ours.ca)))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(make_tls_context(ca_file=str(others.ca)))
    # What it is for, in any version of Python: the strict context refuses this authority
    strict = make_tls_context(ca_file=str(ours.ca))
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    with pytest.raises(ssl.SSLCertVerificationError, match="key usage"):
        shake_hands(strict)

"""Certificates of authorities that state nothing of their key's usage are accepted by each Python."""

import contextlib
import socket
import ssl
import threading

import pytest

from megablend.system.tls import make_tls_context
from tests.certificates import Authority, authorities

__all__ = ["authorities"]


def test_an_authority_without_key_usage_is_trusted(
    authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = authorities
    make_default = ssl.create_default_context

    def make_strict(purpose: ssl.Purpose, *, cafile: str | None) -> ssl.SSLContext:
        """The default context of Python 3.13, in each version."""
        context = make_default(purpose, cafile=cafile)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", make_strict)
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
    with pytest.raises(ssl.SSLCertVerificationError, match="key usage"):
        shake_hands(make_strict(ssl.Purpose.SERVER_AUTH, cafile=str(ours.ca)))

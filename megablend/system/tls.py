"""TLS contexts that accept the same certificates on every version of Python."""

from __future__ import annotations

import ssl


def make_tls_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, ca_file: str | None = None
) -> ssl.SSLContext:
    """Return Python's default context for a purpose.

    A certificate authority need not state what its key is used for: `openssl req -x509` and many
    private authorities leave that out, and only Python 3.13 and later insist on it by default.

    Args:
        ca_file: the authorities to trust, as a PEM file; None for those of the system.
    Raises: OSError if the file cannot be used.
    """
    context = ssl.create_default_context(purpose, cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context

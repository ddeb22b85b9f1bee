"""Report the state of this service to the service manager, such as systemd."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Report a state, such as READY=1, to the service manager if there is one; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    if address:
        # A manager that does not listen is no reason for the service to end
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(state.encode(), address)

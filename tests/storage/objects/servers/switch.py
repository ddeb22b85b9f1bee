"""A relay in front of a server, which can be switched off."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from urllib.parse import urlsplit


class Switch:
    """Relays connections to the server at `url`; while it is off, they are closed."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        assert target.port is not None
        self._target = (target.hostname, target.port)
        self._is_off = False
        self._open = set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Switch:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.turn_off()
        _shut(self._listener)
        for each in self._threads:
            each.join(30)

    def turn_off(self) -> None:
        self._is_off = True
        for each in list(self._open):
            _shut(each)

    def turn_on(self) -> None:
        self._is_off = False

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,))
                thread.start()
                self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self._is_off:
                return
            with socket.create_connection(self._target) as server:
                self._open |= {client, server}
                answers = threading.Thread(target=_relay, args=(server, client))
                answers.start()
                _relay(client, server)
                answers.join()
                self._open -= {client, server}


def _relay(origin: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := origin.recv(1 << 16):
            target.sendall(data)
    _shut(origin)
    _shut(target)


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)

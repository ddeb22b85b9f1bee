"""A real etcd for tests: a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from megablend.mirror.peers.signing import make_contexts
from megablend.storage.mirror_options import TlsFiles
from tests.storage.objects.servers.start import ending_with_parent, find_ports, unavailable

_START_SECONDS = 60.0


class EtcdServer:
    """One member. It can be stopped, killed, and started again with the same address.

    Args:
        folder: of its data and its log.
        tls: its certificate, which is asked of clients, too.
    """

    def __init__(self, folder: Path, tls: TlsFiles | None = None) -> None:
        found = shutil.which("etcd")
        if found is None:
            unavailable("etcd is not installed (Debian: etcd-server)")
        self._program = found
        self.folder = folder
        self.data = folder / "data"
        self.port, peer_port = find_ports(2)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self._tls = tls
        contexts = make_contexts(tls)
        self.client = None if contexts is None else contexts[1]
        """By which its clients are known."""
        self._peer_url = f"http://127.0.0.1:{peer_port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **environ: str) -> None:
        """Return when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "etcd.log"
        command = [
            self._program,
            f"--data-dir={self.data}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={self._peer_url}",
            f"--initial-advertise-peer-urls={self._peer_url}",
            f"--initial-cluster=default={self._peer_url}",
        ]
        if self._tls is not None:
            command += [
                f"--cert-file={self._tls.certificate}",
                f"--key-file={self._tls.key}",
                f"--trusted-ca-file={self._tls.ca}",
                "--client-cert-auth",
            ]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ending_with_parent(command),
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **environ},
            )
        end = time.monotonic() + _START_SECONDS
        while not self._is_healthy():
            said = log.read_text(errors="replace")[-500:]
            if self._process.poll() is not None or time.monotonic() > end:
                unavailable(f"etcd did not start: {said}")
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"{self.url}/health", timeout=2, context=self.client
            ) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def send(self, number: int) -> None:
        """SIGSTOP, SIGCONT."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End it; its data stay."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=500)
            self._process = None

    def lose_data(self) -> None:
        """After `stop`: as if its disk were new."""
        shutil.rmtree(self.data)

"""Certificates of authorities of the tests' own, made by `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megablend.storage.mirror_options import TlsFiles


class Authority:
    """Makes certificates by `openssl`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        folder.mkdir()
        self._make(self.ca, folder / "ca.key", "-subj", "/CN=authority")

    def issue(self, *names: str, subject: str = "/CN=node") -> TlsFiles:
        """The files of a node with these names (`IP:127.0.0.1`)."""
        place = self.folder / f"node{len(list(self.folder.iterdir()))}"
        certificate = place.with_suffix(".pem")
        key = place.with_suffix(".key")
        signed = ["-CA", str(self.ca), "-CAkey", str(self.folder / "ca.key")]
        extension = ["-addext", f"subjectAltName={','.join(names)}"]
        leaf = ["-addext", "basicConstraints=critical,CA:FALSE"]
        self._make(certificate, key, "-subj", subject, *signed, *extension, *leaf)
        return TlsFiles(certificate=str(certificate), key=str(key), ca=str(self.ca))

    def _make(self, certificate: Path, key: Path, *more: str) -> None:
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        files = ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*command.split(), *files, *more], check=True, capture_output=True)
        key.chmod(0o600)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl: no certificate is tried between nodes")
    folder = tmp_path_factory.mktemp("tls")
    return Authority(folder / "ours"), Authority(folder / "others")

"""Profiles of ~/.aws, read by botocore: keys of a file, of a command, and of single sign-on (whose server is an imitation)."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from megablend.errors import ConfigError
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.answers import JsonHandler
from tests.storage.objects.servers.start import unavailable

pytestmark = pytest.mark.usefixtures("obstore")
START_URL = "https://sign.in.invalid/start"
CONFIG = f"""
[profile command]
credential_process = echo '{{"Version": 1, "AccessKeyId": "COMMANDKEY", "SecretAccessKey": "s"}}'
[profile signed-in]
sso_start_url = {START_URL}
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = reader
[profile empty]
region = us-east-1
"""


class SignOnServer(JsonHandler):
    """Gives the keys of a role to whoever has signed in."""

    def answer(self) -> object:
        assert self.path.startswith("/federation/credentials?")
        assert self.headers["x-amz-sso_bearer_token"] == "signed-in-token"
        keys = {"accessKeyId": "ROLEKEY", "secretAccessKey": "s", "sessionToken": "t"}
        return {"roleCredentials": keys | {"expiration": int((time.time() + 3600) * 1000)}}


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    try:
        from botocore.credentials import SSOProvider
    except ImportError:
        unavailable("botocore is not installed")
    cache = tmp_path / ".aws/sso/cache"
    # Else below the first test's HOME
    monkeypatch.setattr(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(cache))
    cache.mkdir(parents=True)
    # Found when botocore was imported
    monkeypatch.setattr(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(cache))
    token = {
        "accessToken": "signed-in-token",
        "expiresAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600)),
    }
    (cache / f"{hashlib.sha1(START_URL.encode()).hexdigest()}.json").write_text(
        json.dumps(token | {"startUrl": START_URL})
    )
    (tmp_path / ".aws/config").write_text(CONFIG)
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = DEFAULTKEY\naws_secret_access_key = s\n"
        "[file]\naws_access_key_id = FILEKEY\naws_secret_access_key = s\n"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), SignOnServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / ".aws/config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / ".aws/credentials"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def find_key(source: FaultySource, **settings: object) -> str:
    """The access key that a read is signed with."""
    storage = make_storage(objects=parse_options({"s3://b": {"endpoint": source.url, **settings}}))
    assert storage.read("s3://b/x", 0, 4) == b"0123"
    return source.headers[-1]["authorization"].split("Credential=")[1].split("/")[0]


@pytest.mark.parametrize(
    ("profile", "key"),
    [
        (None, "DEFAULTKEY"),
        ("file", "FILEKEY"),
        ("command", "COMMANDKEY"),
        ("signed-in", "ROLEKEY"),
    ],
)
def test_requests_are_signed_with_the_keys_of_a_profile(
    profiles: None, profile: str | None, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultySource({"b/x": b"0123"}) as source:
        assert find_key(source, **({"profile": profile} if profile else {})) == key
        if profile is not None:
            monkeypatch.setenv("AWS_PROFILE", profile)
            assert find_key(source, region="another") == key


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("missing", "profile 'missing': not found in ~/.aws/config or ~/.aws/credentials"),
        (
            "empty",
            "profile 'empty' of ~/.aws contains no credentials; add them .*, or choose another profile",
        ),
    ],
)
def test_a_profile_without_keys_is_named(profiles: None, profile: str, message: str) -> None:
    with FaultySource({"b/x": b"0123"}) as source, pytest.raises(ConfigError, match=message):
        find_key(source, profile=profile)

"""Profiles of ~/.aws, read by botocore: keys of a file, of a command, and of single sign-on (whose server is an imitation)."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import traceback
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from megablend.errors import ConfigError, DataError
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
[profile of-a-missing-one]
role_arn = arn:aws:iam::123456789012:role/reader
source_profile = gone
[profile of-nobody]
credential_process = /no/such/program canary
[profile failing]
credential_process = sh -c 'echo canary >&2; exit 1'
[profile of-a-list]
credential_process = echo '["canary"]'
[profile of-two-lines]
credential_process = echo '{{"Version": 1, "AccessKeyId": "KEY\\n", "SecretAccessKey": "canary"}}'
[profile of-a-device]
role_arn = arn:aws:iam::123456789012:role/reader
source_profile = file
mfa_serial = arn:aws:iam::123456789012:mfa/someone
[profile refused]
role_arn = arn:aws:iam::123456789012:role/reader
source_profile = file
region = us-east-1
[profile signed-out]
sso_session = over
sso_account_id = 123456789012
sso_role_name = reader
[sso-session over]
sso_region = us-east-1
sso_start_url = {START_URL}
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
        "[half]\naws_access_key_id = HALFKEY\n"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), SignOnServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / ".aws/config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / ".aws/credentials"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")
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


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("half", "PartialCredentialsError: .*missing: aws_secret_access_key"),
        ("of-a-missing-one", '.*The source_profile "gone" referenced in the profile .* does not'),
        ("of-nobody", "FileNotFoundError"),
        ("failing", "CredentialRetrievalError"),
        ("of-a-list", "AttributeError"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named_without_what_its_program_prints(
    profiles: None, profile: str, message: str
) -> None:
    with FaultySource({"b/x": b"0123"}) as source, pytest.raises(ConfigError) as caught:
        find_key(source, profile=profile)
    assert re.search(rf"profile '{profile}' of .*/\.aws/config.*\({message}", str(caught.value))
    assert "canary" not in "".join(traceback.format_exception(caught.value))


def test_a_file_of_profiles_that_cannot_be_parsed_is_named(profiles: None, tmp_path: Path) -> None:
    broken = tmp_path / ".aws/credentials"
    broken.write_text("aws_secret_access_key = canary\n")
    with FaultySource({"b/x": b"0123"}) as source, pytest.raises(ConfigError) as caught:
        find_key(source)
    assert f"Unable to parse config file: {broken}" in str(caught.value)
    assert "canary" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (
            "signed-out",
            r"profile 'signed-out' of .*\(SSOTokenLoadError: .*run `aws sso login --profile signed-out`",
        ),
        (
            "refused",
            r"profile 'refused' of .*\(.*; correct the profile until `aws sts get-caller-identity --profile refused`",
        ),
        ("of-two-lines", "profile 'of-two-lines' of .*: a key has a line break"),
        (
            "of-a-device",
            r"profile 'of-a-device' of .*(mfa_serial|MFA token).*; run `aws configure export-credentials --profile of-a-device",
        ),
    ],
)
def test_keys_that_a_profile_does_not_give_are_named_while_reading(
    profiles: None, profile: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for reads in ("_raw_input", "fallback_getpass"):  # with a terminal, and without
        monkeypatch.setattr(f"getpass.{reads}", lambda *given, **_: asked.append(given))
    with FaultySource({"b/x": b"0123"}) as source, pytest.raises(DataError, match=message):
        find_key(source, profile=profile, give_up_after=1)
    assert asked == []  # a job has nobody who would answer

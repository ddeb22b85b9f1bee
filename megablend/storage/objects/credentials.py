"""Credentials of S3 that obstore does not find by itself: profiles and single sign-on of ~/.aws,
through botocore.

obstore finds all other credentials by itself: keys in the environment, web identities, credentials
of containers and instances, and all credentials of Google and Azure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NoReturn

from megablend.errors import ConfigError
from megablend.system.log import LOG

_FOUND_BY_OBSTORE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Environment variables of credentials that obstore finds by itself."""
_ASSUMED_LIFETIME = timedelta(minutes=6)
"""The lifetime that is reported to obstore for all credentials. Since obstore asks for new
credentials 5 minutes before they expire, it asks once a minute. botocore returns them from memory
until they really expire."""
_REMEDY = "cannot be read without botocore; install it (`pip install botocore`), or"
_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
Provider = Callable[[], Awaitable[dict[str, Any]]]


def find_provider(profile: str | None) -> Provider | None:
    """Return a function that gets credentials from botocore; None if obstore finds credentials by
    itself.

    Raises: ConfigError if a requested profile cannot be read.
    """
    named = profile or os.environ.get("AWS_PROFILE")
    if named is None:
        is_found = any(os.environ.get(variable) for variable in _FOUND_BY_OBSTORE)
        if is_found or not _find_files():
            return None
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        if named is None:
            LOG.warning("credentials in ~/.aws %s %s", _REMEDY, _KEYS)
            return None
        where = "`profile`" if profile else "AWS_PROFILE"
        raise ConfigError(
            f"profile {named!r}: its credentials in ~/.aws {_REMEDY} remove {where} and {_KEYS}"
        ) from None
    try:
        with _naming_profile(named):
            session = botocore.session.Session(profile=named)
            roles = session.get_component("credential_provider").get_provider("assume-role")
            roles._prompter = _refuse_prompt
            credentials = session.get_credentials()
    except botocore.exceptions.ProfileNotFound:
        raise ConfigError(
            f"profile {named!r}: not found in ~/.aws/config or ~/.aws/credentials; add it, or choose another profile"
        ) from None
    if credentials is None:
        if named is None:
            return None
        raise ConfigError(
            f"profile {named!r} of ~/.aws contains no credentials; add them (`aws configure --profile {named}`), or "
            "choose another profile"
        )

    async def provide() -> dict[str, Any]:
        with _naming_profile(named):
            frozen = await asyncio.to_thread(credentials.get_frozen_credentials)
            if has_control_character(f"{frozen.access_key}{frozen.token}"):
                raise botocore.exceptions.InvalidConfigError(error_msg="a key has a line break")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + _ASSUMED_LIFETIME,
        }

    return provide


@contextlib.contextmanager
def _naming_profile(named: str | None) -> Iterator[None]:
    """Turn errors of botocore into a ConfigError that names the profile and its files.

    botocore may run other programs, whose output may contain secrets. So only botocore's own error
    messages are shown. Raises: ConfigError, ProfileNotFound.
    """
    from botocore.exceptions import BotoCoreError, CredentialRetrievalError, ProfileNotFound

    try:
        yield
    except ProfileNotFound:
        raise
    except Exception as error:  # any class, if a program's output is malformed
        is_shown = isinstance(error, BotoCoreError) and not isinstance(
            error, CredentialRetrievalError
        )
        cause = f"{type(error).__name__}: {error}" if is_shown else type(error).__name__
        profile = named or "default"
        remedy = (
            f"correct the profile until `aws sts get-caller-identity --profile {profile}` succeeds"
        )
        if "mfa_serial" in cause or "MFA token" in cause:
            remedy = (
                f"run `aws configure export-credentials --profile {profile} --format env`, set the keys that it prints, and "
                "remove `profile` or AWS_PROFILE"
            )
        if "SSO Token" in cause or "from sso" in cause or "SSO session" in cause:
            remedy = f"run `aws sso login --profile {profile}`"
        raise ConfigError(
            f"profile {profile!r} of {' and '.join(_find_files())}: its credentials cannot be used ({cause})\n{remedy}"
        ) from None


def _refuse_prompt(prompt: str) -> NoReturn:
    """Refuse to ask for the code of a device: a job has nobody who would type it."""
    from botocore.exceptions import InvalidConfigError

    raise InvalidConfigError(error_msg="a job cannot ask for the code that mfa_serial needs")


def has_control_character(text: str) -> bool:
    """Return whether a text has a character that is not allowed in headers. The client would panic
    on it."""
    return any(character < " " or character == "\x7f" for character in text)


def _find_files() -> list[str]:
    """Return the paths of the existing files that may contain profiles."""
    names = (
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        ("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    paths = (Path(os.environ.get(name) or default).expanduser() for name, default in names)
    return [str(path) for path in paths if path.is_file()]

"""Translate the client's errors into failures, which decide whether a request is tried again and
what the error message says.

The client's messages contain whole URLs, whose query may be a signature, and responses of servers,
which may repeat keys. Therefore only known codes from these messages are shown.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from urllib.parse import unquote


class Kind(Enum):
    """The kind of a failure, which decides whether the request is tried again."""

    AGAIN = "again"
    """The request is tried again: the source failed, or a connection broke."""
    BUSY = "busy"
    """The source is busy: the request is tried again, and fewer requests are sent."""
    CONNECT = "connect"
    """There is no connection: the request is tried again, but not for long if the source has never
    responded."""
    EXPIRED = "expired"
    """The credentials have expired, but new ones may become available."""
    CHANGED = "changed"
    """The object has another version now: the request is tried a few times, since a proxy may say
    so in passing."""
    CONFLICT = "conflict"
    """Another request is changing the object, or a proxy says so: the request is tried a few
    times."""
    MISSING = "missing"
    """There is no such object."""
    EMPTY = "empty"
    """The object has none of the requested bytes."""
    NO_RANGES = "no ranges"
    """The server responds with the whole object, which may be empty, instead of a range."""
    UNUSABLE = "unusable"
    """The response cannot be used: the request is tried a few times, since a proxy may have sent the
    response."""
    REFUSED = "refused"
    """The request is refused, and further attempts would be refused too."""
    BAD_KEY = "bad key"
    """The client cannot request an object with this name."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the client, without anything that may be secret."""

    kind: Kind
    cause: str
    remedy: str
    pause: float = 0.0
    """The length in seconds of the pause that the source asks for."""


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_DELETION = re.compile(r'source: DeleteFailed \{.*?\bcode: "([A-Za-z0-9.]{1,64})"', re.DOTALL)
"""Matches the client's description of an object that was not deleted. It has a code or status of
its own, although the response is HTTP 200."""
_NO_BYTES = re.compile(r'CONTENT_RANGE header: "bytes [^"]*/0"')
"""Matches a header of the response to a request for a range of an empty object."""
_BAD_TIME = "source: InvalidLastModified {"
"""Part of the client's message about a response whose Last-Modified header is not a time."""
_COPY = "use a server that does, or copy the file"
_UNUSABLE_RESPONSES = (
    (
        "MissingContentLength",
        "the server's responses have no Content-Length",
        _COPY.replace("does", "sends it"),
    ),
    (
        "NoContentRange",
        "the server's responses have no Content-Range",
        _COPY.replace("does", "sends it"),
    ),
    (
        "ParseContentRange",
        "the server's responses do not say how large the file is (Content-Range)",
        _COPY,
    ),
    (
        "UnexpectedRange",
        "the server responds with bytes other than those requested",
        _COPY.replace("does", "sends the requested ones"),
    ),
)
"""Responses that cannot be used, each as a word of the client's description, the cause for the
message, and the remedy."""
_SIGNED = re.compile(r"[?&](se|Expires|X-(?:Amz|Goog)-(?:Date|Expires))=([^&\s,]+)")
"""Matches the parameters of a signed URL that say how long it is valid."""
_EXPIRY = re.compile(r"Expiry \[([^\]]{1,40})\]")
"""Matches the same in Azure's response."""
_TOKENS = ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN")
"""Environment variables of queries that sign URLs of Azure."""
_NAMES = re.compile(r"https?://\S+|\"[^\"\n]*/[^\"\n]*\"")
"""Matches URLs and keys, which may contain any word."""
_METADATA = re.compile(
    r"/latest/api/token|/latest/meta-data|/computeMetadata/v1|/metadata/identity/oauth2"
)
"""Matches the URLs from which machines of a cloud get their credentials."""
_PROFILE = re.compile(r"credential provider: ConfigError: (.+)\n(.+)")
"""Matches the message of `credentials` about a profile whose credentials cannot be fetched, and the
remedy."""
_BUSY = {"408", "425", "429", "502", "503", "504"}
"""HTTP statuses of a busy source."""
_CLOCK = "set the clock of this machine"
_KEYS = "check the credentials in the environment (access key, secret and session token must belong together)"
_EXPIRED = "renew the credentials; those of roles and profiles are refreshed automatically"
READ_ACCESS = "grant these credentials read access (and list access, for patterns), or set `anonymous: true` for public data"
_DELETE_ACCESS = "grant these credentials permission to delete it, and remove any lock on it"
_REGION = "set `region` of this prefix under `storage`, or AWS_REGION"
_CODES = {
    "NoSuchBucket": (
        Kind.REFUSED,
        "there is no such bucket",
        "check its name, `endpoint` and `region`",
    ),
    "ContainerNotFound": (
        Kind.REFUSED,
        "there is no such container",
        "check its name and the account",
    ),
    "InvalidBucketName": (Kind.REFUSED, "this is not a valid bucket name", "correct it"),
    "ExpiredToken": (Kind.EXPIRED, "the credentials have expired", _EXPIRED),
    "ExpiredTokenException": (Kind.EXPIRED, "the credentials have expired", _EXPIRED),
    "TokenRefreshRequired": (Kind.EXPIRED, "the credentials have expired", _EXPIRED),
    "InvalidToken": (Kind.REFUSED, "the session token is not valid", _KEYS),
    "InvalidAccessKeyId": (Kind.REFUSED, "the access key does not exist", _KEYS),
    "SignatureDoesNotMatch": (Kind.REFUSED, "the secret key is wrong", _KEYS),
    "AuthenticationFailed": (Kind.REFUSED, "the account key or token is wrong", _KEYS),
    "RequestTimeTooSkewed": (
        Kind.REFUSED,
        "the clocks of this machine and the store differ",
        _CLOCK,
    ),
    "AuthorizationHeaderMalformed": (Kind.REFUSED, "the bucket is in another region", _REGION),
    "PermanentRedirect": (Kind.REFUSED, "the bucket is in another region", _REGION),
    "AccessDenied": (Kind.REFUSED, "access is denied", READ_ACCESS),
    "SlowDown": (Kind.BUSY, "the store asks for fewer requests", ""),
    "ServiceUnavailable": (Kind.BUSY, "the source is busy", ""),
    "RequestTimeout": (Kind.AGAIN, "the store waited too long for the request", ""),
    "InternalError": (Kind.AGAIN, "the source failed", ""),
    "ConditionalRequestConflict": (Kind.AGAIN, "another request was changing the object", ""),
    "OperationAborted": (Kind.AGAIN, "another request was changing the object", ""),
    "InvalidObjectState": (
        Kind.REFUSED,
        "the object is archived",
        "restore it from the archive first",
    ),
}
"""The kind, cause and remedy of a failure, by the code in the store's response."""
_STATUSES = {
    "400": (
        Kind.REFUSED,
        "the store refuses the request",
        "check the location, `endpoint` and `region`",
    ),
    "401": (Kind.REFUSED, "the store asks for credentials", _KEYS),
    "403": (Kind.REFUSED, "access is denied", READ_ACCESS),
    "404": (Kind.MISSING, "no such object", ""),
    "410": (Kind.MISSING, "no such object", ""),
    "412": (Kind.CHANGED, "was replaced", ""),
    "416": (Kind.EMPTY, "the object ends before the requested bytes", ""),
}
"""The kind, cause and remedy of a failure, by the HTTP status."""
_NO_CREDENTIALS = Failure(
    Kind.CONNECT,
    "no credentials were found",
    "set them in the environment; or set `anonymous: true` for public data",
)
_WRITE_FAILURES = {
    Kind.MISSING: Failure(
        Kind.UNUSABLE,
        "there is no such bucket, or uploaded parts are gone",
        "check the bucket, and run the command again",
    ),
    Kind.CHANGED: Failure(
        Kind.REFUSED,
        "the store refuses to replace or remove the object (HTTP 412)",
        "end any lease or lock on it, or run the command again",
    ),
}
"""The failures of unconditional requests that write or remove an object, by the kind of failure
that the same response would mean for a read. Uploaded parts are also gone if they were joined but
the response was lost."""
_BROKEN = Failure(Kind.AGAIN, "the connection broke", "")
_BROKEN_WRITE = Failure(
    Kind.AGAIN,
    "the connection broke during a write, as happens when a server refuses a write without responding",
    "check the write permission and the quota of the bucket, then the network and the size limit of any proxy",
)

_CONNECTION_FAILURES = (
    (
        ("toomanyredirects",),
        Failure(
            Kind.REFUSED,
            "the server redirects in a loop",
            "check the location, and whether it needs a login",
        ),
    ),
    (
        ("causedasendentity",),
        Failure(
            Kind.CONNECT,
            "the server's TLS certificate is a CA certificate (CA:TRUE)",
            "give the server a certificate of its own, signed by that CA, and set `ca_file` to the "
            "CA's PEM file",
        ),
    ),
    (
        ("certificate", "unknownissuer"),
        Failure(
            Kind.CONNECT,
            "the server's TLS certificate is not trusted",
            "set `ca_file` to the PEM file of the authority that signed it, or correct `endpoint`",
        ),
    ),
    (
        ("alertreceived",),
        Failure(
            Kind.CONNECT,
            "the server refuses the TLS connection",
            "check the server's name in the location or `endpoint`, and the TLS settings of the server",
        ),
    ),
    (
        ("dns error",),
        Failure(
            Kind.CONNECT,
            "the server's name cannot be resolved",
            "check the name in the location, `endpoint` and `region`",
        ),
    ),
    (
        ("invalidmessage", "corrupt message"),
        Failure(
            Kind.CONNECT,
            "the server does not speak TLS on this port",
            "check `http` or `https` in `endpoint`",
        ),
    ),
    (
        ("tunnel", "proxy"),
        Failure(
            Kind.CONNECT,
            "the proxy does not connect",
            "check `proxy` or HTTPS_PROXY, HTTP_PROXY and NO_PROXY",
        ),
    ),
    (
        ("builder error", "url scheme is not allowed", "badscheme"),
        Failure(
            Kind.REFUSED,
            "the server redirects from https:// to http://, or to a URL of another scheme, and such redirects are not followed",
            "check the location and `endpoint`",
        ),
    ),
    (
        ("token file",),
        Failure(
            Kind.CONNECT,
            "the token file cannot be read",
            "check AWS_WEB_IDENTITY_TOKEN_FILE or AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        ),
    ),
    (("credential", "unauthenticatederror"), _NO_CREDENTIALS),
    (
        ("kind: connect", "tcp connect error"),
        Failure(
            Kind.CONNECT, "no connection to the server", "check `endpoint`, `proxy` and the network"
        ),
    ),
)
"""Failures without a status, each with some words in lower case. An error is this failure if its
name is one of the words, or its description contains one of them."""


def read_failure(error: BaseException, *, is_write: bool = False) -> Failure:
    """Return the Failure for an exception of obstore or of its credentials.

    Args:
        is_write: whether the request writes or removes an object.
    """
    failure = _read_failure(error)
    if not is_write:
        return failure
    return _BROKEN_WRITE if failure == _BROKEN else _WRITE_FAILURES.get(failure.kind, failure)


def _read_failure(error: BaseException) -> Failure:
    text = str(error)
    name = type(error).__name__
    profile = _PROFILE.search(text)
    if profile is not None:
        failure_kind = Kind.EXPIRED if "aws sso login" in profile[2] else Kind.CONNECT
        return Failure(failure_kind, profile[1], profile[2])
    if _METADATA.search(text):  # any response from a cloud's own address for credentials
        return _NO_CREDENTIALS
    deletion = _DELETION.search(text)
    status = _STATUS.search(text)
    if status is not None and status[1] in ("400", "401", "403"):
        expiry = _find_expiry(text)
        if expiry is not None:
            return Failure(
                Kind.REFUSED,
                f"the URL's signature expired at {expiry:%Y-%m-%d %H:%M:%S} UTC",
                "sign it again, and set the new URL or token",
            )
    match = deletion or _CODE.search(text)
    code = match[1] if match else ""
    if code in _CODES:
        failure_kind, cause, remedy = _CODES[code]
        return Failure(failure_kind, f"{cause} ({code})", remedy)
    if deletion is not None and code.isdigit():  # on Azure
        return _of_status(code, "", text)
    if deletion is not None:
        return Failure(
            Kind.REFUSED, f"the store did not remove the object ({code})", _DELETE_ACCESS
        )
    if status is not None:
        return _of_status(status[1], code, text)
    if isinstance(error, FileNotFoundError):
        return Failure(*_STATUSES["404"])
    if "redirect without LOCATION" in text:
        return Failure(
            Kind.REFUSED,
            "the server redirects without saying where, as stores do for a bucket of another region",
            f"{_REGION}; for a web server, check the location",
        )
    if name == "NotSupportedError" or "non-partial response" in text:
        return Failure(
            Kind.NO_RANGES,
            "the server does not support byte-range requests",
            _COPY,
        )
    key = find_bad_key(error)
    if key is not None:
        return Failure(
            Kind.BAD_KEY,
            f"the object {key} has an empty part, `.` or `..` between slashes",
            "remove it; if it is needed, copy it to another key first",
        )
    if _BAD_TIME in text:
        return Failure(
            Kind.REFUSED,
            "the server's response has a Last-Modified header that is not a time",
            "correct the server's clock or settings, or remove the header",
        )
    if _NO_BYTES.search(text):
        return Failure(*_STATUSES["416"])
    description = _NAMES.sub("", text)
    for word, cause, remedy in _UNUSABLE_RESPONSES:
        if word in description:
            return Failure(Kind.UNUSABLE, cause, remedy)
    return _of_connection(text, name)


def find_bad_key(error: BaseException) -> str | None:
    """Return the key that made a LIST request fail because the client cannot represent the key;
    None if the request failed for another reason."""
    match = re.search(
        r'Path "([^"]*)" contained empty path segment|Error parsing Path "([^"]*)"', str(error)
    )
    return (match[1] or match[2]) if match else None


def _find_expiry(text: str) -> datetime | None:
    """Return the time at which the signature of the URL in a message has expired; None if it has
    not, or the message does not say so."""
    if " REDACTED in " in text:  # the client hides URLs with Azure's tokens
        text += "".join(f"?{os.environ.get(name, '')}" for name in _TOKENS)
    signed = {name.replace("Goog", "Amz"): unquote(value) for name, value in _SIGNED.findall(text)}
    said = _EXPIRY.search(text)
    try:
        if "se" in signed:
            expiry = datetime.fromisoformat(signed["se"].replace("Z", "+00:00"))
        elif "X-Amz-Date" in signed:
            begin = datetime.strptime(signed["X-Amz-Date"], "%Y%m%dT%H%M%S%z")
            expiry = begin + timedelta(seconds=int(signed["X-Amz-Expires"]))
        elif "Expires" in signed:
            expiry = datetime.fromtimestamp(int(signed["Expires"]), timezone.utc)
        elif said is not None:
            expiry = datetime.strptime(said[1], "%a, %d %b %Y %H:%M:%S GMT")
        else:
            return None
    except (KeyError, OverflowError, ValueError):
        return None
    expiry = expiry.replace(tzinfo=expiry.tzinfo or timezone.utc)
    return expiry if expiry < datetime.now(timezone.utc) else None


def _of_status(status: str, code: str, text: str) -> Failure:
    """Return the failure for an HTTP status."""
    shown = f"HTTP {status}{f', {code}' if code else ''}"
    if status == "407":
        return Failure(
            Kind.REFUSED, f"the proxy asks for credentials ({shown})", "set them in HTTPS_PROXY"
        )
    if status in _STATUSES:
        kind, cause, remedy = _STATUSES[status]
        return Failure(kind, f"{cause} ({shown})" if kind is Kind.REFUSED else cause, remedy)
    if status in _BUSY:
        return Failure(Kind.BUSY, f"the source is busy ({shown})", "")
    if status.startswith("5"):
        return Failure(Kind.AGAIN, f"the source failed ({shown})", "")
    kind = Kind.CONFLICT if status == "409" else Kind.REFUSED
    return Failure(kind, f"the server responded with {shown}", "check the location and `endpoint`")


def _of_connection(text: str, name: str) -> Failure:
    """Return the failure for an error without a status: an error of the connection or of
    credentials."""
    description = _NAMES.sub("", text).lower()
    for words, failure in _CONNECTION_FAILURES:
        if name.lower() in words or any(word in description for word in words):
            return failure
    return _BROKEN

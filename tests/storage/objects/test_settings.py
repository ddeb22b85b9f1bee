"""Settings of object stores: the client is missing, credentials in configs, secrets that are shown nowhere."""

from __future__ import annotations

import logging
import os
import pickle
import sys

import pytest

from megablend.errors import ConfigError
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import find_options, parse_options
from tests.storage.objects.conftest import S3Server


def test_without_the_client_one_line_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        ConfigError,
        match=r"^s3://b/x: reading object stores needs obstore: install megablend\[objects\]",
    ):
        make_storage().stat("s3://b/x")


@pytest.mark.parametrize("prefix", ["s3://bucket", "S3://bucket"])
@pytest.mark.parametrize("location", ["s3://bucket/a", "S3://bucket/a"])
def test_schemes_in_capitals_are_the_same(prefix: str, location: str) -> None:
    options = parse_options({prefix: {"endpoint": "http://127.0.0.1:1"}})
    assert find_options(options, location).endpoint == "http://127.0.0.1:1"
    assert find_options(options, location.replace("bucket", "Bucket")).endpoint is None


def test_credentials_and_unknown_settings_are_refused_in_configs() -> None:
    for settings, message in (
        ({"secret_access_key": "x"}, "credentials do not belong in configs"),
        ({"endpont": "http://x"}, "unknown setting; did you mean 'endpoint'"),
        ({"endpoint": "http://u:p@h"}, "contains a user or password"),
        ({"endpoint": "http://u:p/w@h"}, "contains a user or password"),
        ({"endpoint": "h:80"}, "expected a URL"),
        ({"endpoint": "http://10.0.0.256:80"}, "expected a URL"),
        ({"endpoint": "http://h.1"}, "expected a URL"),
        ({"endpoint": "http://h.0x1f/"}, "expected a URL"),
        ({"read_timeout": 0}, r"expected a number above 0 \(seconds\)"),
        ({"max_requests": 0}, r"expected a number above 0 \(requests\)"),
        ({"anonymous": "yes"}, "expected true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_options({"s3://b": settings})
    with pytest.raises(ValueError, match=r"b: expected a URL prefix such as s3://bucket/"):
        parse_options({"b": {}})


@pytest.mark.usefixtures("obstore")
@pytest.mark.parametrize("host", ["127.0.0.1:9", "[::1]:9"])
def test_a_bucket_is_not_put_before_an_address(host: str) -> None:
    """The client would panic at each request."""
    settings = {"endpoint": f"http://{host}", "path_style": False, "give_up_after": 1}
    storage = make_storage(objects=parse_options({"s3://b": settings}))
    with pytest.raises(ConfigError, match=r"^s3://b: found `path_style: false`.* an IP address\n"):
        storage.find("s3://b/x")


def test_a_secret_is_in_no_pickle_repr_or_log(
    swift: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    swift.admin.make_bucket_if_missing("failures")
    swift.admin.put("failures", "a", b"0123")
    with caplog.at_level(logging.DEBUG):
        storage = make_storage()
        assert storage.read("s3://failures/a", 0, 4) == b"0123"
    for shown in (
        repr(storage),
        str(vars(storage)),
        pickle.dumps(storage).decode("latin-1"),
        caplog.text,
    ):
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in shown

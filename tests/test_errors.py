"""Messages of errors."""

from __future__ import annotations

import pickle

import pytest

from megablend.errors import ConfigError, MissingFileError, did_you_mean


@pytest.mark.parametrize(
    "url", ["ftp://me:hush@host/x", "ftp://:hu/s?h@host/x", "a:/me:1hu@sh@h/x"]
)
def test_no_message_shows_a_password(url: str) -> None:
    for error in (ConfigError(f"found '{url}', expected s3://"), MissingFileError(url, "is gone")):
        for each in (error, pickle.loads(pickle.dumps(error))):
            assert "/...@h" in str(each)
            assert "hu" not in str(each)


@pytest.mark.parametrize(
    "url", ["s3://b/a:b/c@d", "http://host:80/a@b", "http://[::1]:80/x", "az://c/a@b?c:d@e"]
)
def test_what_is_no_password_is_shown(url: str) -> None:
    assert str(ConfigError(f"{url}: is gone")) == f"{url}: is gone"


def test_a_name_that_begins_with_what_was_given_is_suggested_first() -> None:
    nodes = [f"node{i}:7171" for i in range(4)]
    for i in range(4):
        assert did_you_mean(f"node{i}", nodes) == f"did you mean 'node{i}:7171'?"
    assert did_you_mean("nod3:7171", nodes) == "did you mean 'node3:7171'?"
    assert did_you_mean("x", nodes) == ""

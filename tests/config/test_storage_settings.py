"""Settings of object stores without a config: given as keys, in a file, or in the file that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megablend.config import load_config
from megablend.config.storage_settings import load_storage_settings
from megablend.errors import ConfigError
from megablend.storage.store_options import find_options
from tests.runs import make_config

YAML = """\
storage:
  s3://: {region: eu-west-1}
  s3://b/: {endpoint: "http://h:80", ca_file: keys/ca.pem}
"""


def write(folder: Path, text: str = YAML) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_keys_a_file_and_the_environment_give_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGABLEND_STORAGE", raising=False)
    assert load_storage_settings().by_prefix == ()
    keys = {
        "s3://": {"region": "eu-west-1"},
        "s3://b/": {"endpoint": "http://h:80", "ca_file": "keys/ca.pem"},
    }
    path = write(tmp_path)
    monkeypatch.setenv("MEGABLEND_STORAGE", str(path))
    elsewhere = load_storage_settings(keys)
    monkeypatch.chdir(tmp_path)
    found = [load_storage_settings(each) for each in (keys, path, str(path), "settings.yaml", None)]
    assert found == [found[0]] * 5 != [elsewhere] * 5
    chosen = find_options(found[0], "s3://b/x")
    assert (chosen.region, chosen.endpoint, chosen.ca_file) == (
        "eu-west-1",
        "http://h:80",
        str(tmp_path / "keys/ca.pem"),
    )
    assert load_storage_settings(found[0]) == found[0]


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert find_options(load_storage_settings(path), "s3://a/x").region == "eu-west-1"
    path.write_text("storage: {'s3://': {region: us-west-2}}")
    os.utime(path, (1, 1))
    assert find_options(load_storage_settings(path), "s3://a/x").region == "us-west-2"


def test_the_path_of_a_certificate_is_relative_to_the_config(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, [{"name": "a", "path": "s3://b/*.parquet", "column": "x", "weight": 1}], samples=1
    )
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "config.yaml"
    file.write_text(
        str(
            config
            | {"storage": {"s3://": {"ca_file": "ca.pem"}, "https://": {"ca_file": "~/ca.pem"}}}
        )
    )
    options = load_config(file).storage
    assert find_options(options, "s3://b/x").ca_file == str(tmp_path / "sub/ca.pem")
    assert find_options(options, "https://h/x").ca_file == str(Path("~/ca.pem").expanduser())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "a: 1",
            r"settings.yaml: has no key `storage`; expected URL prefixes under it, each with its settings",
        ),
        (
            "storage: 3",
            r"settings.yaml:1: storage: found 3, expected URL prefixes, each with its settings",
        ),
        (
            "a: 1\nstorage: {'s3://': {endpont: x}}",
            r"settings.yaml:2: storage: s3://: endpont: unknown .* mean 'endpoint'\?",
        ),
        ("storage: {'s3://': {secret_access_key: x}}", r"credentials do not belong in configs"),
        ("storage: [", r"settings.yaml:\d+: not valid YAML"),
        (None, r"settings.yaml: cannot read the config: .*exist"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, says: str
) -> None:
    path = tmp_path / "settings.yaml" if text is None else write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"^storage: .*{says}"):
        load_storage_settings(str(path))
    monkeypatch.setenv("MEGABLEND_STORAGE", str(path))
    with pytest.raises(ConfigError, match=f"^MEGABLEND_STORAGE: .*{says}"):
        load_storage_settings()


@pytest.mark.parametrize("given", [3, "", ["s3://"]])
def test_what_is_not_settings_is_refused(given: object) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^storage: found .*, expected URL prefixes, each with its settings, or the path",
    ):
        load_storage_settings(given)


def test_the_folder_of_a_mirror_is_relative_to_the_config(tmp_path: Path) -> None:
    """Also where nothing but the mirror is set, and all sources are local."""
    source = {"name": "a", "path": "x/*.parquet", "column": "x", "weight": 1}
    config = make_config(tmp_path, [source], samples=1, storage={"mirror": "m"})
    file = tmp_path / "config.yaml"
    file.write_text(str(config))
    options = load_config(file).storage
    assert options.mirror is not None
    assert options.mirror.folder == str(tmp_path / "m")

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from megablend.errors import CacheError, ConfigError, MissingFileError, ResourceError
from megablend.system.failures import remedy_of, translate, translating


@pytest.mark.parametrize(
    "number",
    [
        errno.EACCES,
        errno.EIO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.EMFILE,
        errno.ENOMEM,
        errno.ENOSPC,
    ],
)
def test_an_error_of_the_system_has_path_cause_and_remedy(number: int) -> None:
    with pytest.raises(ResourceError) as caught, translating("here"):
        raise OSError(number, os.strerror(number), "/some/file")
    assert str(caught.value) == f"/some/file: {os.strerror(number)}; {remedy_of(number)}"
    assert caught.value.exit_code == 3
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ECONNABORTED, errno.ESHUTDOWN])
def test_a_server_out_of_reach_is_not_said_to_have_ended(number: int) -> None:
    """Without a majority of its replicas GlusterFS gives ENOTCONN, and CephFS ESHUTDOWN to a client
    that it has evicted: the first needs its servers, not another mount."""
    assert re.search(r"cannot be reached.*check it, mount .* again", remedy_of(number))
    assert "another folder" not in remedy_of(number)


def test_one_that_names_no_file_gets_the_place() -> None:
    with (
        pytest.raises(ResourceError, match=r"^/data/cache: Input/output error; the disk"),
        translating("/data/cache"),
    ):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_working_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    says = "^x: the working directory of this process has been removed; start it in a folder that"
    with pytest.raises(ResourceError, match=says), translating("x"):
        Path.cwd()
    with (
        pytest.raises(ResourceError, match=r"^/nowhere: .*; check that it exists"),
        translating(""),
    ):
        Path("/nowhere").stat()
    monkeypatch.chdir(tmp_path)
    says = "^x: No such file or directory; check that it exists"
    with pytest.raises(ResourceError, match=says), translating("x"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def test_shared_memory_that_is_not_there() -> None:
    says = "^x: /dev/shm has no room for .*; enlarge it .* or use fewer workers"
    error = (
        "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    )
    with pytest.raises(ResourceError, match=says), translating("x"):
        raise RuntimeError(error)


def test_shared_memory_for_which_there_are_too_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    says = r"^x: a worker's batch cannot be shared \(Too many open files: .*\); raise the limit of"
    error = "unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"
    with pytest.raises(ResourceError, match=says), translating("x"):
        raise RuntimeError(error)


def test_memory_that_is_not_there() -> None:
    says = r"^sample 3: out of memory \(Unable to allocate .*\); .*lower `memory:`"
    with pytest.raises(ResourceError, match=says), translating("sample 3"):
        np.empty(1 << 60, np.uint8)


@pytest.mark.parametrize(("name", "encoding"), [("/a\udcff", "utf-8"), ("/\xe4", "ascii")])
def test_a_name_that_the_encoding_has_not(name: str, encoding: str) -> None:
    says = (
        f"^here: {re.escape(ascii(name))} cannot be encoded as {encoding}; use .* PYTHONUTF8=1 if"
    )
    with pytest.raises(ConfigError, match=says), translating("here"):
        name.encode(encoding)


def test_threads_that_are_not_there() -> None:
    with (
        pytest.raises(
            ResourceError, match=r"refuses to start more threads; raise the limit \(`ulimit -u`\)"
        ),
        translating("x"),
    ):
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("limit", "raised"), [(8, "raise the limit of 8 open files"), (4096, "")])
def test_kernels_that_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, limit: int, raised: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    error = RuntimeError(
        "cannot cache function 'row_checks': no locator available for file '/x/row_checks.py'"
    )
    translated = translate(error, "build")
    assert isinstance(translated, ResourceError)
    assert str(translated).startswith(
        f"build: compiled kernels cannot be stored ({error}); {raised}"
    )
    assert str(translated).endswith(
        "make the kernel cache's folder writable, or set MEGABLEND_KERNEL_CACHE to a folder that is"
    )
    assert ("ulimit -n 1024" in str(translated)) == bool(raised)


@pytest.mark.parametrize(
    "error",
    [
        CacheError("c"),
        MissingFileError("a", "no such file"),
        ValueError("v"),
        RuntimeError("r"),
        RecursionError("deep"),
        BrokenPipeError(errno.EPIPE, "pipe"),
        OSError("of a library, without a number"),
    ],
)
def test_what_is_not_the_systems_stays_as_it_is(error: Exception) -> None:
    assert translate(error, "here") is None
    with pytest.raises(type(error)) as caught, translating("here"):
        raise error
    assert caught.value is error


def test_the_limit_of_open_files_is_told() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Other words if the hard limit is reached, to which storages raise the limit
    assert re.search(f"the limit (of|is) {limit} open files", remedy_of(errno.EMFILE))


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError("libgomp.so.1: failed to map segment from shared object"),
        OSError(
            "Could not find/load shared object file 'libllvmlite.so' from resource location: 'llvmlite.binding'."
        ),
    ],
)
def test_a_library_that_there_is_no_memory_for_is_a_lack_of_memory(error: Exception) -> None:
    translated = translate(error, "build")
    assert isinstance(translated, ResourceError)
    assert str(translated).startswith(
        f"build: a library cannot be loaded ({error}); the machine, or the job's limit, has no memory"
    )
    assert translate(ImportError("No module named 'x'"), "build") is None

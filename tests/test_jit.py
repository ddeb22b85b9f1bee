from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import config
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock

from megablend import jit
from megablend.jit_cache import KernelCache
from megablend.kernels.exact.length_totals import total_lengths
from megablend.kernels.exact.sample_index import cut
from tests.preloaded import python
from tests.reader.test_forks import run_in_child

PACKAGE = Path(jit.__file__).parent
ARGUMENTS = np.arange(1, 4, dtype=np.int32), 0
compiled = pytest.mark.skipif(bool(vars(config)["DISABLE_JIT"]), reason="nothing is compiled")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kinds of lock that are taken in this thread: kernels of runs that tests before opened are loaded in another one."""
    taken = []
    turn = jit._turn
    own = threading.get_ident()

    @contextlib.contextmanager
    def counted(function: Callable[..., Any], kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        with turn(function, kind):
            if threading.get_ident() == own:
                taken.append(kind)
            yield

    monkeypatch.setattr(jit, "_turn", counted)
    return taken


@compiled
def test_kernels_are_compiled_in_turn_and_loaded_together(turns: list[int]) -> None:
    total_lengths(*ARGUMENTS)  # from here on it is in the cache
    turns.clear()
    fresh = jit.kernel(total_lengths.py_func)  # type: ignore[attr-defined]
    assert fresh(*ARGUMENTS)[1] == 6
    assert turns == [fcntl.LOCK_SH]
    assert fresh(*ARGUMENTS)[1] == 6
    assert turns == [fcntl.LOCK_SH]
    lengths = ARGUMENTS[0].copy()
    lengths.flags.writeable = False  # of another type for numba, as a memory-mapped file's are
    assert fresh(lengths, 0)[1] == 6
    assert turns[1:] in ([fcntl.LOCK_SH], [fcntl.LOCK_SH, fcntl.LOCK_EX])


@compiled
def test_what_is_not_in_the_cache_is_compiled_under_the_exclusive_lock(
    turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelCache, "_read", lambda *arguments: None)
    fresh = jit.kernel(total_lengths.py_func)  # type: ignore[attr-defined]
    assert fresh(*ARGUMENTS)[1] == 6
    assert turns == [fcntl.LOCK_SH, fcntl.LOCK_EX]


@compiled
def test_a_kernel_is_loaded_or_compiled_while_another_is_compiled(
    turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    total_lengths(*ARGUMENTS)
    other = cut.py_func  # type: ignore[attr-defined]
    with jit._turn(other):
        turns.clear()
        fresh = jit.kernel(total_lengths.py_func)  # type: ignore[attr-defined]
        assert fresh(*ARGUMENTS)[1] == 6
        assert turns == [fcntl.LOCK_SH]
        monkeypatch.setattr(KernelCache, "_read", lambda *arguments: None)
        fresh = jit.kernel(total_lengths.py_func)  # type: ignore[attr-defined]
        assert fresh(*ARGUMENTS)[1] == 6
        assert turns[1:] == [fcntl.LOCK_SH, fcntl.LOCK_EX]


@compiled
def test_a_process_that_forks_waits_until_no_other_thread_loads() -> None:
    """A child would find the locks held by a thread that it does not have."""
    is_held = threading.Event()
    is_forking = threading.Event()
    fresh = jit.kernel(total_lengths.py_func)  # type: ignore[attr-defined]

    def load() -> None:
        with jit._turn(total_lengths.py_func), global_compiler_lock:  # type: ignore[attr-defined]
            is_held.set()
            is_forking.wait()

    thread = threading.Thread(target=load)
    thread.start()
    is_held.wait()
    os.register_at_fork(before=is_forking.set)  # comes first, since it is registered last
    assert run_in_child(lambda: fresh(*ARGUMENTS)[1] == 6) == 0
    thread.join()


@compiled
def test_a_kernel_is_loaded_without_what_only_compiling_needs(turns: list[int]) -> None:
    """While another process, here this one, loads too."""
    total_lengths(*ARGUMENTS)
    code = (
        "import sys, numpy as np\n"
        "from megablend.kernels.exact.length_totals import total_lengths\n"
        "lengths = np.arange(1, 4, dtype=np.int32)\n"
        "print(total_lengths(lengths, 0)[1], 'numba.np.arrayobj' in sys.modules)\n"
        "import numba\n"  # and numba compiles as ever afterwards
        "print(numba.njit(lambda: np.arange(3).sum() + len(str(7)))(), 'numba.np.arrayobj' in sys.modules)\n"
    )
    environment = {**os.environ, "MEGABLEND_KERNEL_CACHE": str(jit.cache_dir().parents[2])}
    with jit._turn(total_lengths.py_func, fcntl.LOCK_SH):  # type: ignore[attr-defined]
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.stdout == "6 False\n4 True\n", done.stderr


@compiled
def test_where_the_short_way_fails_numba_loads_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    total_lengths(*ARGUMENTS)

    def fail(*arguments: object) -> None:
        raise AttributeError("another numba")

    monkeypatch.setattr("megablend.jit_cache._make_environment", fail)
    fresh: Any = jit.kernel(total_lengths.py_func)  # type: ignore[attr-defined]
    assert fresh(*ARGUMENTS)[1] == 6
    assert sum(fresh._compiled.stats.cache_hits.values()) == 1


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flip(data: bytes) -> bytes:
    return data[:-99] + bytes([data[-99] ^ 1]) + data[-98:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's folder of compiled kernels in which there are none."""
    monkeypatch.setattr(jit, "cache_dir", lambda: tmp_path)
    return tmp_path


@compiled
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [lambda _: b"", _cut, _flip], ids=["empty", "cut", "flipped"])
def test_a_damaged_file_of_a_kernel_is_written_again(
    folder: Path, suffix: str, damage: Callable[[bytes], bytes], turns: list[int]
) -> None:
    """As a machine that lost power leaves it."""
    assert jit.kernel(total_lengths.py_func)(*ARGUMENTS)[1] == 6  # type: ignore[attr-defined]
    (path,) = folder.rglob(f"*.{suffix}")
    path.write_bytes(damage(path.read_bytes()))
    turns.clear()
    assert jit.kernel(total_lengths.py_func)(*ARGUMENTS)[1] == 6  # type: ignore[attr-defined]
    assert turns == [fcntl.LOCK_SH, fcntl.LOCK_EX]
    assert jit.kernel(total_lengths.py_func)(*ARGUMENTS)[1] == 6  # type: ignore[attr-defined]
    assert turns[2:] == [fcntl.LOCK_SH]


@compiled
def test_a_kernel_that_was_not_kept_is_not_taken_for_that_of_other_types(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index was lost, and the disk is full when the kernel of other types is compiled."""
    assert jit.kernel(total_lengths.py_func)(*ARGUMENTS)[1] == 6  # type: ignore[attr-defined]
    next(folder.rglob("*.nbi")).unlink()
    others = (ARGUMENTS[0].astype(np.int64), *ARGUMENTS[1:])
    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", fail_on_a_full_disk)
        assert jit.kernel(total_lengths.py_func)(*others)[1] == 6  # type: ignore[attr-defined]
    assert jit.kernel(total_lengths.py_func)(*others)[1] == 6  # type: ignore[attr-defined]


def fail_on_a_full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


TOTAL = """
import sys, resource, numpy as np
from megablend.kernels.exact.length_totals import total_lengths

if sys.argv[1:]:  # the largest file that may be written
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
lengths = np.arange(1, 4, dtype=np.int32)
print(total_lengths(lengths, 0))
"""


@compiled
def test_a_kernel_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path) -> None:
    """On a full disk; a later process keeps it."""
    environment = {**os.environ, "MEGABLEND_KERNEL_CACHE": str(tmp_path)}
    said = 0
    for limit in (["0"], ["1000"], []):
        command = [*python(), "-c", TOTAL, *limit]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "(0, 6, 840276720)\n"
        assert bool(list(tmp_path.rglob("*.nbc"))) == (not limit)
        said += done.stderr.count("megablend: compiling kernels for this machine, once")
    assert said == 1  # by the first process on a node


@compiled
def test_processes_that_start_together_say_once_that_they_compile(tmp_path: Path) -> None:
    """As the ranks of a job, or a DataLoader's workers, on a node without compiled kernels."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "none" / "yet")}
    environment.pop("MEGABLEND_KERNEL_CACHE", None)
    command = [*python(), "-c", TOTAL]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=500) for process in started]
    assert [found for found, _ in said] == ["(0, 6, 840276720)\n"] * 3, said
    assert (
        sum(text.count("megablend: compiling kernels for this machine, once") for _, text in said)
        == 1
    )


def test_the_folder_of_kernels_depends_on_all_that_they_are_made_of() -> None:
    """Else an upgrade that changes one of these would load machine code of before."""
    hashed = {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        for path in jit.compiled_modules()
    }
    imported = set[str]()
    for path in PACKAGE.joinpath("kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megablend."):
                imported.add((node.module or "").removeprefix("megablend."))
    assert {"jit", "intrinsics"} <= imported <= hashed


@pytest.mark.parametrize(("level", "lines"), [("WARNING", 1), ("ERROR", 0)])
def test_compiling_is_told_unless_only_errors_are_wanted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    level: str,
    lines: int,
) -> None:
    monkeypatch.setattr(jit, "cache_dir", lambda: tmp_path)
    with caplog.at_level(level, "megablend"):
        jit._announce()
        jit._announce()
    assert capsys.readouterr().err.count("compiling kernels for this machine, once") == lines


@pytest.mark.parametrize(
    ("is_terminal", "seconds", "lines"), [(True, 3.0, 1), (True, 1.0, 0), (False, 3.0, 0)]
)
def test_who_waits_at_a_terminal_is_told_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    seconds: float,
    lines: int,
) -> None:
    """Of kernels that nobody needed before on this node."""
    (tmp_path / "compiling").touch()
    monkeypatch.setattr(jit, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(jit, "_notices", [])
    monkeypatch.setattr(jit, "_loading", [seconds])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    jit._announce()
    jit._announce()
    assert capsys.readouterr().err.count("compiling kernels for this machine, once") == lines


def test_variables_that_numba_refuses_are_named() -> None:
    attempt = "try: megablend.open\nexcept megablend.ConfigError as error: print(error)\n"
    found = subprocess.run(
        [sys.executable, "-c", f"import megablend\n{attempt}{attempt}"],
        env=os.environ | {"NUMBA_NUM_THREADS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = {*found.stdout.splitlines()}
    assert line.startswith("numba cannot be loaded (")
    assert "NUMBA_NUM_THREADS=0" in line

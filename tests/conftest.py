"""Scripts that tests start find the project and the package of its tests. Without torch, the tests that need it are skipped.
Quick tests are marked by where they are."""

import gc
import importlib.util
import os
import resource
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

import tests.eager  # noqa: F401  (for what is imported from here on)
from tests.examples import IN_QUICK_PART, leave_out_slow, limit_examples
from tests.preloaded import share_servers
from tests.temporary_folders import use_memory

# So that failed assertions of the contracts show their values
pytest.register_assert_rewrite("megablend.testing")

ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
# Else each of hundreds of processes compiles the package's modules again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests run side by side: PyTorch's threads would wait for cores in busy loops
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Megatron, which many tests compare with, takes five descriptors a dataset
_, _most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
_files = 4096 if _most_files == resource.RLIM_INFINITY else min(4096, _most_files)
resource.setrlimit(resource.RLIMIT_NOFILE, (_files, _most_files))
# Commands print for this width. GNU readline, which pytest imports, sets it for child processes, unseen by `os.environ`
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")


class SkipWithout(MetaPathFinder):
    """Skips the test, or the module of tests, that is the first to import a package."""

    def __init__(self, **packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        reason = self.packages.get(name)
        if reason is not None:
            pytest.skip(f"{name} {reason}", allow_module_level=True)


def has_compiled_megatron() -> bool:
    """Whether megatron-core is installed with its compiled helpers: its wheels are of some versions of Python only."""
    spec = importlib.util.find_spec("megatron")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(any(Path(folder).glob("core/datasets/helpers_cpp*.so")) for folder in folders)


if importlib.util.find_spec("torch") is None:
    sys.meta_path.append(SkipWithout(torch="is not installed", megatron="needs torch"))
elif not has_compiled_megatron() and os.environ.get("MEGABLEND_SERVERS") != "required":
    sys.meta_path.insert(0, SkipWithout(megatron="has no compiled helpers for this Python"))


ROOMS = (
    "blend",
    "config",
    "distributed",
    "formats",
    "index",
    "kernels",
    "megatron/exact",
    "order",
    "prefetch",
    "run",
    "storage",
    "system",
)
TABLES = tuple(f"behaviour/remedies/test_{name}.py" for name in ("blends", "configs", "files"))
QUICK = (Path("test_layers.py"), *map(Path, ROOMS), *map(Path, TABLES))
"""Folders and files whose tests need neither MPI nor training, except for those marked `long`."""
NOT_QUICK = {"long", "slow"}
WITHOUT_SLOW = ("quick", "not slow")
"""What `-m` says where no test writes much."""
WITH_SERVERS = Path("storage/objects")
QUICK_CASES = 6
"""Of a test with more cases than this, the quick part has so many, spread over all of them."""


TESTS = Path(__file__).parent
_MANY_FILES = 300


@pytest.fixture(scope="session")
def kept_files() -> list[int]:
    """How many files were open after garbage was last searched for: shape [1]."""
    return [0]


@pytest.fixture(autouse=True)
def few_open_files(kept_files: list[int]) -> Iterator[None]:
    """Files that a test has left open are closed when they are collected: garbage is searched for
    before a process has no descriptors any more. A search takes 0.2 s: where files stay open, because
    modules or fixtures hold them, the next search waits for as many new ones."""
    yield
    if count_open_files() > kept_files[0] + _MANY_FILES:
        gc.collect()
        kept_files[0] = count_open_files()


def count_open_files() -> int:
    """The number of this process's file descriptors."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def pytest_configure(config: pytest.Config) -> None:
    gone = [place for place in QUICK if not (TESTS / place).exists()]
    assert not gone, f"{gone}: a place of quick tests is not there"
    if sys.version_info < (3, 11):  # its asyncio leaves connections open whose handshake has failed
        ignored = "ignore:unclosed transport <asyncio.sslproto:ResourceWarning"
        config.addinivalue_line("filterwarnings", ignored)
    if not hasattr(config, "workerinput"):  # else pytest-xdist started this process
        share_servers()
    if config.option.markexpr in WITHOUT_SLOW:
        use_memory(os.environ)
        leave_out_slow()
    if config.option.markexpr == "quick":
        limit_examples(IN_QUICK_PART)


def is_quick(path: Path) -> bool:
    """Whether a file, relative to the tests, is in a quick place."""
    return any(map(path.is_relative_to, QUICK)) and not path.is_relative_to(WITH_SERVERS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m quick` does not import the other tests, which takes as long as many quick tests do."""
    if (
        config.option.markexpr == "quick"
        and collection_path.is_relative_to(TESTS)
        and collection_path.name != "__init__.py"
    ):
        path = collection_path.relative_to(TESTS)
        return not is_quick(path) and not any(place.is_relative_to(path) for place in QUICK)
    return None


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests, millions of objects, are never garbage: no search for garbage visits them, now or while tests run."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        items[:] = [item for item in items if not item.get_closest_marker("compiled")]
    for item in items:
        if is_quick(item.path.relative_to(TESTS)) and not NOT_QUICK.intersection(
            mark.name for mark in item.iter_markers()
        ):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in cases.values():
        for item in choose_evenly(of_one_test, QUICK_CASES):
            item.add_marker(pytest.mark.quick)


def choose_evenly(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most so many of the items: the first one, and others at equal distances."""
    return items if len(items) <= most else [items[i * len(items) // most] for i in range(most)]

"""Try the plugin with other versions of megatron-core: its tests against each, in a virtual environment of its own.

    python tools/try_megatron_versions.py                    # one release of each series on the package index
    python tools/try_megatron_versions.py 0.15.3 0.16.1 -k samples
    python tools/try_megatron_versions.py ~/Megatron-LM      # a source checkout, of a tag or of main; its helpers are compiled
    python tools/try_megatron_versions.py ~/Megatron-LM --own-tests all

With `--own-tests` those of Megatron-LM's own tests that concern datasets run instead, on a CPU, with megablend's classes in the
place of Megatron's: `builder`, `all` (dataset and config, too), or `none`, to compare with. Those that download are left out.

An environment holds megatron-core alone, or what a checkout imports; everything else is that of the Python that runs this script,
which needs the package's `test` extra. Prints a line a version; a version's whole output is left beside its environment. Exits
with 1 where one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1")
ROOT = Path(__file__).parent.parent
TESTS = [str(ROOT / "tests" / "megatron" / name) for name in ("plugin", "test_against_megatron.py")]
OWN_TESTS = ("test_builder.py", "test_gpt_dataset.py", "test_prepare_cache.py")
IMPORTED = [
    "einops",
    "nltk",
    "pybind11",
    "regex",
    "safetensors",
    "sentencepiece",
    "six",
    "tiktoken",
    "transformers",
    "triton",
]
"""What checkouts and their tests import besides; never their own torch."""
# Older versions warn of what the tests do not care about.
LENIENT = [
    "-W",
    "ignore::DeprecationWarning",
    "-W",
    "ignore::FutureWarning",
    "-W",
    "ignore::UserWarning",
]


def environment(folder: Path, version: str) -> Path:
    """The Python of an environment with this version, or with this checkout; made where it is not there."""
    python = folder / "bin" / "python"
    checkout = Path(version)
    if not python.exists():
        venv.create(folder, with_pip=False)
        (site,) = folder.glob("lib/python*/site-packages")
        if checkout.is_dir():  # before an installed release: names of .pth files are sorted
            (site / "a_checkout.pth").write_text(str(checkout.resolve()))
        (site / "base.pth").write_text(
            "\n".join(path for path in sys.path if path.endswith("site-packages"))
        )
    packages = IMPORTED if checkout.is_dir() else [f"megatron-core=={version}"]
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", *packages]
    subprocess.run([sys.executable, *install], check=True)
    if checkout.is_dir():
        compile_helpers(python, checkout / "megatron" / "core" / "datasets")
    return python


def compile_helpers(python: Path, folder: Path) -> None:
    """Compile a checkout's helpers as releases are, without assertions: these end the process where a release goes on."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    includes = subprocess.run(
        [str(python), "-m", "pybind11", "--includes"], capture_output=True, text=True, check=True
    )
    flags = ["-O3", "-DNDEBUG", "-shared", "-std=c++17", "-fPIC", *includes.stdout.split()]
    subprocess.run(
        ["c++", *flags, "helpers.cpp", "-o", f"helpers_cpp{suffix}"], cwd=folder, check=True
    )


def try_version(
    folder: Path, version: str, options: list[str], own: str | None
) -> tuple[bool, str]:
    """Run the tests; whether they passed, and pytest's own summary.

    Args:
        own: which of our classes stand in Megatron's own tests; None for the plugin's tests.
    """
    name = (
        str(Path(version).resolve()).strip("/").replace("/", "-")
        if Path(version).is_dir()
        else version
    )
    python = environment(folder / name, version)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *LENIENT, *options]
    # mpi4py looks for an MPI library beside the Python that runs.
    found = sorted(Path(sys.prefix, "lib").glob("libmpi.so.*"))
    known = {"MPI4PY_LIBMPI": str(found[0])} if found else {}
    where = ROOT
    if own is None:
        command += ["-m", "not slow", *TESTS]
    else:
        where = Path(version)
        tests = [
            str(test)
            for name in OWN_TESTS
            if (test := Path("tests", "unit_tests", "data", name)) and (where / test).exists()
        ]
        command += ["-p", "megatron_own_tests", "-o", "addopts=", "--timeout", "300", *tests]
        path = os.pathsep.join([".", str(ROOT), str(ROOT / "tools")])
        known |= {
            "MEGABLEND_IN_PLACE": own,
            "PYTHONPATH": path,
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
        # The usual one may be taken
        known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    result = subprocess.run(
        command, cwd=where, env={**os.environ, **known}, capture_output=True, text=True, check=False
    )
    (folder / f"{name}.log").write_text(result.stdout + result.stderr)
    summary = re.findall(r"^.*(?:passed|failed|error).* in .*$", result.stdout, re.MULTILINE)
    return result.returncode == 0, summary[
        -1
    ] if summary else f"pytest ended with {result.returncode}"


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "versions", nargs="*", default=VERSIONS, help="of megatron-core, or folders of checkouts"
    )
    parser.add_argument(
        "--own-tests",
        choices=("none", "builder", "all"),
        help="run a checkout's own tests with these classes",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("megatron-versions"),
        help="of the environments and logs",
    )
    parser.add_argument(
        "-k", dest="chosen", default="", help="only tests that match, as pytest's -k"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    options = ["-k", arguments.chosen] if arguments.chosen else []
    if arguments.own_tests and not all(map(os.path.isdir, arguments.versions)):
        parser.error("--own-tests takes folders of checkouts; releases have no tests")
    failed = False
    for version in arguments.versions:
        passed, summary = try_version(
            arguments.folder.absolute(), version, options, arguments.own_tests
        )
        failed |= not passed
        print(f"megatron-core {version:8} {'works' if passed else 'FAILS'}   {summary}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Try the plugin with other versions of megatron-core: its tests against each, in a virtual environment of its own.

    python tools/try_megatron_versions.py                    # all versions that compat.py knows, one release of each
    python tools/try_megatron_versions.py 0.15.3 0.16.1 -k samples

An environment holds megatron-core alone; everything else is that of the Python that runs this script, which needs the
package's `test` extra. Prints a line a version; a version's whole output is left beside its environment. Exits with 1 where
one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1")
ROOT = Path(__file__).parent.parent
TESTS = sorted(str(path) for path in (ROOT / "tests" / "megatron").glob("test_plugin_*.py"))
# Older versions warn of what the tests do not care about.
LENIENT = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning", "-W", "ignore::UserWarning"]


def environment(folder: Path, version: str) -> Path:
    """The Python of an environment with this version; made where it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "base.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", f"megatron-core=={version}"]
    subprocess.run([sys.executable, *install], check=True)
    return python


def try_version(folder: Path, version: str, options: list[str]) -> tuple[bool, str]:
    """Run the tests; whether they passed, and pytest's own summary."""
    python = environment(folder / version, version)
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *LENIENT,
        "-m",
        "not slow",
        *options,
        *TESTS,
    ]
    # mpi4py looks for an MPI library beside the Python that runs.
    found = sorted(Path(sys.prefix, "lib").glob("libmpi.so.*"))
    known = {"MPI4PY_LIBMPI": str(found[0])} if found else {}
    result = subprocess.run(command, cwd=ROOT, env={**known, **os.environ}, capture_output=True, text=True, check=False)
    (folder / f"{version}.log").write_text(result.stdout + result.stderr)
    summary = re.findall(r"^.*(?:passed|failed|error).* in .*$", result.stdout, re.MULTILINE)
    return result.returncode == 0, summary[-1] if summary else f"pytest ended with {result.returncode}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="of megatron-core")
    parser.add_argument("--folder", type=Path, default=Path("megatron-versions"), help="of the environments and logs")
    parser.add_argument("-k", dest="chosen", default="", help="only tests that match, as pytest's -k")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    options = ["-k", arguments.chosen] if arguments.chosen else []
    failed = False
    for version in arguments.versions:
        passed, summary = try_version(arguments.folder.absolute(), version, options)
        failed |= not passed
        print(f"megatron-core {version:8} {'works' if passed else 'FAILS'}   {summary}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

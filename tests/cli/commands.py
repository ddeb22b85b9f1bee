"""Commands as a user starts them: in a process of their own, or, which takes no second for imports, in this one."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

from megablend.cli.main import main
from tests.preloaded import python

ROOT = str(Path(__file__).parents[2])


def run(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: its exit code, and what it prints."""
    out = io.StringIO()
    err = io.StringIO()
    before = Path.cwd()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["megablend", *map(str, args)]),
        warnings.catch_warnings(),
    ):
        # Those of the package are errors in tests; a user sees them, and goes on
        warnings.simplefilter("ignore")
        os.chdir(cwd or before)
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def runner_with_stderr() -> CliRunner:
    """click's runner, which keeps standard error apart: before click 8.2 only if it is told to."""
    apart: dict[str, Any] = (
        {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    )
    return CliRunner(**apart)


def run_process(
    *args: object, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as a process."""
    return subprocess.run(
        [*python(), "-m", "megablend", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": ROOT} | environ,
        check=False,
    )

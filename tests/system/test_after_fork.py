from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megablend
from megablend.system.after_fork import python_command, start_uninterrupted


def test_a_process_that_ctrl_c_does_not_reach() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
    process = start_uninterrupted([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == b"alive\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_pipe_to_a_child_gets_no_descriptor_of_a_closed_stream() -> None:
    code = """
import os
from megablend.system.after_fork import fill_standard_streams
kept = os.dup(1)
for stream in range(3):
    os.close(stream)
fill_standard_streams()
ends = os.pipe()
os.write(kept, repr([min(ends) > 2, [os.get_inheritable(n) for n in range(3)]]).encode())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[True, [True, True, True]]"


def test_processes_do_not_run_files_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('run')")
    monkeypatch.setattr(sys, "path", ["", *sys.path, "/\u00e9\udcff'"])
    command = python_command("json", "loads", "[1]")
    subprocess.run(command, cwd=tmp_path, check=True)


def test_all_processes_of_python_are_started_in_this_way() -> None:
    package = Path(megablend.__file__).parent
    starting = [path.name for path in package.rglob("*.py") if "sys.executable" in path.read_text()]
    assert starting == ["after_fork.py"]

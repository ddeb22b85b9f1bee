from __future__ import annotations

import signal
import subprocess
import sys

from megablend.system.after_fork import start_uninterrupted


def test_a_process_that_ctrl_c_does_not_reach() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
    process = start_uninterrupted([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == b"alive\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before

#!/usr/bin/env bash
# Style, types and tests (the long ones with a fixed seed only), in an environment of their own: bash tools/test.sh [pytest arguments]
# MEGABLEND_TEST_PROCESSES (4): how many tests run at the same time; more than two cores, since tests wait for processes and servers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_venv .venv-test --editable ".[mpich,test]"

say "Style and types"
# Meanwhile the modules that tests import are compiled, once: else each process of the tests does so
env -u PYTHONDONTWRITEBYTECODE python -m pytest -m "not slow" --collect-only --quiet "$@" >/dev/null 2>&1 &
ruff check
ruff format --check
mypy megablend tests tools
wait

say "Tests"
# A test that fails is run once more, since tests wait for processes and servers on machines that do other work, too; the summary lists it
# as RERUN. tools/soak.sh runs no test twice.
exec python -m pytest -m "not slow" --reruns 1 -rR --numprocesses "${MEGABLEND_TEST_PROCESSES:-4}" --dist worksteal "$@"

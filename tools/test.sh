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
if python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    mypy megablend tests tools
else
    echo "Types are not checked on Python 3.10: the last numpy for it declares others than the one they are checked with"
fi
wait

say "Tests"
tests=(python -m pytest -m "not slow" "$@")
rm -f .pytest_cache/v/cache/lastfailed # of earlier runs
status=0
"${tests[@]}" --numprocesses "${MEGABLEND_TEST_PROCESSES:-4}" --dist worksteal || status=$?
if [ "$status" = 1 ]; then # tests failed: 1 of pytest's exit codes
    # Tests wait for processes and servers. What failed while others, or the machine, did much else, is told from what fails always.
    say "What failed, once more, one test after another"
    exec "${tests[@]}" --last-failed
fi
exit "$status"

#!/usr/bin/env bash
# All tests, the long ones too, and how long they took: bash tools/soak.sh [pytest arguments]
# MEGABLEND_MUTATIONS (2000; 100000 for a release) and MEGABLEND_SEED (17) set the campaign of damaged caches and data.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_venv .venv-test --editable ".[mpich,test]"

# Of the campaigns: calls of the system that fail, and builds that are killed.
export MEGABLEND_TEST_FAULTS=${MEGABLEND_TEST_FAULTS:-1000} MEGABLEND_TEST_KILLS=${MEGABLEND_TEST_KILLS:-1000}
command -v strace >/dev/null || echo "strace is not there: no calls of the system are made to fail; apt install strace" >&2

say "All tests, with the 20 slowest named"
SECONDS=0
status=0
python -m pytest --durations 20 "$@" || status=$?
printf '\nThis took %d min %02d s.\n' $((SECONDS / 60)) $((SECONDS % 60))
exit "$status"

#!/usr/bin/env bash
# All tests, the long ones too, and how long they took: bash tools/soak.sh [pytest arguments]
#
# How large the campaigns are, and their seeds, by environment variables (with what is taken where one is not set):
#   MEGABLEND_TEST_KILLS  (1000)    builds and collections of garbage that are killed: tests/behaviour/test_kills.py
#   MEGABLEND_TEST_FAULTS (1000)    calls of the system that fail: tests/cli/test_system_faults.py; needs strace
#   MEGABLEND_TEST_HISTORIES (500)  runs that grow, change and are amended: tests/behaviour/test_histories.py
#   MEGABLEND_TEST_SOURCES (50)     servers that go wrong: tests/storage/objects/test_whole_runs.py
#   MEGABLEND_TEST_NODE_KILLS (200) nodes and etcd that are killed or stopped: tests/mirror/test_kills.py
#   MEGABLEND_TEST_SEED   (0)       the first seed of these five
#   MEGABLEND_TEST_SECONDS (60)     how long etcd is off, and wants do not fit: tests/mirror/{test_etcd_off,catalog/test_full_mirrors}.py
#   MEGABLEND_MUTATIONS   (100000)  damaged files of data and caches: tests/behaviour/test_mutations.py
#   MEGABLEND_SEED        (17)      their seed
#   MEGABLEND_SOAK_PLANS  (2000)    random plans, compared with the oracle: tests/blend/test_epoch_ends.py
#   MEGABLEND_SOAK_SEED   (1)       their seed
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_venv .venv-test --editable ".[mpich,test]"

export MEGABLEND_TEST_KILLS=${MEGABLEND_TEST_KILLS:-1000} MEGABLEND_TEST_FAULTS=${MEGABLEND_TEST_FAULTS:-1000}
export MEGABLEND_TEST_HISTORIES=${MEGABLEND_TEST_HISTORIES:-500} MEGABLEND_TEST_SOURCES=${MEGABLEND_TEST_SOURCES:-50}
export MEGABLEND_MUTATIONS=${MEGABLEND_MUTATIONS:-100000} MEGABLEND_SOAK_PLANS=${MEGABLEND_SOAK_PLANS:-2000}
command -v strace >/dev/null || echo "strace is not there: no calls of the system are made to fail; apt install strace" >&2

say "All tests, with the 20 slowest named"
SECONDS=0
status=0
python -m pytest --durations 20 "$@" || status=$?
printf '\nThis took %d min %02d s.\n' $((SECONDS / 60)) $((SECONDS % 60))
exit "$status"

#!/usr/bin/env bash
# Coverage of the package by the tests, by folder, with kernels in plain Python: bash tools/coverage.sh [pytest arguments]
# Without arguments: the quick part. Processes that tests start are not counted.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_venv .venv-test --editable ".[mpich,test]"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export COVERAGE_FILE=$folder/coverage NUMBA_DISABLE_JIT=1

[ $# != 0 ] || set -- -m quick
say "Tests: pytest $*"
status=0
python -m coverage run --source megablend -m pytest -q "$@" || status=$?
python -m coverage json --quiet -o "$folder/coverage.json"

say "Covered lines"
python tools/sum_coverage.py "$folder/coverage.json"
exit "$status"

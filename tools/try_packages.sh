#!/usr/bin/env bash
# Builds the source distribution and, out of it, the wheel; installs each into an empty environment; runs the quick tests there, against
# the installed package: bash tools/try_packages.sh [pytest arguments]
# MEGABLEND_WITH_TORCH=1: with PyTorch (large); without it, the tests that need it are skipped.
# MEGABLEND_LOWEST=1: with the lowest versions of the dependencies that the metadata allows, in place of the newest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

rm -rf .venv-packages # it may be of another Python
make_venv .venv-packages
pip install --quiet "setuptools>=77.0.3" wheel

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

say "Source distribution, from the files that git knows"
git ls-files -z | xargs -0 cp --parents --target-directory "$folder/" 2>/dev/null || {
    echo "this needs a git checkout" >&2
    exit 1
}
(cd "$folder" && python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null)
sdist=$(echo "$folder"/dist/*.tar.gz)
python tools/check_sdist.py "$sdist"
tar --extract --gzip --file "$sdist" --directory "$folder/dist"
source_tree=${sdist%.tar.gz}

say "Wheel, from the source distribution"
(cd "$source_tree" && python -c 'from setuptools import build_meta; build_meta.build_wheel("..")' >/dev/null)
wheel=$(echo "$folder"/dist/*.whl)

if [ "${MEGABLEND_LOWEST:-}" = 1 ]; then
    say "The lowest versions of dependencies"
    pip install --quiet uv
    python tools/list_requirements.py "$wheel" --without torch |
        uv pip compile --quiet --no-header --no-annotate --only-binary :all: --resolution lowest-direct --output-file "$folder/lowest.txt" -
    cat "$folder/lowest.txt"
    export PIP_CONSTRAINT="$folder/lowest.txt"
fi

# The tests, without the package beside them.
mkdir "$folder/tests-only"
cp -r "$source_tree"/{tests,tools,docs,configs,pyproject.toml,README.md,CHANGELOG.md,mkdocs.yml} "$folder/tests-only"

status=0
for package in "$wheel" "$sdist"; do
    say "$(basename "$package") in an empty environment"
    rm -rf "$folder/env"
    python -m venv "$folder/env"
    env_python="$folder/env/bin/python"
    without_torch=()
    if [ "${MEGABLEND_WITH_TORCH:-}" = 1 ]; then
        "$env_python" -m pip install --quiet torch==2.13.0 "$package"
    else
        mapfile -t without_torch < <(python tools/list_requirements.py "$wheel" --without torch)
        "$env_python" -m pip install --quiet "${without_torch[@]}"
        "$env_python" -m pip install --quiet --no-deps "$package"
    fi
    "$env_python" -m pip install --quiet pytest pytest-timeout hypothesis packaging
    (
        cd "$folder/tests-only" &&
            "$env_python" -c 'import megablend, sys; print(megablend.__version__, megablend.__file__); sys.exit("/env/" not in megablend.__file__)' &&
            "$folder/env/bin/megablend" --version &&
            PATH="$folder/env/bin:$PATH" "$env_python" -m pytest -q -p no:cacheprovider -m quick "$@"
    ) || status=$?
done
exit "$status"

# Shared by the scripts in this folder: they run in the project's folder, in a virtual environment made once and kept.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

# make_venv FOLDER: make the environment where it is missing, and put it first on PATH.
make_venv() {
    local folder=$1 python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null; then
        echo "$python is not there: install Python 3.10 or newer, or name one: PYTHON=/path/to/python3 bash $0" >&2
        exit 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "$("$python" --version) is too old: 3.10 or newer is needed; name another: PYTHON=/path/to/python3 bash $0" >&2
        exit 1
    fi
    say "Virtual environment $folder"
    if ! [ -x "$folder/bin/pip" ]; then
        if "$python" -c 'import ensurepip' 2>/dev/null; then
            "$python" -m venv "$folder"
        elif "$python" -c 'import pip' 2>/dev/null; then
            # Debian and Ubuntu keep ensurepip in a package of its own; their pip can install pip into an environment.
            "$python" -m venv --without-pip "$folder"
            PYTHONPATH=$("$python" -c 'import pip; print(pip.__path__[0] + "/..")') \
                "$folder/bin/python" -m pip install --quiet --ignore-installed pip
        else
            echo "$python has no pip and no ensurepip. On Debian and Ubuntu: apt install python3-venv" >&2
            echo "Or name a Python that has one: PYTHON=/path/to/python3 bash $0" >&2
            exit 1
        fi
    fi
    export PATH="$PWD/$folder/bin:$PATH"
}

# use_venv FOLDER PIP-ARGUMENTS...: the same, with PyTorch and PIP-ARGUMENTS installed.
use_venv() {
    make_venv "$1"
    shift
    echo "Installing (the first time takes some minutes: PyTorch is large)"
    # Compiling all modules would take most of the time, and few of them are imported
    pip show --quiet torch 2>/dev/null || pip install --quiet --no-compile torch==2.13.0
    pip install --quiet --no-compile "$@"
}

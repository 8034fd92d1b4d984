# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: a virtual environment with what a requirements file lists.
#
#   make_environment requirements-dev.txt      # sets and exports PATH so that `python` is the environment's
#
# VENV names the folder (default .venv); PYTHON the interpreter that it is made with (default: the first of python3,
# python3.14 ... python3.11 that is new enough). What is installed there already is used as it is.

make_environment() {
    local venv=${VENV:-.venv} candidate found=""
    if [ ! -x "$venv/bin/python" ]; then
        for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                found=$candidate
                break
            fi
        done
        if [ -z "$found" ]; then
            echo "error: Python 3.11 or newer was not found; name one with PYTHON=/path/to/python" >&2
            return 2
        fi
        echo "== environment: $venv, from $("$found" --version)"
        "$found" -m venv "$venv" || { rm -rf "$venv"; echo "error: '$found -m venv $venv' failed (on Debian: apt install python3-venv)" >&2; return 1; }
    fi
    PATH=$(cd "$venv/bin" && pwd):$PATH
    export PATH
    echo "== packages: $1"
    python -m pip install --quiet --disable-pip-version-check -r "$1" || { echo "error: installing $1 failed" >&2; return 1; }
}

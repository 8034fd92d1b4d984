# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: a virtual environment with what a requirements file lists.
#
#   make_environment requirements-dev.txt      # sets and exports PATH so that `python` is the environment's
#
# VENV names the folder (default .venv); PYTHON the interpreter that it is made with (default: the first of python3,
# python3.14 ... python3.11 that is new enough). What is installed there already is used as it is.

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

make_environment() {
    local venv=${VENV:-.venv} candidate found=""
    local candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    # pip is what venv installs last: without it the folder is what an interrupted start has left.
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        for candidate in "${candidates[@]}"; do
            if is_new_enough "$candidate"; then
                found=$candidate
                break
            fi
        done
        if [ -z "$found" ]; then
            echo "error: wanted Python 3.11 or newer, found none among: ${candidates[*]}; name one with PYTHON=/path/to/python" >&2
            return 2
        fi
        echo "== environment: $venv, from $("$found" --version)"
        "$found" -m venv --clear "$venv" || { echo "error: '$found -m venv $venv' failed (on Debian: apt install python3-venv)" >&2; return 1; }
    fi
    if ! is_new_enough "$venv/bin/python"; then
        echo "error: $venv has $("$venv/bin/python" --version), wanted 3.11 or newer; remove it or name another with VENV=..." >&2
        return 2
    fi
    PATH=$(cd "$venv/bin" && pwd):$PATH
    export PATH
    echo "== packages: $1"
    python -m pip install --quiet --disable-pip-version-check -r "$1" || { echo "error: installing $1 failed" >&2; return 1; }
}

#!/usr/bin/env bash
# Makes the environment and runs the tests:  bash scripts/test.sh [pytest arguments, e.g. -m "not slow" or tests/test_model.py]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
make_environment requirements-dev.txt
# A test process for each core, up to eight, and one thread in each: more would only make them wait for one another.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec python -m pytest -n logical --maxprocesses=8 --dist=worksteal "$@"

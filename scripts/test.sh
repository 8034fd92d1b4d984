#!/usr/bin/env bash
# Makes the environment and runs the tests:  bash scripts/test.sh [pytest arguments, e.g. -m "not slow" or tests/test_model.py]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
make_environment requirements-dev.txt
# Tests run small models beside each other's processes: a thread for each core would only make them wait for one another.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec python -m pytest "$@"

#!/usr/bin/env bash
# The long form of the fault tests:  bash scripts/soak.sh [--kills=50] [--seed=0] [--minutes=30] [--cases=10000]
#
# Three parts, about a quarter of an hour on two quiet cores: every test in tests/faults, those that CI leaves out among them;
# runs killed at random places and moments (tests/faults/soak.py); broken inputs (tests/faults/fuzz.py). It stops at the first
# failure with exit status 1 and says the seed. Needs the environment that scripts/test.sh makes; VENV names another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kills=50 seed=0 minutes=30 cases=10000
for argument in "$@"; do
    value=${argument#*=}
    case $argument in
        --kills=* | --seed=* | --minutes=* | --cases=*)
            [[ $value =~ ^[0-9]+$ ]] || { echo "error: $argument: wanted a whole number" >&2; exit 2; }
            ;;&
        --kills=*) kills=$value ;;
        --seed=*) seed=$value ;;
        --minutes=*) minutes=$value ;;
        --cases=*) cases=$value ;;
        *) echo "error: $argument: wanted --kills=N, --seed=N, --minutes=N or --cases=N" >&2; exit 2 ;;
    esac
done
[ ! -x "${VENV:-.venv}/bin/python" ] || PATH=$(cd "${VENV:-.venv}/bin" && pwd):$PATH
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE SOAK=1

echo "== 1 of 3: every fault once (tests/faults), about 6 minutes"
python -m pytest -q tests/faults
echo "== 2 of 3: $kills kills, seed $seed, at most $minutes minutes"
python -m tests.faults.soak --kills="$kills" --seed="$seed" --minutes="$minutes"
echo "== 3 of 3: $cases broken inputs, seed $seed, about $((cases / 3000 + 1)) minutes"
python -m tests.faults.fuzz --cases="$cases" --seed="$seed"
echo "== all three parts passed"

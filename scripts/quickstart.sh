#!/usr/bin/env bash
# From a fresh clone to two loss curves in one picture, on a machine without a GPU: trains the paper's baseline (sa) and
# exclusive self attention (xsa) on the same tokens with the same seed and compares them.
#
#   bash scripts/quickstart.sh [--key=value ...]      # extra settings go to both runs, e.g. --seed=2 --max_iters=200
#
# OUT names the folder of the results (default runs/quickstart), VENV and PYTHON the environment (scripts/environment.sh).
# Run again after an interruption, it goes on where it was.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
out=${OUT:-runs/quickstart}
for argument in "$@"; do
    case $argument in
        --help | -h)
            sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --out_dir=* | --attention=* | --init_from=* | --dataset=*)
            echo "error: $argument is what quickstart.sh sets itself; use OUT=... for the folder" >&2
            exit 2
            ;;
        --*=*) ;;
        *)
            echo "error: $argument is not of the form --key=value" >&2
            exit 2
            ;;
    esac
done

# shellcheck source=scripts/environment.sh
source scripts/environment.sh
echo "== takes about five minutes on two cores, after the packages (torch is the large one) are there"
make_environment requirements-quickstart.txt
# Threads that wait without spinning: beside any other busy program the default is several times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

echo "== data: bytes of the presidential messages, data/quickstart"
python -m data.local

# Ctrl-C or SIGTERM: train.py saves and exits with 0; then this script ends too.
child="" stopped=""
trap 'stopped=130; [ -z "$child" ] || kill -INT "$child" 2>/dev/null' INT
trap 'stopped=143; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
for attention in sa xsa; do
    echo "== training $attention, $out/$attention"
    python train.py config/quickstart.py "$@" --attention=$attention --out_dir="$out/$attention" --init_from=auto &
    child=$!
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
    status=0
    wait "$child" || status=$?
    child=""
    [ -z "$stopped" ] || { echo "stopped; the same command goes on from here"; exit "$stopped"; }
    [ "$status" -eq 0 ] || exit "$status"
done

echo "== comparison"
python -m scripts.compare "$out/sa" "$out/xsa" --out="$out"

echo "== a sample of xsa"
python -m scripts.sample "$out/xsa" --max_new_tokens=300

cat <<EOT

== done. The picture: $out/comparison.png. The table: $out/comparison.md. All numbers: $out/*/metrics.jsonl.
At this size no gain from XSA is to be expected, and one seed could not tell one from chance; this shows that everything
works. What a comparison that means something takes is in README.md, "The paper's runs".
EOT

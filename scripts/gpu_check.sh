#!/usr/bin/env bash
# Checks a GPU machine and measures on it; laid out for about six minutes on one H200: step time, MFU and memory of the 124M
# shape (NanoGPT, sa, xsa) and of the 1.4B shape (sa, xsa), compiled, in bf16; then 300 steps of real training at the 124M
# shape on bytes of local text, stopped by SIGTERM after about 150 steps, continued, and checked.
#
#   bash scripts/gpu_check.sh [--out=DIR]              # needs a GPU with 90 GB and requirements.txt's torch, numpy, tqdm
#   bash scripts/gpu_check.sh --presets [--out=DIR]    # in place of that every preset of attention at the 124M shape: compiled,
#                                                      # compared with its definition, timed beside sa; at most eight minutes
#   bash scripts/gpu_check.sh --speed [--out=DIR]      # in place of that the paper's sizes with sa, xsa and gsxa, XSA's pass and
#                                                      # the loss (scripts.bench sizes); at most nine minutes
#   bash scripts/gpu_check.sh --cpu [--presets|--speed] [--out=DIR]    # the same at a size for two cores, to check this script
#
# PYTHON names the interpreter (default python). DIR (default out_gpu_check) must not exist yet; it gets every number as JSON, the
# run, and results.md, a table for README.md, which is also printed. Exit status: 0 if everything ran and the training is right,
# whatever the figures; 1 a failure; 2 bad arguments.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
python=${PYTHON:-python}
out=out_gpu_check
on_cpu=false
what=training
for argument in "$@"; do
    case $argument in
        --cpu) on_cpu=true ;;
        --presets | --speed) what=${argument#--} ;;
        --out=?*) out=${argument#--out=} ;;
        *)
            echo "error: wanted --cpu, --presets, --speed or --out=DIR, found $argument" >&2
            exit 2
            ;;
    esac
done
if [ -e "$out" ]; then
    echo "error: $out exists already; remove it or name another folder with --out=DIR" >&2
    exit 2
fi

fail() {
    echo "error: $1" >&2
    exit 1
}

# micro_batch_size of NanoGPT's shape: its logits, 16 x 2048 x 50304, have fewer than 2**31 elements.
small=(config/gpt2_124m.py --global_batch_size=64 --micro_batch_size=16 --rounds=12)
large=(config/1.4b.py --global_batch_size=32 --micro_batch_size=8 --rounds=10)
training=(config/gpt2_124m.py --global_batch_size=32 --micro_batch_size=32 --eval_tokens=262144)
each=(config/gpt2_124m.py --global_batch_size=16 --micro_batch_size=16 --rounds=8 --minutes=6.5)
machine=(--device=cuda --dtype=bfloat16 --compile=True)
speed=(--rounds=10)
minutes="about six minutes on one H200"
if $on_cpu; then
    tiny=(--n_layer=2 --n_embd=64 --n_head=2 --head_dim=32 --block_size=64 --vocab_size=512 --global_batch_size=8)
    small+=("${tiny[@]}" --micro_batch_size=4 --rounds=3)
    large+=("${tiny[@]}" --micro_batch_size=4 --rounds=3)
    each+=("${tiny[@]}" --n_head=8 --head_dim=8 --micro_batch_size=4 --rounds=2)
    training+=("${tiny[@]}" --micro_batch_size=8 --eval_tokens=4096 --learning_rate=3e-3)
    speed=(--rounds=2)
    machine=(--device=cpu)
    minutes="sizes cut for a CPU: about a minute"
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: $python has no torch that sees a GPU; PYTHON=... names another interpreter, --cpu checks this script alone" >&2
    exit 2
fi
mkdir -p "$out"
if [ $what = speed ]; then
    exec "$python" -m scripts.bench sizes "${speed[@]}" "${machine[@]}" --out="$out"
fi
if [ $what = presets ]; then
    status=0
    "$python" -m scripts.bench presets "${each[@]}" "${machine[@]}" --json="$out/presets.json" || status=$?
    [ ! -f "$out/presets.json.md" ] || mv "$out/presets.json.md" "$out/results.md"
    exit "$status"
fi
echo "two benchmarks and 300 steps of training into $out, $minutes"
SECONDS=0

echo "== step at the 124M shape: NanoGPT, sa, xsa"
"$python" -m scripts.bench step "${small[@]}" "${machine[@]}" --json="$out/bench_124m.json"

echo "== step at the 1.4B shape: sa, xsa (${SECONDS} s so far)"
"$python" -m scripts.bench step "${large[@]}" "${machine[@]}" --compare=xsa --json="$out/bench_1.4b.json"

echo "== data: bytes of local text (${SECONDS} s so far)"
"$python" -m data.local --out="$out/data"

echo "== 300 training steps, stopped after about 150 and continued (${SECONDS} s so far)"
run=$out/run
trainer=
trap '[ -z "$trainer" ] || kill -KILL "$trainer" 2>/dev/null || true' EXIT
train=("$python" train.py "${training[@]}" "${machine[@]}" --attention=xsa --dataset="$out/data" --out_dir="$run" --init_from=auto
    --max_iters=300 --warmup_iters=30 --eval_interval=100 --log_interval=1 --save_interval=1000)
steps() {
    local n
    n=$(grep -c '"train"' "$run/metrics.jsonl" 2>/dev/null) || true
    echo "${n:-0}"
}
"${train[@]}" >"$out/train_1.log" 2>&1 &
trainer=$!
until [ "$(steps)" -ge 150 ]; do
    kill -0 "$trainer" 2>/dev/null || fail "the training ended before step 150: $(tail -n 1 "$out/train_1.log")"
    sleep 0.1
done
kill -TERM "$trainer"
wait "$trainer" || fail "the training that was stopped exited with $?: $(tail -n 1 "$out/train_1.log")"
trainer=
stopped_at=$(steps)
[ "$stopped_at" -lt 300 ] || fail "the training was not stopped: it came to its end"
[ -f "$(printf '%s/ckpt_%08d.pt' "$run" "$stopped_at")" ] || fail "there is no checkpoint of step $stopped_at in $run"
"${train[@]}" >"$out/train_2.log" 2>&1 || fail "the continued training exited with $?: $(tail -n 1 "$out/train_2.log")"

"$python" - "$out" "$stopped_at" >"$out/results.md" <<'EOT' || fail "the checks did not pass"
import json
import statistics
import sys
from pathlib import Path

out, stopped_at = Path(sys.argv[1]), int(sys.argv[2])
lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
train = [line for line in lines if line["split"] == "train"]
val = [line for line in lines if line["split"] == "val"]
if [line["step"] for line in train] != list(range(1, 301)) or [line["step"] for line in val] != [0, 100, 200, 300]:
    sys.exit("the steps in metrics.jsonl are not 1 to 300, or the evaluations not at 0, 100, 200 and 300")
if any(line["loss"] is None for line in train):
    sys.exit("a training step was skipped")
first, last = (statistics.fmean(line["loss"] for line in part) for part in (train[:30], train[-30:]))
around = [line["loss"] for line in train[stopped_at - 10 : stopped_at + 10]]
if last > first - 1 or val[-1]["loss"] > val[0]["loss"] - 1:
    sys.exit(f"the training loss went from {first:.3f} to {last:.3f}, the validation loss from {val[0]['loss']:.3f} to "
             f"{val[-1]['loss']:.3f}: less than 1 nat down")
if statistics.fmean(around[10:]) > statistics.fmean(around[:10]) + 0.5:
    sys.exit(f"the loss jumped where the run was continued: {around}")

rows = []
for file in ("bench_124m.json", "bench_1.4b.json"):
    result = json.loads((out / file).read_text())
    config = result["config"]
    shape = f"{config['n_layer']} x {config['n_embd']}, {config['block_size']} x {config['micro_batch_size']}"
    if not rows:
        kind = f"{result['dtype']}, {'compiled' if result['compiled'] else 'eager'}"
        rows += [f"{result['hardware']['device']}, torch {result['versions']['torch']}, {kind}", "",
                 "| layers x width, T x micro-batch | arm | ms a step | tokens/s | MFU | peak memory | against | time | memory |",
                 "|---|---|---|---|---|---|---|---|---|"]
    for arm, measured in result["arms"].items():
        other = {"sa": "nanogpt", "xsa": "sa"}.get(arm)
        ratio = result["ratios"].get(f"{arm}/{other}")
        low, median, high = measured["step_ms_quartiles"]
        mfu = "n/a" if measured["mfu"] is None else f"{measured['mfu']:.1%}"
        compared = f"{other} | {ratio['time']:.3f} | {'n/a' if ratio['memory'] is None else format(ratio['memory'], '.3f')}" if ratio else "| |"
        rows.append(f"| {shape} | {arm} | {median:.1f} ({low:.1f} to {high:.1f}) | {measured['tokens_per_s']:,.0f} | {mfu} "
                    f"| {measured['peak_memory_bytes'] / 1e9:.3f} GB | {compared} |")
rate = statistics.median(line["tokens_per_s"] for line in train[50:])
mfu = "" if train[-1]["mfu"] is None else f", MFU {statistics.median(line['mfu'] for line in train[50:]):.1%}"
config = json.loads((out / "run" / "config.json").read_text())["config"]
shape, tokens = f"{config['n_layer']} x {config['n_embd']}", train[-1]["tokens"]
rows += ["", f"Training of xsa, {shape}, {tokens:,} bytes of text: stopped (SIGTERM) at step {stopped_at}, continued to "
         f"300; training loss {first:.2f} (first 30 steps) to {last:.2f} (last 30), validation loss {val[0]['loss']:.2f} to "
         f"{val[-1]['loss']:.2f}; median {rate:,.0f} tokens/s{mfu}."]
print("\n".join(rows))
EOT
echo "== results, $out/results.md (${SECONDS} s in all)"
cat "$out/results.md"

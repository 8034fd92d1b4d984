"""scripts/slurm/train.sbatch with stand-ins for Slurm's commands: what it starts, and stop, save, requeue, resume."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_train import ROOT, SMALL, build_dataset, parsed, processes_of

STUBS = {
    "scontrol": 'echo "scontrol $*" >> "$LOG"; [ "$1" = show ] && echo "127.0.0.1"; exit 0',
    "srun": 'echo "srun $*" >> "$LOG"; shift; exec "$@"',
}


@pytest.fixture
def slurm(tmp_path):
    """Starts the template as sbatch would on one node with two ranks; returns (start, log)."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, body in STUBS.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stubs / name).chmod(0o755)
    (stubs / "torchrun").write_text(f"#!/usr/bin/env bash\nexec {sys.executable} -m torch.distributed.run \"$@\"\n")
    (stubs / "torchrun").chmod(0o755)
    build_dataset(tmp_path / "data", [f"document {i} " * 200 for i in range(120)])
    log = tmp_path / "log"
    environment = os.environ | {
        "LOG": str(log), "PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1]", "SLURM_NNODES": "1", "GPUS_PER_NODE": "2", "OMP_NUM_THREADS": "1",
        "PYTHON_ENV": "no-such-environment",
    }

    def start(*arguments: str) -> subprocess.Popen:
        command = ["bash", str(ROOT / "scripts/slurm/train.sbatch"), *SMALL, f"--dataset={tmp_path}/data", *arguments]
        return subprocess.Popen(command, env=environment, text=True, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return start, log


@pytest.mark.slow  # torchrun starts two ranks three times
def test_time_limit_saves_and_requeues_and_the_next_start_goes_on(slurm, tmp_path):
    start, log = slurm
    out_dir = tmp_path / "r"
    endless = [f"--out_dir={out_dir}", "--max_iters=100000", "--save_interval=100000", "--eval_interval=100000"]
    process = start(*endless)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not ((out_dir / "metrics.jsonl").exists() and len(parsed(out_dir)) > 3):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGUSR1)  # what --signal=B:USR1@300 does
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert "stopped on request" in output and "back into the queue" in output
    calls = log.read_text()
    assert f"scontrol requeue {os.getpid()}" in calls
    assert re.search(r"srun --kill-on-bad-exit=1 torchrun --nnodes=1 --nproc_per_node=2 --rdzv_backend=c10d "
                     rf"--rdzv_id={os.getpid()} --rdzv_endpoint=127.0.0.1:\d+ train.py .*--init_from=auto", calls)
    step = parsed(out_dir)[-1]["step"]
    assert (out_dir / f"ckpt_{step:08d}.pt").exists()

    log.unlink()
    process = start(f"--out_dir={out_dir}", f"--max_iters={step + 5}", "--save_interval=100000", "--eval_interval=100000")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0 and "continuing from" in output, output
    assert "requeue" not in log.read_text()
    trained = [m["step"] for m in parsed(out_dir) if m["split"] == "train"]
    assert trained == list(range(1, step + 6))


@pytest.mark.slow  # torchrun starts two ranks twice
def test_request_while_the_ranks_still_load_torch_is_not_lost_and_kills_none(slurm, tmp_path):
    start, log = slurm
    endless = [f"--out_dir={tmp_path}/r", "--max_iters=100000", "--save_interval=100000", "--eval_interval=100000"]
    process = start(*endless)
    deadline = time.monotonic() + 90
    ranks: list[int] = []
    while not ranks:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        ranks = [pid for pid in processes_of(tmp_path / "r") if b"-u\0train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{ranks[0]}/status").read_text())[1]
    assert not int(caught, 16) & 1 << signal.SIGUSR1 - 1, "it listens already: the test came too late"
    os.kill(process.pid, signal.SIGUSR1)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0 and "back into the queue" in output, output
    assert "stopped on request" in output and f"scontrol requeue {os.getpid()}" in log.read_text()


@pytest.mark.slow  # torchrun starts two ranks
def test_failure_is_passed_on_and_not_requeued(slurm, tmp_path):
    start, log = slurm
    process = start(f"--out_dir={tmp_path}/r", "--micro_batch_size=3")
    output, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "--micro_batch_size=2" in output
    assert "requeue" not in log.read_text()


def test_options_are_those_that_the_text_promises():
    text = (ROOT / "scripts/slurm/train.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.M))
    assert options["signal"] == "B:USR1@300" and "requeue" in options and options["open-mode"] == "append"
    assert options["ntasks-per-node"] == "1"  # torchrun starts the ranks of a node
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", ROOT / "scripts/slurm/train.sbatch"], check=True)

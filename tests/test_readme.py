"""Every command in README.md is run, its sizes cut by flags, in a copy of the repository; its table of settings is current."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from configurator import Config, load
from data.pretokenized import REPOSITORY
from model import GPT
from presets import PRESETS
from tests.fake_hub import FakeHub, readme
from tests.test_documents import words, write_parquet

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line and not line.startswith("#")
]

CUT = ("--dataset=quickstart --vocab_size=257 --n_layer=2 --n_embd=64 --block_size=32 --global_batch_size=8 --micro_batch_size=2 "
       "--max_iters=6 --warmup_iters=2 --learning_rate=3e-3 --eval_tokens=640 --eval_interval=3 --log_interval=1")
# Instead of the 86 MB that eval.local_data would want.
TASK_ITEMS = ("from pathlib import Path; from eval.local_data import TASKS, write; from tests.task_items import rows; "
              "[write(task, rows(task), Path('data/tasks'), 'from the tests') for task in TASKS]")
STUBS = {
    "scontrol": '[ "$1" = show ] && echo localhost; exit 0',
    "srun": 'shift; exec "$@"',
    "squeue": "exit 0",
    "sbatch": 'while [ "${1#--}" != "$1" ]; do shift; done; export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n '
              f'SLURM_NNODES=1 GPUS_PER_NODE=2; exec bash "$@" {CUT}',
}


def cut(command: str) -> str:
    """The same command at a size for two cores."""
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=2").replace("--nnodes=4", "--nnodes=1")
    if "scripts.reproduce" in command:  # on Fig 1's two runs
        command = re.sub(r"reproduce (all|fig\d|presets)", "reproduce fig1", command).replace("--n_gpus=32", "--n_gpus=2")
        if "tiny" in command:
            return f"{command} --max_iters=6 --warmup_iters=2 --eval_tokens=1024"
        return f"{command} {CUT} --n_head=2 --head_dim=32" if "--launch" in command or "--collect" in command else command
    if "train.py" in command:
        return f"{command.replace('diagnostics_interval=100', 'diagnostics_interval=2')} {CUT}"
    if "eval.local_data" in command:
        return f'{command} --help && python -c "{TASK_ITEMS}"'
    if "eval.tasks" in command:
        return f"{command} --device=cpu --limit=2" + ("" if "--task_data" in command else " --task_data=data/tasks")
    if "quickstart.sh" in command:
        return f"{command} --max_iters=6 --eval_tokens=4096"
    if "test.sh" in command:
        return f"{command} -q tests/test_configurator.py"
    if "soak.sh" in command:
        return "bash -n scripts/soak.sh && python -m tests.faults.soak --kills=2 && python -m tests.faults.fuzz --cases=100"
    if "scripts.sample" in command:
        return f"{command} --max_new_tokens=20"
    if "bench tokenize" in command:
        return f"{command} --rounds=2 --megabytes=8"
    if "scripts.bench block" in command:
        return f"{command} --rounds=2 --n_head=4 --n_embd=64 --block_size=16 --lengths=16 --widths=64 --micro_batch_size=2"
    if "bench decode" in command:
        return f"{command} --rounds=2 --prompt=8 --new=8 --n_layer=1 --n_head=4 --n_embd=64 --vocab_size=500"
    if "eval.bias" in command:
        return f"{command} --sequences=16"
    if "bench compare" in command:
        return command
    if "bench presets" in command:
        command += " --presets=softcap,gsxa"
    if "scripts.bench" in command:
        return f"{command} --rounds=2 --n_layer=1 --n_head=4 --n_embd=64 --block_size=64 --vocab_size=500 --eval_tokens=640"
    if "gpu_check.sh" in command:
        return f"{command} --cpu"
    return command


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy without what is not in git, with text where a download would lie, and stand-ins for Slurm's commands and for
    installation."""
    clone = tmp_path_factory.mktemp("readme") / "nanoXSA"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    bin_folder = clone.parent / "bin"
    bin_folder.mkdir()
    for name, body in STUBS.items():
        (bin_folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin_folder / name).chmod(0o755)
    (clone / "downloads" / "fineweb").mkdir(parents=True)
    for i in range(3):
        write_parquet(clone / "downloads" / "fineweb" / f"{i}.parquet", words(2000, seed=i))
    return clone


@pytest.fixture(scope="module")
def environment(clone, gpt2_vocabulary) -> Iterator[dict[str, str]]:
    """Variables of a person's shell, with a hub on this computer."""
    documents = write_parquet(clone.parent / "documents.parquet", words(20_000)).read_bytes()
    subsets = {f"sample-{size}BT": f"sample/{size}BT/*" for size in (10, 100)}
    files = {pattern.replace("*", "000.parquet"): documents for pattern in subsets.values()} | {"README.md": readme(subsets)}
    shard = np.concatenate([np.array([20240520, 1, 3, *[0] * 253], dtype="<i4").view(np.uint16), np.array([50256, 1, 2], "<u2")])
    shards = {f"fineweb_{name}.bin": shard.tobytes() for name in ("val_000000", *(f"train_{n:06d}" for n in range(1, 11)))}
    with FakeHub({"HuggingFaceFW/fineweb": files, REPOSITORY: shards}) as hub:
        yield os.environ | hub.environment() | {
            "PATH": f"{clone.parent / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VENV": str(Path(sys.executable).parent.parent), "HEAD": "localhost", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline",
        }


@pytest.mark.slow  # some twenty commands, each of which imports torch
def test_every_command_runs(clone, environment):
    """In the order of the text, each on what those before it left."""
    assert len(COMMANDS) >= 15
    for command in COMMANDS:
        result = subprocess.run(["bash", "-c", cut(command)], cwd=clone, env=environment, text=True, timeout=600,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert result.returncode == 0, f"{command}\n{cut(command)}\n{result.stdout[-3000:]}"
    for name in ("quickstart/comparison.png", "quickstart/comparison.md", "1.4b/comparison.png", "1.4b-xsa-sink4/metrics.jsonl",
                 "block/block.png", "quickstart/bias/bias.png"):
        assert (clone / "runs" / name).stat().st_size > 0


@pytest.mark.slow  # trains the quick start's models for a few steps
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_quickstart_stops_on_request_and_goes_on(clone, environment, tmp_path, number, status):
    command = ["bash", "scripts/quickstart.sh", "--max_iters=30", "--eval_tokens=2048", "--log_interval=1"]
    options = {"cwd": clone, "env": environment | {"OUT": str(tmp_path)}, "text": True, "stdout": subprocess.PIPE,
               "stderr": subprocess.STDOUT}
    # As a terminal starts it: a shell cannot trap what it was started to ignore, as SIGINT is for commands in the background.
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                               **options)
    metrics = tmp_path / "sa" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status and "goes on from here" in output, output
    assert list((tmp_path / "sa").glob("ckpt_*.pt")) and not (tmp_path / "xsa").exists()
    result = subprocess.run(command, timeout=300, **options)
    assert result.returncode == 0 and "continuing from" in result.stdout, result.stdout
    assert (tmp_path / "comparison.png").exists()


def test_every_file_named_exists():
    for name in set(re.findall(r"(?:config|scripts|data|tests)/[\w./-]+\.(?:py|sh|sbatch)", README)):
        assert (ROOT / name).exists(), name
    for module in set(re.findall(r"python -m ((?:data|scripts|eval)\.\w+)", README)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def settings_table() -> str:
    """The README's table of settings, as configurator.py has them."""
    hints = get_type_hints(Config, include_extras=True)
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for f in fields(Config):
        assert f.default is not MISSING
        rows.append(f"| `{f.name}` | {f.default} | {get_args(hints[f.name])[1]} |")
    return "\n".join(rows)


def test_settings_table_is_current():
    table = settings_table()
    assert table in README, f"README.md wants this table of settings:\n{table}"


# Where a preset is plain attention, by a test of tests/test_attention.py, and the public code that it is compared with there.
PROOFS = {
    "sa": ("", "Llama"), "xsa": ("", ""), "xsa_learned": ("alpha = 0, its start", ""),
    "gqa": ("n_kv_head = n_head", "Llama"), "qknorm": ("nowhere", "Qwen3"), "qkclip": ("no logit passes", ""),
    "resformer": ("mix of 0 and 1", ""), "nope": ("RoPE's angles 0", ""), "rnope": ("RoPE's angles 0", ""),
    "softcap": ("cap to infinity", "Gemma 2"), "swa": ("window = T", "Gemma 2, gpt-oss"),
    "ssmax": ("s ln n = 1", ""), "sink": ("logit to -infinity", "gpt-oss"),
    "sigmoid": ("logits to -infinity, but for the sum", ""), "diff": ("lambda = 0, then normed", "DiffLlama"),
    "gated": ("W = 0, its start", ""), "gated_element": ("W = 0, its start", ""), "qwen3": ("nowhere", "Qwen3"),
    "gemma2": ("its parts'", "Gemma 2"), "gpt_oss": ("its parts'", "gpt-oss"), "gsxa": ("its parts'", ""),
}


def methods_rows() -> list[str]:
    """The README's table of presets at GPT-2's 124M size, but for the last column, which is measured."""
    def model(name: str) -> GPT:
        with torch.device("meta"):
            return GPT(load(["config/gpt2_124m.py", f"--attention={name}"]).model_config())

    def count(gpt: GPT) -> int:
        return sum(p.numel() for p in gpt.parameters())

    rows, plain = [], model("sa")
    for name, preset in PRESETS.items():
        gpt = model(name)
        switches = ", ".join(f"{key}={getattr(gpt.config, key)}" for key in preset.switches)
        line = preset.line if preset.paper == "-" else f"[{preset.line}](https://arxiv.org/abs/{preset.paper})"
        where, code = PROOFS.get(name, ("", ""))
        rows.append(f"| `{name}` | {preset.stage} | {line} | {f'`{switches}`' if switches else ''} | "
                    f"{count(gpt) - count(plain):+,} | {where} | {code} | ")
    return rows


def test_methods_table_is_current():
    rows = methods_rows()
    missing = [row for row in rows if row not in README]
    assert not missing, "README.md wants these rows, each with a last cell of what was measured:\n" + "\n".join(missing)
    assert re.search(r"\|\n" + r"[^|\n]+\|\n".join(map(re.escape, rows)), README), "nothing between them, and in this order"


VARIANT = (re.search(r"```diff\n(.*?)```", README, re.S) or ["", ""])[1]


def test_the_example_of_a_variant_is_short():
    changed = [line for line in VARIANT.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert 5 < len(changed) < 30


@pytest.mark.slow  # runs the tests of attention in a process of its own
def test_the_example_of_a_variant_works(clone, tmp_path):
    """As it stands in the README: it applies, and the tests then take the new preset and pass."""
    copy = tmp_path / "copy"
    shutil.copytree(clone, copy, ignore=shutil.ignore_patterns("runs", "data/quickstart", "downloads", "out*"))
    options = {"cwd": copy, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run(["git", "apply", "-C1", "-"], input=VARIANT, **options)
    assert result.returncode == 0, result.stdout
    name = re.search(r'\+    "(\w+)": Preset', VARIANT)[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", f"{name} or presets_name or gsxa_and", "-m", "not slow",
                             "tests/test_attention.py", "tests/test_presets.py", "tests/test_diagnostics.py",
                             "tests/test_attention_training.py", "tests/test_reproduce.py"], env=environment, **options)
    assert result.returncode == 0 and int(re.search(r"(\d+) passed", result.stdout)[1]) > 15, result.stdout

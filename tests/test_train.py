"""train.py as its users start it: one process and two, resumed, stopped, killed, failing."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from configurator import load
from data import local
from data.loader import Loader
from data.shards import ShardWriter, open_dataset
from data.tokenizer import get_tokenizer
from model import GPT

ROOT = Path(__file__).parent.parent
SMALL = [
    "--vocab_size=257", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--global_batch_size=8",
    "--micro_batch_size=2", "--max_iters=12", "--warmup_iters=3", "--learning_rate=1e-2", "--eval_interval=4",
    "--eval_tokens=608", "--log_interval=1", "--save_interval=3", "--device=cpu",
]


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> str:
    """Sixty documents of this repository's own prose and code, in bytes."""
    folder = tmp_path_factory.mktemp("data") / "bytes"
    sources = sorted(ROOT.glob("*.py")) + sorted(ROOT.glob("config/*.py"))
    texts = [source.read_text()[i : i + 4000] for source in sources for i in range(0, source.stat().st_size, 4000)]
    build_dataset(folder, texts)
    return str(folder)


def build_dataset(folder: Path, texts: list[str]) -> None:
    source = folder.parent / f"{folder.name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert local.main([f"--input={source}", "--tokenizer=byte", f"--out={folder}", "--val_fraction=0.1"]) == 0


def start(*arguments: str, ranks: int = 1, script: str = "train.py") -> subprocess.Popen:
    """train.py in a process group of its own, one thread a rank."""
    launcher = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.Popen([*launcher, script, *arguments], cwd=ROOT, text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)})


def finish(process: subprocess.Popen, timeout: int = 180) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output


def metrics(out_dir: str | Path) -> list[dict]:
    return [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]


def curve(out_dir: str | Path) -> list[tuple]:
    """What must be equal between two runs: everything but times and memory."""
    cost = ("step_ms", "data_ms", "tokens_per_s", "mfu", "peak_memory_gb")
    return [(m["step"], m["tokens"], m["split"], {k: v for k, v in m.items() if k not in cost}) for m in metrics(out_dir)]


@pytest.fixture(scope="session")
def straight(dataset, tmp_path_factory) -> Path:
    """A run of twelve steps without any incident."""
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={out_dir}", "--attention=xsa"]) == 0
    return out_dir


# --- a run -------------------------------------------------------------------------------------------------------------------


def test_run_folder(straight, dataset):
    lines = metrics(straight)
    assert [m["step"] for m in lines if m["split"] == "train"] == list(range(1, 13))
    assert [m["step"] for m in lines if m["split"] == "val"] == [0, 4, 8, 12]
    assert all(m["tokens"] == m["step"] * 8 * 32 for m in lines)
    keys = {"step", "tokens", "split", "loss"}
    more = {"lr", "grad_norm", "step_ms", "data_ms", "tokens_per_s", "mfu", "peak_memory_gb", "bad_steps", "spikes", "data_hash"}
    assert all(set(m) == (keys | more if m["split"] == "train" else keys) for m in lines)
    assert all(0 <= m["data_ms"] < m["step_ms"] for m in lines if m["split"] == "train")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert sorted(p.name for p in straight.iterdir()) == [
        "ckpt_00000009.pt", "ckpt_00000012.pt", "config.json", "latest", "log.txt", "metrics.jsonl"]
    info = json.loads((straight / "config.json").read_text())
    assert info["config"]["attention"] == "xsa" and info["config"]["n_kv_head"] == 2 and info["config"]["wandb_group"] is None
    assert info["versions"]["torch"] == torch.__version__ and info["n_params"] > 0
    assert "validation loss" in (straight / "log.txt").read_text()
    assert len(re.findall(r"first step done \d+\.\d s after the process began", (straight / "log.txt").read_text())) == 1


def test_learning_rate_is_warmup_then_cosine(straight):
    """PAPER: linear warm-up, cosine to a tenth of the peak."""
    rates = [m["lr"] for m in metrics(straight) if m["split"] == "train"]
    assert rates[:3] == pytest.approx([0.0025, 0.005, 0.0075])
    assert rates[3] == pytest.approx(0.01)
    for step in range(3, 12):
        assert rates[step] == pytest.approx(1e-3 + 9e-3 * (1 + math.cos(math.pi * (step - 3) / 9)) / 2)
    assert train.learning_rate(12, load(SMALL)) == 1e-3
    assert train.learning_rate(10, load([*SMALL, "--warmup_iters=2000"])) == pytest.approx(1e-2 * 11 / 2001)


def test_step_equals_plain_adamw(straight, dataset):
    """Three steps restated without accumulation, DDP, chunked loss, or our optimizer set-up."""
    config = load([*SMALL, f"--dataset={dataset}", "--attention=xsa"])
    model = GPT(config.model_config(), seed=config.seed)
    loader = Loader(open_dataset(dataset).train, block_size=32, global_batch_size=8, micro_batch_size=8, rank=0, world_size=1,
                    seed=config.seed, sampling="random", vocab_size=257)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    expected = [m for m in metrics(straight) if m["split"] == "train"]
    with loader.batches(0) as batches:
        for t in range(1, 4):
            x, y = next(batches)
            loss = torch.nn.functional.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
            model.zero_grad()
            loss.backward()
            norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
            assert loss.item() == pytest.approx(expected[t - 1]["loss"], rel=1e-5)
            assert norm == pytest.approx(expected[t - 1]["grad_norm"], rel=1e-4)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    g = p.grad * min(1.0, 1.0 / norm)
                    m, v = moments[name]
                    m.lerp_(g, 1 - 0.9)
                    v.lerp_(g * g, 1 - 0.95)
                    lr = expected[t - 1]["lr"]
                    p.mul_(1 - lr * (0.1 if p.ndim == 2 else 0.0))
                    p.sub_(lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))


def test_variants_see_the_same_tokens_whatever_the_evaluation(dataset, tmp_path):
    """The first loss of both variants differs by attention alone; another evaluation setting moves no training loss."""
    runs = {}
    for name, extra in {"sa": [], "eval": ["--eval_interval=1", "--eval_tokens=96"], "xsa": ["--attention=xsa"]}.items():
        assert train.main([*SMALL, *extra, f"--dataset={dataset}", f"--out_dir={tmp_path / name}", "--max_iters=4"]) == 0
        runs[name] = [m["loss"] for m in metrics(tmp_path / name) if m["split"] == "train"]
    assert runs["sa"] == runs["eval"]
    assert runs["sa"] != runs["xsa"] and runs["sa"][0] == pytest.approx(runs["xsa"][0], abs=0.1)


@pytest.mark.parametrize("extra", [
    ["--dtype=bfloat16"], ["--dtype=float16", "--attention=xsa"], ["--activation_checkpointing=True"], ["--n_sink=2"],
    ["--n_kv_head=1", "--attention=xsa"], ["--dropout=0.1"], ["--sampling=shuffle"], ["--grad_clip=0"],
])
def test_options_train(dataset, tmp_path, extra):
    assert train.main([*SMALL, *extra, f"--dataset={dataset}", f"--out_dir={tmp_path}/r"]) == 0
    losses = [m["loss"] for m in metrics(tmp_path / "r") if m["split"] == "val"]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("config", ["0.7b", "1.4b", "2.7b", "gpt2_124m"])
@pytest.mark.parametrize("attention", ["sa", "xsa"])
def test_paper_configs_start_with_sizes_cut_by_flags(dataset, tmp_path, config, attention):
    arguments = [f"config/{config}.py", f"--attention={attention}", "--n_layer=2", "--n_embd=64", "--block_size=32",
                 "--global_batch_size=4", "--micro_batch_size=2", "--max_iters=2", "--eval_tokens=64", "--log_interval=1"]
    assert train.main([*arguments, f"--dataset={dataset}", f"--out_dir={tmp_path}/r"]) == 0
    assert [m["step"] for m in metrics(tmp_path / "r")] == [0, 1, 2, 2]


def test_eval_only_prints_the_run_s_loss_and_writes_nothing(straight, dataset, capsys):
    before = {p: p.stat().st_mtime_ns for p in straight.iterdir()}
    arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={straight}", "--attention=xsa", "--eval_only=True"]
    assert train.main([*arguments, "--init_from=resume"]) == 0
    assert f"step 12: validation loss {metrics(straight)[-1]['loss']:.4f} nats" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in straight.iterdir()} == before


# --- resume ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop, extra", [
    (3, []), (4, []), (6, ["--dropout=0.2", "--sampling=shuffle"]), (8, ["--dtype=float16"]),
    (6, ["--qk_norm=True", "--qk_clip=1.5", "--diagnostics_interval=3"]),
])
def test_resumed_run_equals_the_straight_one_bit_for_bit(dataset, tmp_path, stop, extra):
    common = [*SMALL, *extra, f"--dataset={dataset}", "--attention=xsa", "--lr_decay_iters=12"]
    assert train.main([*common, f"--out_dir={tmp_path}/straight"]) == 0
    assert train.main([*common, f"--out_dir={tmp_path}/parts", f"--max_iters={stop}"]) == 0
    assert train.main([*common, f"--out_dir={tmp_path}/parts", "--init_from=resume"]) == 0
    assert [line for line in curve(tmp_path / "parts") if not (line[0] == stop and line[2] == "val" and stop % 4)] \
        == curve(tmp_path / "straight")
    a, b = (torch.load(tmp_path / run / "ckpt_00000012.pt", weights_only=True) for run in ("straight", "parts"))
    for key in a["model"]:
        assert torch.equal(a["model"][key], b["model"][key])
    for index, state in a["optimizer"]["state"].items():
        assert all(torch.equal(value, b["optimizer"]["state"][index][key]) for key, value in state.items())


def test_finished_run_started_again_writes_nothing(straight, dataset, capsys):
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in straight.iterdir()}
    for mode in ("resume", "auto"):
        arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={straight}", "--attention=xsa", f"--init_from={mode}"]
        assert train.main(arguments) == 0
        assert "finished at step 12" in capsys.readouterr().out
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in straight.iterdir()} == before


def test_continue_from_a_named_checkpoint(straight, dataset, tmp_path):
    arguments = [*SMALL, f"--dataset={dataset}", "--attention=xsa"]
    assert train.main([*arguments, f"--out_dir={tmp_path}/new", f"--init_from={straight}/ckpt_00000009.pt"]) == 0
    assert curve(tmp_path / "new") == [line for line in curve(straight) if line[0] > 9]


@pytest.mark.parametrize("change, key", [
    (["--attention=sa"], "attention"), (["--n_embd=64"], "n_embd"), (["--global_batch_size=16"], "global_batch_size"),
    (["--seed=2"], "seed"), (["--sampling=shuffle"], "sampling"),
])
def test_resume_with_another_model_or_batch_is_refused(straight, dataset, capsys, change, key):
    before = sorted(p.stat().st_mtime_ns for p in straight.iterdir())
    arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={straight}", "--attention=xsa", "--init_from=resume"]
    assert train.main([*arguments, "--max_iters=20", *change]) == 2
    assert key in capsys.readouterr().err
    assert sorted(p.stat().st_mtime_ns for p in straight.iterdir()) == before


def test_resume_on_other_data_is_refused(straight, tmp_path, capsys):
    build_dataset(tmp_path / "other", ["another text. " * 300] * 120)
    arguments = [*SMALL, f"--dataset={tmp_path}/other", f"--out_dir={straight}", "--attention=xsa", "--init_from=auto"]
    assert train.main([*arguments, "--max_iters=20"]) == 2
    assert "other data" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["resume", "nowhere/ckpt_00000001.pt"])
def test_nothing_to_resume_from_is_an_error(dataset, tmp_path, capsys, mode):
    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", f"--init_from={mode}"]) == 2
    assert mode in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_scratch_never_writes_over_a_run(straight, dataset, capsys):
    before = {p: p.read_bytes() for p in straight.iterdir()}
    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={straight}"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in straight.iterdir()} == before


def test_damaged_checkpoint_falls_back_to_the_one_before(straight, dataset, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "r")
    newest = tmp_path / "r" / "ckpt_00000012.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--attention=xsa", "--init_from=auto"]
    assert train.main(arguments) == 0
    assert "ckpt_00000012.pt is damaged" in capsys.readouterr().err
    assert curve(tmp_path / "r") == curve(straight)


@pytest.mark.slow  # starts train.py up to eight times
def test_sigkill_at_random_moments_then_auto_equals_the_straight_run(straight, dataset, tmp_path):
    """Killed in start-up, in steps, in evaluation and in checkpoint writes, as the moments fall."""
    arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--attention=xsa", "--init_from=auto"]
    rng = random.Random(0)
    killed = 0
    for _ in range(6):
        process = start(*arguments)
        deadline = time.monotonic() + 60
        while not (tmp_path / "r" / "metrics.jsonl").exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.25) if killed else 0.1)
        if process.poll() is None:
            killed += 1
            os.killpg(process.pid, signal.SIGKILL)
        finish(process)
    assert killed >= 1
    process = start(*arguments)
    output = finish(process)
    assert process.returncode == 0, output
    assert curve(tmp_path / "r") == curve(straight)
    assert not list((tmp_path / "r").glob(".*"))


# --- two ranks ---------------------------------------------------------------------------------------------------------------

FIFTY = ["--max_iters=50", "--micro_batch_size=2", "--save_interval=20", "--learning_rate=3e-3", "--eval_interval=10"]


@pytest.mark.slow  # torchrun starts two processes, twice
def test_two_ranks_equal_one_over_fifty_steps_and_across_resumes(dataset, tmp_path):
    common = [*SMALL, *FIFTY, f"--dataset={dataset}", "--attention=xsa", "--lr_decay_iters=50"]
    assert train.main([*common, f"--out_dir={tmp_path}/one"]) == 0
    process = start(*common, f"--out_dir={tmp_path}/two", "--max_iters=25", ranks=2)
    output = finish(process)
    assert process.returncode == 0, output
    # elastic: 2 ranks, then 1, then 2
    assert train.main([*common, f"--out_dir={tmp_path}/two", "--init_from=resume", "--max_iters=35"]) == 0
    process = start(*common, f"--out_dir={tmp_path}/two", "--init_from=resume", ranks=2)
    output = finish(process)
    assert process.returncode == 0, output
    one = [m for m in metrics(tmp_path / "one")]
    two = [m for m in metrics(tmp_path / "two") if (m["step"], m["split"]) not in ((25, "val"), (35, "val"))]
    assert [(m["step"], m["split"], m["tokens"]) for m in one] == [(m["step"], m["split"], m["tokens"]) for m in two]
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6 if a["step"] == 0 else 1e-5)
        if a["split"] == "train":
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
            assert b["data_hash"] == a["data_hash"]
    names = torch.load(tmp_path / "two" / "ckpt_00000050.pt", weights_only=True)["model"].keys()
    assert not any("module." in name or "_orig_mod" in name for name in names)


ONE_RANK_FAILS = """
import os, sys
import train
from model import GPT
if os.environ["RANK"] == "1":
    forward, calls = GPT.forward, []
    def failing(self, idx, targets=None):
        calls.append(1)
        if len(calls) > 20:
            raise ValueError("rank 1 has had enough")
        return forward(self, idx, targets)
    GPT.forward = failing
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow  # torchrun starts two processes
def test_a_rank_that_fails_ends_all_with_its_reason(dataset, tmp_path):
    script = tmp_path / "one_rank_fails.py"
    script.write_text(ONE_RANK_FAILS)
    begin = time.monotonic()
    process = start(*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--dist_timeout=30", ranks=2, script=str(script))
    output = finish(process)
    assert process.returncode == 1
    assert "error: rank 1: ValueError: rank 1 has had enough" in output
    assert time.monotonic() - begin < 60
    time.sleep(0.2)
    assert processes_of(tmp_path / "r") == []


# --- stopping ----------------------------------------------------------------------------------------------------------------

LONG = ["--max_iters=100000", "--lr_decay_iters=12", "--save_interval=100000", "--eval_interval=100000"]


def await_step(out_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (out_dir / "metrics.jsonl").exists() and any(m.get("step", 0) >= step for m in parsed(out_dir)):
            return
        time.sleep(0.05)
    raise AssertionError("the run did not get going")


def parsed(out_dir: Path) -> list[dict]:
    text = (out_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def processes_of(out_dir: Path) -> list[int]:
    """Processes whose command line names this out_dir."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(out_dir).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow  # starts train.py and torchrun
@pytest.mark.parametrize("ranks, target, number", [
    (1, "process", signal.SIGTERM), (1, "process", signal.SIGINT), (2, "launcher", signal.SIGTERM),
    (2, "launcher", signal.SIGINT), (2, "worker", signal.SIGTERM),
])
def test_stop_request_saves_and_leaves_nothing_behind(dataset, tmp_path, ranks, target, number):
    out_dir = tmp_path / "r"
    process = start(*SMALL, *LONG, f"--dataset={dataset}", f"--out_dir={out_dir}", ranks=ranks)
    await_step(out_dir, 3)
    workers = [pid for pid in processes_of(out_dir) if pid != process.pid]
    os.kill(workers[-1] if target == "worker" else process.pid, number)
    output = finish(process, timeout=90)
    assert "stopped on request" in output
    if target == "launcher":  # torchrun itself ends with 1 when it was signalled, whatever its workers return
        assert "exitcode" not in output
    else:
        assert process.returncode == 0, output
    steps = [m["step"] for m in metrics(out_dir)]
    assert (out_dir / f"ckpt_{steps[-1]:08d}.pt").exists() and steps[-1] < 100000
    time.sleep(0.2)
    assert processes_of(out_dir) == []


def test_stop_request_inside_an_evaluation(dataset, tmp_path, monkeypatch):
    """The run stops without the evaluation's value, and does that evaluation first when it goes on."""
    common = [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--attention=xsa"]
    forward, calls = GPT.forward, 0

    def counting(self, idx, targets=None):
        nonlocal calls
        calls += not self.training
        if calls == 12:  # in the second evaluation, at step 4: ten batches each
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, idx, targets)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", counting)
        assert train.main(common) == 0
    assert [m["step"] for m in metrics(tmp_path / "r") if m["split"] == "val"] == [0]
    assert (tmp_path / "r" / "ckpt_00000004.pt").exists()
    assert train.main([*common, "--init_from=auto"]) == 0
    assert [m["step"] for m in metrics(tmp_path / "r") if m["split"] == "val"] == [0, 4, 8, 12]


def test_stop_request_in_the_last_evaluation_leaves_it_to_the_next_start(straight, dataset, tmp_path, monkeypatch, capsys):
    common = [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--attention=xsa"]
    forward, calls = GPT.forward, 0

    def counting(self, idx, targets=None):
        nonlocal calls
        calls += not self.training
        if calls == 35:  # in the fourth evaluation, the last
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, idx, targets)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", counting)
        assert train.main(common) == 0
    assert "stopped on request at step 12" in capsys.readouterr().out
    assert train.main([*common, "--init_from=auto"]) == 0
    assert curve(tmp_path / "r") == curve(straight)
    capsys.readouterr()
    assert train.main([*common, "--init_from=auto"]) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.slow  # starts train.py
def test_stop_requests_before_training_and_after_the_end_change_no_exit_status(dataset, tmp_path):
    """SIGTERM from the moment on that train.py has its handlers, again and again until it is gone."""
    script = tmp_path / "early.py"
    program = (ROOT / "train.py").read_text()
    script.write_text(program.replace("StopRequest()\n", "StopRequest()\n    print('listening', flush=True)\n"))
    process = start(*SMALL, *LONG, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", script=str(script))
    assert process.stdout.readline().strip() == "listening"
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert process.returncode == 0, process.stdout.read()


@pytest.mark.slow  # starts train.py
def test_second_run_in_an_out_dir_is_refused_while_the_first_goes_on(dataset, tmp_path, capsys):
    arguments = [*SMALL, *LONG, f"--dataset={dataset}", f"--out_dir={tmp_path}/r"]
    process = start(*arguments)
    try:
        await_step(tmp_path / "r", 3)
        for mode in ("auto", "scratch", "resume"):
            assert train.main([*arguments, f"--init_from={mode}"]) == 2
            assert "belongs to a run that is still going" in capsys.readouterr().err
    finally:
        process.terminate()
        finish(process)
    assert process.returncode == 0
    assert train.main([*arguments, "--init_from=resume", "--max_iters=1"]) == 0


# --- failures ----------------------------------------------------------------------------------------------------------------


def test_non_finite_steps_are_skipped_counted_and_end_the_run(dataset, tmp_path, capsys, monkeypatch):
    """One bad micro-batch: the weights stay, the run goes on. Bad ones in a row: the run stops and says where."""
    forward, bad = GPT.forward, set()

    def poisoned(self, idx, targets=None):
        logits, loss = forward(self, idx, targets)
        if self.training:
            poisoned.calls += 1
            if (poisoned.calls - 1) // 4 in bad and (poisoned.calls - 1) % 4 == 2:  # the third micro-step of a bad step
                loss = loss * float("nan")
        return logits, loss

    monkeypatch.setattr(GPT, "forward", poisoned)
    arguments = [*SMALL, f"--dataset={dataset}", "--max_bad_steps=3"]
    poisoned.calls, bad = 0, {2, 5, 6}
    assert train.main([*arguments, f"--out_dir={tmp_path}/a"]) == 0
    lines = [m for m in metrics(tmp_path / "a") if m["split"] == "train"]
    assert [m["step"] for m in lines if m["loss"] is None] == [3, 6, 7]
    assert "step 3: non-finite loss on ranks [0]" in (tmp_path / "a" / "log.txt").read_text()
    assert [m["bad_steps"] for m in lines] == [0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3]
    assert lines[-1]["loss"] < lines[0]["loss"]
    capsys.readouterr()
    poisoned.calls, bad = 0, {4, 5, 6}
    assert train.main([*arguments, f"--out_dir={tmp_path}/b"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    place = r"rank 0: micro-step 2 \(slots 4-5, tokens from \[\d+, \d+\]\)"
    assert re.match(r"error: step 7: non-finite loss on ranks \[0\]: " + place, last)
    assert "max_bad_steps=3 reached" in last
    assert [m["step"] for m in metrics(tmp_path / "b") if m["split"] == "train" and m["loss"] is None] == [5, 6, 7]
    assert (tmp_path / "b" / "ckpt_00000003.pt").exists()  # what was saved is there


def test_first_two():
    assert train.first_two(["a"], ", ") == "a" and train.first_two(["a", "b"], "; ") == "a; b"
    assert train.first_two(list("abcde"), "; ") == "a; b; and 3 more"


def test_non_finite_gradient_of_finite_losses_names_the_first_windows(dataset, tmp_path, capsys, monkeypatch):
    """What an overflow in fp16 looks like."""
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda gradients: torch.tensor(math.inf))
    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--max_bad_steps=1"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    what = "finite losses, non-finite gradient on all ranks: rank 0: micro-step 0 (slots 0-1, tokens from ["
    assert last.startswith(f"error: step 1: {what}")
    assert "), micro-step 1 (slots 2-3," in last and last.count("micro-step") == 2
    assert "), and 2 more; skipped (1 in a row" in last


def test_exploding_learning_rate_stops_the_run(dataset, tmp_path, capsys):
    arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--learning_rate=1e30", "--warmup_iters=0"]
    assert train.main([*arguments, "--max_bad_steps=2"]) == 1
    assert "max_bad_steps=2 reached" in capsys.readouterr().err


def test_out_of_memory_proposes_a_micro_batch_that_keeps_the_global_batch(dataset, tmp_path, capsys, monkeypatch):
    def full(self, idx, targets=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", "--max_iters=0"]) == 0
    monkeypatch.setattr(GPT, "forward", full)
    arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/q", "--global_batch_size=24", "--micro_batch_size=8"]
    assert train.main(arguments) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: rank 0: out of memory at step 0 with micro_batch_size=8: --micro_batch_size=6")
    assert "--activation_checkpointing=True" in last


def test_bad_data_found_during_the_run_is_a_failure_and_not_bad_input(tmp_path, capsys):
    """A folder without meta.json cannot be checked beforehand without reading all of it."""
    ids = np.frombuffer(b"what is past is prologue. " * 800, dtype=np.uint8).astype(np.uint16)
    ids[10_000] = 300
    ids[:-2000].tofile(tmp_path / "train.bin")
    ids[-2000:].tofile(tmp_path / "val.bin")
    arguments = [*SMALL, "--sampling=shuffle", "--max_iters=100", f"--dataset={tmp_path}", f"--out_dir={tmp_path}/r"]
    assert train.main(arguments) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(r"error: rank 0: step \d+: .*train.bin: token 10000 has id 300, but the model's vocab_size is 257", last)
    assert list((tmp_path / "r").glob("ckpt_*.pt"))


@pytest.mark.parametrize("arguments, message", [
    (["--dataset=nowhere"], "nowhere"),
    (["--vocab_size=100"], "--vocab_size=257"),
    (["--micro_batch_size=3"], "--micro_batch_size=2"),
    (["--block_size=4000000", "--eval_tokens=4000000"], "block_size"),
    (["--device=cuda:77"], "device=cuda:77"),
    (["--lerning_rate=1"], "learning_rate"),
    (["config/none.py"], "config/none.py"),
])
def test_bad_input_exits_with_2_before_any_work(dataset, tmp_path, capsys, arguments, message):
    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and message in error and "\n" not in error
    assert not (tmp_path / "r").exists()


def test_out_dir_that_cannot_be_written_is_bad_input(dataset, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/file/r"]) == 2
    assert "out_dir" in capsys.readouterr().err


def test_full_disk_while_saving_keeps_the_last_checkpoint(dataset, tmp_path, monkeypatch, capsys):
    save = torch.save

    def full(state, file):
        if state["step"] == 6:
            file.write(b"x" * 1000)
            raise OSError(28, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r"]
    assert train.main(arguments) == 1
    assert re.search(r"ckpt_00000006.pt cannot be written: No space left", capsys.readouterr().err.strip().splitlines()[-1])
    assert [p.name for p in (tmp_path / "r").glob("*ckpt*")] == ["ckpt_00000003.pt"]
    monkeypatch.undo()
    assert train.main([*arguments, "--init_from=auto"]) == 0
    assert [m["step"] for m in metrics(tmp_path / "r") if m["split"] == "train"] == list(range(1, 13))


# --- other data formats ------------------------------------------------------------------------------------------------------


def test_nanogpt_folder_without_headers(tmp_path):
    ids = np.frombuffer(b"to be or not to be, that is the question. " * 500, dtype=np.uint8).astype(np.uint16)
    ids[:-2000].tofile(tmp_path / "train.bin")
    ids[-2000:].tofile(tmp_path / "val.bin")
    assert train.main([*SMALL, f"--dataset={tmp_path}", f"--out_dir={tmp_path}/r"]) == 0
    assert metrics(tmp_path / "r")[-1]["loss"] < 3


def test_gpt2_tokens_at_the_padded_vocabulary(gpt2_vocabulary, tmp_path):
    """Real GPT-2 ids through the chunked loss at 50304 rows."""
    tokenizer = get_tokenizer("gpt2")
    texts = [path.read_text() for path in sorted(ROOT.glob("*.py"))]
    for split, chosen in (("train", texts[1:]), ("val", texts[:1])):
        with ShardWriter(tmp_path, "own", split, eot=tokenizer.eot) as writer:
            for ids in tokenizer.encode(chosen):
                writer.write(np.array([tokenizer.eot, *ids]))
            writer.close()
    arguments = [*SMALL, "--vocab_size=50304", "--max_iters=4", f"--dataset={tmp_path}", f"--out_dir={tmp_path}/r"]
    assert train.main(arguments) == 0
    losses = [m["loss"] for m in metrics(tmp_path / "r") if m["split"] == "val"]
    assert 9 < losses[0] < 12 and losses[-1] < losses[0]


def test_data_changed_between_runs_is_noticed(tmp_path, capsys):
    """The same names, sizes and meta.json, other tokens."""
    ids = np.frombuffer(b"brevity is the soul of wit. " * 800, dtype=np.uint8).astype(np.uint16)
    ids[:-2000].tofile(tmp_path / "train.bin")
    ids[-2000:].tofile(tmp_path / "val.bin")
    arguments = [*SMALL, f"--dataset={tmp_path}", f"--out_dir={tmp_path}/r"]
    assert train.main([*arguments, "--max_iters=3"]) == 0
    ids[:-2000][::-1].tofile(tmp_path / "train.bin")
    assert train.main([*arguments, "--init_from=auto"]) == 2
    assert "other data" in capsys.readouterr().err

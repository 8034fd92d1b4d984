"""safety.py, the writer's thread, and the hash of the data, in runs of train.py: what is skipped, repeated, saved and proved."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import safety
import train
from model import GPT
from safety import SpikeGuard

ROOT = Path(__file__).parent.parent
SMALL = ["--vocab_size=257", "--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--global_batch_size=8",
         "--micro_batch_size=2", "--max_iters=12", "--warmup_iters=3", "--learning_rate=1e-2", "--eval_interval=6",
         "--eval_tokens=320", "--log_interval=1", "--save_interval=3", "--device=cpu"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = b"".join(path.read_bytes() for path in sorted(ROOT.glob("*.py")))
    ids = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    ids[:-2000].tofile(folder / "train.bin")
    ids[-2000:].tofile(folder / "val.bin")
    return folder


@pytest.fixture
def run(dataset, tmp_path):
    """Starts train.py in this process on a folder below tmp_path; returns the exit status."""
    return lambda name, *more: train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path / name}", *more])


@pytest.fixture(scope="module")
def straight(dataset, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    assert train.main([*SMALL, f"--dataset={dataset}", f"--out_dir={out_dir}", "--keep_checkpoints=9"]) == 0
    return out_dir


def metrics(folder: Path) -> list[dict]:
    """What must be equal between two runs: everything but times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    varying = ("step_ms", "data_ms", "tokens_per_s", "peak_memory_gb")
    return [{key: value for key, value in line.items() if key not in varying} for line in lines]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(path)["model"]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- writing while training goes on ------------------------------------------------------------------------------------------


@pytest.fixture
def slow_writer(monkeypatch):
    """torch.save in the writer's thread waits for `go`; what is saved at the end, in the main thread, does not."""
    save, go = torch.save, threading.Event()

    def slow(state, file):
        if threading.current_thread() is not threading.main_thread():
            go.wait(30)
        save(state, file)

    monkeypatch.setattr(torch, "save", slow)
    return go


def test_training_goes_on_and_what_is_saved_is_its_step(run, straight, tmp_path, monkeypatch, slow_writer):
    step = train.Run.train_step

    def watched(self, batches):
        if self.step == 5:  # the save of step 3 is under way, and that of step 6 would wait for it
            assert self.writer.busy and not checkpoint.list_checkpoints(tmp_path / "r")
            slow_writer.set()
        return step(self, batches)

    monkeypatch.setattr(train.Run, "train_step", watched)
    assert run("r", "--keep_checkpoints=9") == 0
    assert metrics(tmp_path / "r") == metrics(straight)
    for at in (3, 6, 9, 12):
        mine, theirs = (torch.load(checkpoint.path_of(folder, at), weights_only=True) for folder in (tmp_path / "r", straight))
        assert equal(mine["model"], theirs["model"]) and mine["step"] == at and mine["data_hash"] == theirs["data_hash"]
        for i, state in theirs["optimizer"]["state"].items():
            assert equal(mine["optimizer"]["state"][i], state)
        assert mine["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]


def test_resumed_from_what_was_written_slowly(run, straight, tmp_path, slow_writer):
    threading.Timer(0.5, slow_writer.set).start()
    assert run("r", "--max_iters=5", "--lr_decay_iters=12") == 0
    os.remove(tmp_path / "r" / "ckpt_00000005.pt")
    assert run("r", "--init_from=resume") == 0  # from step 3
    assert metrics(tmp_path / "r") == metrics(straight)
    assert equal(weights(tmp_path / "r" / "ckpt_00000012.pt"), weights(straight / "ckpt_00000012.pt"))


def test_an_error_of_the_writer_ends_the_run_at_its_next_step(run, tmp_path, monkeypatch, capsys):
    save = torch.save

    def full(state, file):
        if state["step"] == 6:
            file.write(b"PK" * 1000)
            raise OSError(28, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    step = train.Run.train_step
    monkeypatch.setattr(train.Run, "train_step", lambda self, batches: time.sleep(0.05) or step(self, batches))
    assert run("r") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"error: rank 0: step \d+: .*ckpt_00000006\.pt cannot be written: No space left on device", last)
    assert sorted(p.name for p in (tmp_path / "r").iterdir() if "json" not in p.name) == ["ckpt_00000003.pt", "latest", "log.txt"]
    assert metrics(tmp_path / "r")[-1]["step"] < 12
    assert checkpoint.load(checkpoint.latest(tmp_path / "r"))["step"] == 3


@pytest.mark.parametrize("fate", ["stop", "failure"])
def test_the_end_of_a_run_waits_for_the_writer(run, tmp_path, monkeypatch, capsys, slow_writer, fate):
    step = train.Run.train_step

    def ending(self, batches):
        if self.step == 4:
            threading.Timer(0.3, slow_writer.set).start()
            if fate == "failure":
                raise train.RunError("that was it")
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches)

    monkeypatch.setattr(train.Run, "train_step", ending)
    assert run("r") == (1 if fate == "failure" else 0)
    saved = [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(tmp_path / "r")]
    assert saved == ([3] if fate == "failure" else [3, 5])
    assert all(checkpoint.damage(checkpoint.path_of(tmp_path / "r", at)) is None for at in saved)
    captured = capsys.readouterr()
    if fate == "failure":
        assert captured.err.splitlines()[-1] == "error: that was it"
    else:
        assert "stopped on request at step 5 with a checkpoint" in captured.out


def test_failing_twice_tells_both_and_the_run_s_own_error_last(run, monkeypatch, capsys):
    go, step = threading.Event(), train.Run.train_step

    def full(state, file):
        go.wait(30)
        raise OSError(28, "No space left on device")

    def failing(self, batches):
        if self.step == 4:
            go.set()
            raise train.RunError("that was it")
        return step(self, batches)

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(train.Run, "train_step", failing)
    assert run("r") == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1] == "error: that was it" and errors[-2].endswith("cannot be written: No space left on device")


KILLED_WHILE_WRITING = """
import os, signal, sys, threading, torch, train
save = torch.save
def deadly(state, file):
    if state["step"] == 6:
        file.write(b"PK" * 5000)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, file)
torch.save = deadly
sys.exit(train.main(sys.argv[1:]))
"""


def test_killed_in_the_writer_the_last_complete_one_stays(dataset, run, straight, tmp_path):
    arguments = [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path}/r"]
    result = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, *arguments], cwd=ROOT, capture_output=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == -signal.SIGKILL
    assert list((tmp_path / "r").glob(".ckpt_00000006.pt*")) and checkpoint.latest(tmp_path / "r").name == "ckpt_00000003.pt"
    assert run("r", "--init_from=auto") == 0
    assert not list((tmp_path / "r").glob(".*")) and metrics(tmp_path / "r") == metrics(straight)


# --- spikes ------------------------------------------------------------------------------------------------------------------


def fed(guard: SpikeGuard, n: int = safety.WINDOW) -> SpikeGuard:
    """A guard that has seen losses 2.9, 3.1, 2.9, ... and norms 0.8, 1.2, ...: means 3 and 1, deviations 0.1 and 0.2."""
    for i in range(n):
        assert guard.judge(3 + (-1) ** i * -0.1, 1 + (-1) ** i * -0.2, False) == ""
    return guard


@pytest.mark.parametrize("loss, norm, words", [
    (3.59, 2.19, []), (3.61, 1.0, ["loss 3.6100"]), (3.0, 2.21, ["gradient norm 2.2100"]), (9, 9, ["loss 9", "gradient norm 9"]),
    (0.1, 0.01, []),
])
def test_spikes_lie_limit_deviations_above_the_mean(loss, norm, words):
    said = fed(SpikeGuard(6)).judge(loss, norm, False)
    assert bool(said) == bool(words) and all(word in said for word in words)


def test_no_guard_no_window_no_warm_up():
    assert fed(SpikeGuard(0)).judge(1e9, 1e9, False) == ""
    assert fed(SpikeGuard(6), safety.WINDOW - 1).judge(1e9, 1e9, False) == ""
    assert fed(SpikeGuard(6)).judge(1e9, 1e9, True) == ""


def test_a_spike_opens_no_door_and_a_new_level_is_accepted():
    guard = fed(SpikeGuard(6))
    for i in range(safety.MOST_IN_ROW):
        assert f"({i + 1} in a row, {i + 1} in all)" in guard.judge(50.0, 1.0, False)
    assert guard.judge(50.0, 1.0, False) == ""
    for _ in range(safety.WINDOW - 1):  # the statistic starts anew
        assert guard.judge(50.0, 1.0, False) == ""
    assert "(1 in a row, 11 in all)" in guard.judge(51.0, 1.0, False)


def test_guard_goes_on_from_its_state():
    a = fed(SpikeGuard(6))
    a.judge(9.0, 9.0, False)
    b = SpikeGuard(6)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))  # plain Python all through
    assert b.state_dict() == a.state_dict()
    rng = np.random.default_rng(0)
    for i, (loss, norm) in enumerate(rng.normal(3, 0.1, (300, 2)).tolist()):
        loss += 6 * (i % 70 == 69)
        assert a.judge(loss, norm - 2, False) == b.judge(loss, norm - 2, False)
    assert a.count == 5


@pytest.fixture
def spiky(monkeypatch):
    """Four steps make the statistic; losses of the training steps in `steps`, counted from 1, are a hundred times too high."""
    steps, forward, current = set(), GPT.forward, [0]
    monkeypatch.setattr(safety, "WINDOW", 4)
    train_step = train.Run.train_step

    def counting(self, batches):
        current[0] = self.step + 1
        return train_step(self, batches)

    def spiking(self, idx, targets=None):
        logits, loss = forward(self, idx, targets)
        return logits, loss * 100 if loss is not None and self.training and current[0] in steps else loss

    monkeypatch.setattr(train.Run, "train_step", counting)
    monkeypatch.setattr(GPT, "forward", spiking)
    return steps


def test_a_spike_is_skipped_counted_and_told_and_resume_is_exact(run, tmp_path, spiky, capsys):
    spiky.update({8, 11})
    common = ["--skip_spikes=20", "--keep_checkpoints=9", "--save_interval=1"]
    assert run("a", *common) == 0
    out = capsys.readouterr().out
    lines = [line for line in metrics(tmp_path / "a") if line["split"] == "train"]
    assert [line["step"] for line in lines if line["loss"] is None] == [8, 11]
    assert [line["spikes"] for line in lines] == [0] * 7 + [1] * 3 + [2] * 2 and {line["bad_steps"] for line in lines} == {0}
    assert "warning: step 8: spike of loss " in out
    assert "step 11: loss skipped" in (tmp_path / "a" / "log.txt").read_text()
    a = tmp_path / "a"
    assert equal(weights(a / "ckpt_00000007.pt"), weights(a / "ckpt_00000008.pt"))
    assert not equal(weights(a / "ckpt_00000008.pt"), weights(a / "ckpt_00000009.pt"))
    for at in (6, 9):  # with four good steps behind, and just after a spike
        assert run("b", *common, f"--max_iters={at}", "--lr_decay_iters=12", "--init_from=auto") == 0
    assert run("b", *common, "--init_from=resume") == 0
    assert [line for line in metrics(tmp_path / "b") if line["split"] == "train"] == lines
    assert equal(weights(tmp_path / "b" / "ckpt_00000012.pt"), weights(a / "ckpt_00000012.pt"))


def test_without_the_option_nothing_is_skipped(run, tmp_path, spiky):
    spiky.add(8)
    assert run("a") == 0
    assert all(line["loss"] is not None and not line.get("spikes") for line in metrics(tmp_path / "a"))


# --- bit for bit -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_it_was():
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_deterministic_runs_are_equal(run, straight, tmp_path, as_it_was):
    for name in ("a", "b"):
        assert run(name, "--deterministic=True", "--attention=xsa", "--dropout=0.1", "--dtype=bfloat16") == 0
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert equal(*(weights(tmp_path / name / "ckpt_00000012.pt") for name in ("a", "b")))
    assert run("c", "--deterministic=True", "--keep_checkpoints=9") == 0
    assert metrics(tmp_path / "c") == metrics(straight)  # on a CPU it is so anyway
    assert run("d", "--max_iters=1") == 0 and not torch.are_deterministic_algorithms_enabled()


def test_what_cannot_be_deterministic_ends_the_run_with_its_name(run, monkeypatch, capsys, as_it_was):
    forward = GPT.forward

    def with_put(self, idx, targets=None):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return forward(self, idx, targets)

    monkeypatch.setattr(GPT, "forward", with_put)
    assert run("r", "--deterministic=True") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: deterministic=True: put_ does not have a deterministic implementation"


# --- the same tokens ---------------------------------------------------------------------------------------------------------


def test_data_hash_tells_what_was_seen_whatever_the_model(run, straight, dataset, tmp_path):
    def hashes(folder: Path) -> list[str]:
        return [line["data_hash"] for line in metrics(folder) if line["split"] == "train"]

    assert len(set(hashes(straight))) == 12 and all(len(value) == 16 for value in hashes(straight))
    assert run("xsa", "--attention=xsa", "--micro_batch_size=4", "--max_iters=7") == 0
    assert run("xsa", "--attention=xsa", "--micro_batch_size=1", "--init_from=resume", "--lr_decay_iters=7") == 0
    assert hashes(tmp_path / "xsa") == hashes(straight)
    assert run("seed", "--seed=2") == 0
    assert not set(hashes(tmp_path / "seed")) & set(hashes(straight))
    changed = np.fromfile(dataset / "train.bin", dtype=np.uint16)
    changed[len(changed) // 3 :] ^= 1
    (tmp_path / "data").mkdir()
    changed.tofile(tmp_path / "data" / "train.bin")
    os.link(dataset / "val.bin", tmp_path / "data" / "val.bin")
    assert run("other", f"--dataset={tmp_path / 'data'}") == 0
    assert not set(hashes(tmp_path / "other")) & set(hashes(straight))

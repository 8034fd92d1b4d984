"""Checkpoints and shards that are damaged, exchanged, missing or from elsewhere; numbers that are none; wandb that fails."""

import functools
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from data.shards import META
from tests.faults.conftest import build_dataset
from tests.faults.driver import ROOT, Fault, ImportFirst, assert_same_run, curve, run, soak


@pytest.fixture
def half(settings, tmp_path):
    """Arguments of a run that has done nine of its twelve steps, and its folder."""
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    job = run(arguments, tmp_path, fault=Fault("kill", "optimizer", 10, saved="ckpt_00000009.pt"))
    assert (tmp_path / "run" / "ckpt_00000009.pt").exists(), job.text()
    return arguments, tmp_path / "run"


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "text", "gone"])
def test_damaged_checkpoint_the_one_before_is_taken(half, straight, tmp_path, damage):
    arguments, folder = half
    newest = folder / "ckpt_00000009.pt"
    data = newest.read_bytes()
    match damage:
        case "truncated":
            newest.write_bytes(data[: len(data) // 2])
        case "empty":
            newest.write_bytes(b"")
        case "flipped":  # in the middle of a tensor
            newest.write_bytes(data[:200_000] + bytes([data[200_000] ^ 16]) + data[200_001:])
        case "text":
            newest.write_text("not what it was\n" * 1000)
        case "gone":
            newest.unlink()
    job = run(arguments, tmp_path)
    assert job.statuses == [0], job.text()
    assert f"continuing from {folder}/ckpt_00000006.pt" in job.text()
    assert damage == "gone" or re.search(r"warning: .*ckpt_00000009.pt is damaged \(.*\); trying the one before", job.text())
    assert_same_run(folder, straight)


def test_all_checkpoints_damaged_is_never_a_start_from_scratch(half, tmp_path):
    arguments, folder = half
    for path in folder.glob("ckpt_*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    before = curve(folder)
    job = run(arguments, tmp_path)
    assert job.statuses == [2] and re.match(r"error: all \d checkpoints in .* are damaged", job.last_line())
    assert curve(folder) == before


def change(path, **changes) -> None:
    state = torch.load(path, weights_only=True)
    for key, value in changes.items():
        state[key] = state[key] | value if isinstance(value, dict) and key in state else value
    torch.save(state, path)


@pytest.mark.parametrize("changes, message", [
    ({"a_later_part": {"x": 1}}, "a_later_part"), ({"config": {"a_later_switch": True}}, "a_later_switch"),
    ({"config": {"n_embd": 64}}, "n_embd"), ({"data": {"fingerprint": "0" * 64}}, "other data"),
    ({"model": {}, "optimizer": {"state": {}, "param_groups": 5}}, "does not fit"), ({"rng": torch.zeros(3)}, "does not fit"),
    ({"scaler": {"scale": 2.0}}, None),
])
def test_checkpoint_from_elsewhere_or_the_future_is_refused_and_left(half, tmp_path, changes, message):
    """Of a later version, another model, other data; a part that is not what it was. Read alone, nothing is changed."""
    arguments, folder = half
    for path in folder.glob("ckpt_*.pt"):
        change(path, **changes)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    job = run(arguments, tmp_path)
    if message is None:
        assert job.statuses == [0], job.text()
        return
    assert job.statuses == [2] and job.last_line().startswith("error: ") and message in job.last_line(), job.text()
    assert "Traceback" not in job.text()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_newest_checkpoint_of_a_later_version_is_not_passed_over(half, tmp_path):
    arguments, folder = half
    change(folder / "ckpt_00000009.pt", a_later_part={"x": 1})
    before = {path: path.read_bytes() for path in folder.iterdir()}
    job = run(arguments, tmp_path)
    assert job.statuses == [2] and "ckpt_00000009.pt is of another version of this code" in job.last_line(), job.text()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("what, value, message", [
    ("exp_avg", torch.zeros(3), "exp_avg of wte.weight is torch.float32 [3], wanted torch.float32 [257, 32]"),
    ("step", torch.tensor(0.0), "the optimizer's step of wte.weight is 0, wanted 9"),
])
@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_state_that_is_not_the_model_s_is_refused(half, tmp_path, what, value, message, ranks):
    """On two ranks with FSDP, each of which takes its share. Fused AdamW would write beyond the end of a small moment."""
    arguments, folder = half
    state = torch.load(folder / "ckpt_00000009.pt", weights_only=True)
    state["optimizer"]["state"][0][what] = value
    torch.save(state, folder / "ckpt_00000009.pt")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    job = run([*arguments, "--parallel=fsdp"], tmp_path, ranks=ranks)
    assert job.statuses == [2] * ranks, job.text()
    assert job.last_line().endswith(f"the checkpoint of step 9 does not fit this model: {message}"), job.text()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture
def own_data(half, dataset, tmp_path):
    """The half run's arguments with a copy of its data, and the shard."""
    arguments, folder = half
    shutil.copytree(dataset, tmp_path / "copy")
    (shard,) = (tmp_path / "copy").glob("*_train_*.bin")
    return [*arguments, f"--dataset={tmp_path}/copy"], folder, shard


def test_copied_data_is_the_same_data(own_data, straight, tmp_path):
    arguments, folder, _ = own_data
    assert run(arguments, tmp_path).statuses == [0]
    assert_same_run(folder, straight)


@pytest.mark.parametrize("damage, message", [
    ("truncated", "truncated"), ("flipped", "other data"), ("missing", "missing"), ("replaced", "other data"),
    ("header", "trailing bytes"), ("no meta", "other data"), ("bad meta", META),
])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shard_that_changed_between_runs(own_data, tmp_path, damage, message, ranks):
    arguments, folder, shard = own_data
    data = shard.read_bytes()
    match damage:
        case "truncated":
            shard.write_bytes(data[:-1000])
        case "flipped":
            shard.write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
        case "missing":
            shard.unlink()
        case "replaced":
            build_dataset(tmp_path / "other", word="dokument")
            shutil.rmtree(tmp_path / "copy")
            shutil.move(tmp_path / "other", tmp_path / "copy")
        case "header":
            shard.write_bytes(data[:8] + b"\1\0\0\0" + data[12:])
        case "no meta":
            (shard.parent / META).unlink()
        case "bad meta":
            (shard.parent / META).write_text("{" * 100_000)
    before = curve(folder)
    job = run(arguments, tmp_path, ranks=ranks)
    assert job.statuses == [2] * ranks and message in job.last_line(), job.text()
    assert "Traceback" not in job.text() and curve(folder) == before


def test_bit_flipped_where_no_sample_looks_is_found_by_verify(own_data):
    """Training reads a few tokens of each shard when it starts; all of them is what verify is for."""
    _, _, shard = own_data
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 1
    shard.write_bytes(data)
    command = [sys.executable, "-m", "data.shards", "verify", str(shard.parent)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and f"fault: {shard}: sha256" in result.stderr


def shorten(path: str) -> None:
    """Cuts the shard a second after the run has opened it."""
    threading.Timer(1.0, lambda: os.truncate(path, 2_000)).start()


def test_shard_truncated_under_a_run(own_data, tmp_path):
    arguments, _, shard = own_data
    job = run([*arguments, "--max_iters=100000", "--eval_interval=100000"], tmp_path,
              prepare=functools.partial(shorten, str(shard)))
    assert job.statuses == [1] and "truncated since it was opened" in job.last_line(), job.text()


# --- numbers that are none ----------------------------------------------------------------------------------------------------


def test_nan_at_one_step_is_skipped_on_all_ranks_alike(settings, tmp_path):
    """The third micro-step on rank 1 of two; and in the run that was killed after it and goes on."""
    folder = tmp_path / "run"
    job = run([*settings, f"--out_dir={folder}"], tmp_path, ranks=2, fault=Fault("nan", "step", 9, rank=1))
    assert job.statuses == [0, 0], job.text()
    trained = [dict(line) for line in curve(folder) if dict(line)["split"] == "train"]
    assert [line["step"] for line in trained if line["loss"] is None] == [5]
    assert trained[-1]["bad_steps"] == 1 and trained[-1]["loss"] < trained[0]["loss"]
    assert "step 5: non-finite loss on ranks [1]" in (folder / "log.txt").read_text()


@pytest.mark.parametrize("keep", [1, 2])
def test_poisoned_weight_does_not_push_out_the_last_good_checkpoint(settings, straight, tmp_path, keep):
    """A weight that is NaN makes every loss NaN. No checkpoint of that takes the place of one that is still good."""
    arguments = [*settings, f"--out_dir={tmp_path}/run", f"--keep_checkpoints={keep}", "--save_interval=1"]
    job = run([*arguments, "--max_bad_steps=4"], tmp_path, fault=Fault("poison", "step", 21))
    assert job.statuses == [1] and "max_bad_steps=4 reached" in job.last_line(), job.text()
    good = [path for path in (tmp_path / "run").glob("ckpt_*.pt")
            if all(weight.isfinite().all() for weight in torch.load(path, weights_only=True)["model"].values())]
    assert [path.name for path in sorted(good)][-1] == "ckpt_00000005.pt"
    assert run(arguments, tmp_path).statuses == [0]
    assert curve(tmp_path / "run") == curve(straight)


# --- wandb --------------------------------------------------------------------------------------------------------------------

STUB = """
import os
def login(**more):
    return True
class Run:
    url = "https://wandb.example/run"
    def __init__(self, offline):
        self.offline = offline
    def define_metric(self, *a, **k): ...
    def log(self, record):
        if {dies!r} == "log" and record["step"] >= 4:
            raise ConnectionError("lost http://me:pa55word@proxy, key " + os.environ["WANDB_API_KEY"])
    def finish(self, **k):
        if {dies!r} == "finish":
            raise OSError("cannot upload")
held = []
def teardown():
    held.clear()
def init(mode, id, **more):
    if id in held:
        raise RuntimeError("run ID in use")
    held.append(id)
    if {dies!r} == "init" or ({dies!r} == "server" and mode == "online"):
        raise RuntimeError("no answer, key " + os.environ["WANDB_API_KEY"])
    return Run(mode == "offline")
if {dies!r} == "import":
    raise ImportError("broken installation")
"""
KEY = "5ec4e7" * 7


@pytest.mark.parametrize("dies, said", [
    ("import", "wandb: not available"), ("init", "wandb: not available"), ("server", "wandb: no way to the server"),
    ("log", "wandb: logging failed"), ("finish", "wandb: closing failed"), ("never", None),
])
def test_wandb_that_fails_stops_nothing_and_tells_no_secret(settings, straight, tmp_path, dies, said):
    (tmp_path / "wandb.py").write_text(STUB.format(dies=dies))
    arguments = [*settings, f"--out_dir={tmp_path}/run", "--wandb_log=True"]
    job = run(arguments, tmp_path, environment={"WANDB_API_KEY": KEY, "SOME_TOKEN": KEY[::-1]},
              prepare=ImportFirst(str(tmp_path)))
    assert job.statuses == [0], job.text()
    assert said is None or said in job.text()
    assert "wandb sync" in job.text() if dies == "server" else "sync" not in job.text()
    assert_same_run(tmp_path / "run", straight)
    everything = job.text() + "".join(path.read_text(errors="replace") for path in (tmp_path / "run").iterdir())
    assert not [secret for secret in (KEY, KEY[::-1], "pa55word") if secret in everything]


@soak
@pytest.mark.slow  # wandb itself waits for its server, here for five seconds
def test_real_wandb_without_a_way_to_its_server_logs_offline(settings, straight, tmp_path):
    environment = {"WANDB_API_KEY": KEY[:40], "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5"}
    job = run([*settings, f"--out_dir={tmp_path}/run", "--wandb_log=True"], tmp_path, environment=environment, limit=120)
    assert job.statuses == [0], job.text()
    assert "wandb: no way to the server" in job.text() and "wandb: offline; upload later" in job.text(), job.text()
    assert job.last_line().startswith("done: "), job.text()
    (records,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert records.read_bytes().count(b"train/loss") >= 12
    assert_same_run(tmp_path / "run", straight)
    assert KEY[:40] not in job.text()

"""Attention's methods in train.py: QK-Clip after each step, diagnostics, and every preset, on one rank and on two."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from model import GPT
from presets import PRESETS
from scripts.runs import read_run
from tests.test_train import ROOT, SMALL, curve, dataset, metrics  # noqa: F401

CLIP = ["--qk_norm=True", "--qk_clip=1.5"]


def steps(out_dir: Path) -> list[dict]:
    return [m for m in metrics(out_dir) if m["split"] == "train"]


def run(out_dir: Path, data: str, *arguments: str) -> Path:
    assert train.main([*SMALL, f"--dataset={data}", f"--out_dir={out_dir}", *arguments]) == 0
    return out_dir


# --- QK-Clip -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [True, False])
def test_a_step_is_adamw_s_and_then_the_clip(dataset, tmp_path, norm):  # noqa: F811
    """One layer, one head, one step: the clipped weights differ from the others by sqrt(tau / S) in q and k, and nowhere else."""
    common = ["--n_layer=1", "--n_head=1", "--max_iters=1", f"--qk_norm={norm}", "--init_from=auto"]
    tau = 1.5 if norm else 1e-3
    plain, clipped = (run(tmp_path / str(tau), dataset, *common, f"--qk_clip={tau}") for tau in (0.0, tau))
    a, b = (torch.load(out / "ckpt_00000001.pt", weights_only=True)["model"] for out in (plain, clipped))
    (line,) = steps(clipped)
    assert line["qk_clips"] == 1 and line["max_logit"] > tau and "qk_clips" not in steps(plain)[0]
    scaled, rows = ("h.0.attn.qk_gain", 64) if norm else ("h.0.attn.c_attn.weight", 64)
    torch.testing.assert_close(b[scaled][:rows], a[scaled][:rows] * math.sqrt(tau / line["max_logit"]), rtol=1e-5, atol=0)
    assert torch.equal(b[scaled][rows:], a[scaled][rows:])
    assert all(torch.equal(b[name], a[name]) for name in a if name != scaled)


def test_clips_are_counted_by_layer_and_bound_the_logits(dataset, tmp_path):  # noqa: F811
    lines = steps(run(tmp_path / "r", dataset, *CLIP))
    clips = [line["qk_clips"] for line in lines]
    assert clips == sorted(clips) and 0 < clips[0] <= 4 and clips[-1] > clips[0]
    assert lines[0]["max_logit"] > 1.5 * lines[-1]["max_logit"]
    state = torch.load(tmp_path / "r" / "ckpt_00000012.pt", weights_only=True)
    assert len(state["qk_clips"]) == 2 and sum(state["qk_clips"]) == clips[-1]
    assert f"clipped {clips[-1]} times" in (tmp_path / "r" / "log.txt").read_text()


@pytest.mark.parametrize("extra, exact", [
    (["--activation_checkpointing=True"], True), (["--eval_interval=1", "--diagnostics_interval=1"], True),
    (["--micro_batch_size=8"], False),
])
def test_clips_do_not_depend_on_how_the_step_is_computed(dataset, tmp_path, extra, exact):  # noqa: F811
    """Nor on evaluation or diagnostics, which are no part of it."""
    one, other = (steps(run(tmp_path / name, dataset, *CLIP, *more)) for name, more in (("one", []), ("other", extra)))
    assert [line["qk_clips"] for line in one] == [line["qk_clips"] for line in other]
    for key in ("loss", "max_logit", "grad_norm"):
        found, wanted = ([line[key] for line in lines] for lines in (other, one))
        assert found == wanted if exact else found == pytest.approx(wanted, rel=1e-4)


def test_logits_of_a_skipped_step_clip_nothing(dataset, tmp_path, monkeypatch):  # noqa: F811
    forward, calls = GPT.forward, []

    def poisoned(self, idx, targets=None):
        logits, loss = forward(self, idx, targets)
        if self.training:
            calls.append(1)
            if len(calls) == 9:  # the first micro-step of the third step
                self.max_logits = torch.full_like(self.max_logits, 1e9)
                loss = loss * math.nan
        return logits, loss

    monkeypatch.setattr(GPT, "forward", poisoned)
    lines = steps(run(tmp_path / "r", dataset, "--qk_norm=True", "--qk_clip=100", "--max_iters=4"))
    for key in ("loss", "max_logit"):
        assert [line[key] is None for line in lines] == [False, False, True, False]
    assert all(line["qk_clips"] == 0 for line in lines) and lines[3]["max_logit"] < 100


def test_a_run_may_go_on_with_another_threshold(dataset, tmp_path, capsys):  # noqa: F811
    off = ["--qk_norm=True", "--qk_clip=0", "--max_iters=4", "--lr_decay_iters=8"]
    run(tmp_path / "r", dataset, *off)
    run(tmp_path / "r", dataset, *off, *CLIP, "--max_iters=8", "--init_from=resume")
    assert "note: qk_clip was 0.0 in the checkpoint and is 1.5 now" in capsys.readouterr().out
    lines = steps(tmp_path / "r")
    assert ["qk_clips" in line for line in lines] == [False] * 4 + [True] * 4
    assert lines[4]["max_logit"] > 1.5 and lines[4]["qk_clips"] > 0


# --- diagnostics -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["gsxa", "softcap"])
def test_diagnostics_are_logged_and_change_nothing(dataset, tmp_path, attention):  # noqa: F811
    arguments = [f"--attention={attention}", "--dropout=0.2", "--max_iters=6", "--log_interval=2"]
    with_them = run(tmp_path / "with", dataset, *arguments, "--diagnostics_interval=3")
    without = run(tmp_path / "without", dataset, *arguments)
    assert [line for line in curve(with_them) if line[2] != "diagnostics"] == curve(without)
    found = [m for m in metrics(with_them) if m["split"] == "diagnostics"]
    assert [m["step"] for m in found] == [3, 6]
    names = set(found[0]) - {"step", "tokens", "split"}
    assert names >= {"largest_logit", "attention_entropy", "first_token_mass", "cos_y_v", "kurtosis", "largest_activation"}
    assert names >= {"gate_mean", "ssmax", "qk_clips"} or attention != "gsxa"
    assert all(len(m[name]) == 2 and None not in m[name] for m in found for name in names)
    assert found[0]["kurtosis"] != found[1]["kurtosis"]
    assert read_run(with_them).train == read_run(without).train
    path = {"gsxa": "fused (SDPA)", "softcap": "explicit, some rows at a time"}[attention]
    assert (with_them / "log.txt").read_text().count(f"  attention  {path}\n") == 1


def test_diagnostics_read_the_first_validation_windows_whatever_the_batch(dataset, tmp_path):  # noqa: F811
    """Fewer of them than there are micro-batch rows, too."""
    lines = []
    for extra in (["--eval_tokens=64"], ["--eval_tokens=64", "--micro_batch_size=8"]):
        out = run(tmp_path / str(len(lines)), dataset, "--max_iters=1", "--diagnostics_interval=1", *extra)
        lines.append(next(m for m in metrics(out) if m["split"] == "diagnostics"))
    assert lines[0]["largest_logit"] == pytest.approx(lines[1]["largest_logit"], rel=1e-3)


# --- every preset ------------------------------------------------------------------------------------------------------------

# A tau at which it fires, for those that clip.
PRESET_RUN = ["--n_head=4", "--max_iters=16", "--learning_rate=5e-3", "--eval_interval=16", "--save_interval=16"]


def preset_arguments(name: str) -> list[str]:
    return [*PRESET_RUN, f"--attention={name}", *(["--qk_clip=0.1"] if "qk_clip" in PRESETS[name].switches else [])]


@pytest.fixture(scope="module")
def one_rank(dataset, tmp_path_factory) -> dict[str, list[dict]]:  # noqa: F811
    folder = tmp_path_factory.mktemp("presets")
    return {name: metrics(run(folder / name, dataset, *preset_arguments(name))) for name in PRESETS}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_s_loss_falls(one_rank, name):
    lines = one_rank[name]
    assert lines[-1]["split"] == "val" and lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert ("qk_clips" in lines[1]) == ("qk_clip" in PRESETS[name].switches)


TWO_RANKS = """
import os, sys
import json
import train
for port, arguments in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    assert train.main(arguments) == 0, arguments
"""


@pytest.mark.slow  # two processes train every preset
def test_two_ranks_equal_one_for_every_preset(one_rank, dataset, tmp_path):  # noqa: F811
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in PRESETS]
    runs = [[probe.getsockname()[1], [*SMALL, f"--dataset={dataset}", f"--out_dir={tmp_path / name}", *preset_arguments(name)]]
            for probe, name in zip(probes, PRESETS, strict=True)]
    for probe in probes:
        probe.close()
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, "-c", TWO_RANKS, json.dumps(runs)], cwd=ROOT, text=True,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                  env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    for name in PRESETS:
        one, two = one_rank[name], metrics(tmp_path / name)
        assert [m.get("qk_clips") for m in one] == [m.get("qk_clips") for m in two], name
        for key, rel in {"loss": 1e-5, "grad_norm": 1e-3, "max_logit": 1e-3}.items():
            assert [m.get(key, 0) for m in two] == pytest.approx([m.get(key, 0) for m in one], rel=rel), (name, key)
        assert two[-2].get("qk_clips", 1) > 0

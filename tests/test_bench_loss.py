"""scripts/bench/loss.py: that all arms are the same loss, and that memory and error mean what they say."""

import json

import pytest
import torch

from configurator import load
from scripts.bench import __main__ as command
from scripts.bench import loss as bench

CPU = torch.device("cpu")
TINY = ["--device=cpu", "--micro_batch_size=2", "--block_size=32", "--n_embd=24", "--n_head=2", "--vocab_size=97",
        "--eval_tokens=32", "--rounds=2"]


@pytest.mark.parametrize("name", bench.available(CPU))
@pytest.mark.parametrize("dtype, error", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_every_arm_is_the_same_loss(name, dtype, error):
    inputs = bench.Inputs(load(TINY[:-1]), dtype, CPU)
    loss = bench.loss_function(name, CPU, compiled=False)(inputs.x, inputs.weight, inputs.targets)
    assert loss.item() == pytest.approx(inputs.exact(), abs=2 * error)  # torch rounds the loss to bfloat16, steps of 0.03
    found = torch.autograd.grad(loss, (inputs.x, inputs.weight))
    p = (inputs.x.detach().double() @ inputs.weight.detach().double().T).softmax(-1)
    p[torch.arange(64), inputs.targets] -= 1
    expected = p @ inputs.weight.double() / 64, p.T @ inputs.x.double() / 64
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() < error * b.norm()


def test_memory_is_that_of_the_logits_or_not():
    """Plain: logits, their softmax and gradient, 25 MB each; ours a quarter of the rows, and the head's gradient."""
    config = load(["--device=cpu", "--micro_batch_size=4", "--block_size=512", "--n_embd=32", "--n_head=2", "--vocab_size=12576",
                   "--eval_tokens=512"])
    logits = 4 * 2048 * 12576
    memory = {name: bench.in_fresh_process(bench.peak_memory, name, config, "float32", False) for name in ("ours", "plain")}
    assert 1.9 * logits < memory["plain"] < 3.5 * logits
    assert 0.2 * logits < memory["ours"] < 0.8 * logits


def test_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "in_fresh_process", lambda function, name, *_: {"ours": 2**20, "plain": 3 * 2**20}[name])
    path = tmp_path / "loss.json"
    assert command.main(["loss", *TINY, "--compare=plain", "--dtypes=float32,bfloat16", f"--json={path}"]) == 0
    record = json.loads(path.read_text())
    assert list(record["dtypes"]) == ["float32", "bfloat16"] and list(record["dtypes"]["float32"]) == ["ours", "plain"]
    plain = record["dtypes"]["bfloat16"]["plain"]
    assert plain["memory_to_ours"] == 3 and len(plain["ms"]) == 2 and plain["loss_error"] < 0.02
    out = capsys.readouterr().out
    assert "liger: left out" in out and "plain" in out.splitlines()[-1]


def test_no_memory_at_all_loses_no_other_figure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "in_fresh_process", lambda *_: 0)
    path = tmp_path / "loss.json"
    assert command.main(["loss", *TINY, "--compare=plain", "--dtypes=float32", f"--json={path}"]) == 0
    plain = json.loads(path.read_text())["dtypes"]["float32"]["plain"]
    assert plain["memory_to_ours"] is None and plain["time_to_ours"][1] > 0
    assert " n/a " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("argv, said", [
    (["--compare=liger"], "found 'liger'"), (["--dtypes=int8"], "found 'int8'"), (["--rounds=1"], "--rounds"),
    (["--device=cuda:77"], "cuda:77"),
])
def test_bad_arguments_exit_2_before_any_work(argv, said, capsys):
    assert command.main(["loss", *TINY, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err

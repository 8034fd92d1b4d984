"""scripts/bench/optimizer.py: all forms make the same step, and GB/s is what it says."""

import json

import pytest
import torch

from configurator import load
from scripts.bench import __main__ as command
from scripts.bench import optimizer as bench

TINY = ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--vocab_size=61", "--eval_tokens=16"]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_all_forms_make_the_same_steps(clip):
    config = load([*TINY, f"--grad_clip={clip}", "--learning_rate=0.01"])
    arms = [bench.Arm(form, config, torch.device("cpu")) for form in bench.FORMS]
    start = [p.detach().clone() for p in arms[0].parameters]
    for arm in arms:
        for _ in range(3):
            assert arm.step() > 0
    assert all((p - q).abs().max() > 0.01 for p, q in zip(arms[0].parameters, start, strict=True))
    for other in arms[1:]:
        for p, q in zip(arms[0].parameters, other.parameters, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_every_step_clips():
    arm = bench.Arm("fused", load(TINY), torch.device("cpu"))
    for _ in range(2):
        arm.step()
        assert torch.nn.utils.get_total_norm([p.grad for p in arm.parameters]).item() == pytest.approx(1.0, abs=1e-4)


def test_summary_from_known_numbers():
    result = bench.summarize({"fused": [10.0, 20.0, 10.0], "foreach": [15.0, 20.0, 20.0]}, n_parameters=10**6)
    assert result["fused"]["gb_per_s"] == pytest.approx(4 * 10 * 1e6 / 0.010 / 1e9)
    assert result["foreach"]["time_to_fused"][1] == 1.5 and "1.500" in bench.table(result)


def test_command(tmp_path, capsys):
    path = tmp_path / "optimizer.json"
    assert command.main(["optimizer", *TINY, "--rounds=2", f"--json={path}"]) == 0
    record = json.loads(path.read_text())
    assert list(record["arms"]) == ["fused", "foreach", "for_loop"] and len(record["arms"]["foreach"]["ms"]) == 2
    assert f"{record['n_parameters']:,} parameters" in capsys.readouterr().out


def test_bad_arguments_exit_2(capsys):
    assert command.main(["optimizer", *TINY, "--rounds=1"]) == 2
    assert "--rounds" in capsys.readouterr().err

"""scripts/bench/xsa.py: that it counts bytes as one would by hand, and that XSA's compiled pass moves no more than it must."""

import json

import pytest
import torch

from configurator import load
from scripts.bench import __main__ as command
from scripts.bench import xsa as bench

TINY = ["--device=cpu", "--n_embd=32", "--n_head=4", "--block_size=16", "--micro_batch_size=2", "--eval_tokens=16"]
CPU = torch.device("cpu")


def test_bytes_of_operators_by_hand():
    x, y = torch.ones(10, 4), torch.ones(4)
    assert bench.moved_eager(lambda: x + y) == 4 * (40 + 4 + 40)
    assert bench.moved_eager(lambda: x.t().reshape(4, 10)[1:].unsqueeze(0)) == 0  # views
    assert bench.moved_eager(lambda: x.t().flatten()) == 4 * (40 + 40)  # a copy
    assert bench.moved_eager(lambda: (x * 2).sum(-1)) == 4 * (40 + 40 + 40 + 10)
    assert bench.moved_eager(lambda: x.mul_(2)) == 4 * (40 + 40)


def test_bytes_needed():
    config = load([*TINY, "--n_kv_head=2"])
    y, v = 2 * 16 * 4 * 8, 2 * 16 * 2 * 8
    assert bench.needed(config, 2) == {"forward": 2 * (y + v + y), "backward": 2 * (y + v + y + y + v + y)}


def test_the_passes_are_those_of_training():
    """Against autograd through the formula; y and v lie in memory as attention leaves them."""
    config = load([*TINY, "--n_kv_head=2"])
    y, v, dz = bench.make_inputs(config, CPU)
    assert y.transpose(1, 2).is_contiguous() and v.transpose(1, 2).is_contiguous() and y.shape == (2, 4, 16, 8)
    y, v = y.double().requires_grad_(), v.double().requires_grad_()
    vs = v.repeat_interleave(2, dim=1)
    z = (y - (y * vs).sum(-1, keepdim=True) / vs.square().sum(-1, keepdim=True) * vs).transpose(1, 2).flatten(2)
    with torch.no_grad():
        found = bench.exclude(y, v).transpose(1, 2).flatten(2), *bench.exclude_backward(y, v, dz.double())
    torch.testing.assert_close(found, (z, *torch.autograd.grad(z, (y, v), dz.double()), z))


@pytest.mark.slow  # torch.compile builds C++ code
def test_the_compiled_pass_moves_what_it_must(tmp_path, capsys):
    """One kernel each way, in training's bf16: two reads and a write, three reads and three writes; eager, far more."""
    path = tmp_path / "xsa.json"
    assert command.main(["xsa", *TINY, "--dtype=bfloat16", "--rounds=2", f"--json={path}"]) == 0
    record = json.loads(path.read_text())
    ratios = {name: one["moved_to_needed"] for name, one in record["passes"].items()}
    assert 1 <= ratios["compiled forward"] < 1.05 and 1 <= ratios["compiled backward"] < 1.05
    assert ratios["eager forward"] > 5 and ratios["eager backward"] > 5
    for one in record["passes"].values():
        assert len(one["ms"]) == 2 and one["gb_per_s"] == pytest.approx(one["bytes_needed"] / one["ms_quartiles"][1] / 1e6)
    assert "a copy:" in capsys.readouterr().out


@pytest.mark.parametrize("argv, said", [(["--rounds=1"], "--rounds"), (["--n_kv_head=3"], "n_kv_head"), (["--heads=3"], "heads")])
def test_bad_arguments_exit_2(argv, said, capsys):
    assert command.main(["xsa", *TINY, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and said in err
    assert command.main(["xsa", "--help"]) == 0

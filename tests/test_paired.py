"""eval/paired.py against a brute-force computation: whole logits, softmax in fp64, the textbook's standard error."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

import train
from data.shards import open_dataset
from eval import paired
from model import GPT
from tests.test_train import SMALL, dataset, parsed  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("paired")
    for attention in ("sa", "xsa"):
        arguments = [*SMALL, f"--dataset={dataset}", f"--attention={attention}", f"--out_dir={folder / attention}"]
        assert train.main(arguments) == 0
    return folder


def brute_force(run, stream, block_size: int, windows: int) -> np.ndarray:
    model = GPT.from_checkpoint(run / "ckpt_00000012.pt").double()
    available = (stream.n_tokens - 1) // block_size
    losses = []
    for i in range(windows):
        tokens = torch.from_numpy(stream.read(i * available // windows * block_size, block_size + 1).astype(np.int64))
        with torch.no_grad():
            logits, _ = model(tokens[None, :-1])
        losses.append(-logits[0].log_softmax(-1).gather(1, tokens[1:, None]).mean().item())
    return np.array(losses)


def test_difference_and_standard_error(runs, dataset, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "paired.json"
    assert paired.main([str(runs / "sa"), str(runs / "xsa"), f"--json={out}"]) == 0
    found = json.loads(out.read_text())
    stream = open_dataset(dataset).val
    a, b = (brute_force(runs / name, stream, 32, 19) for name in ("sa", "xsa"))  # eval_tokens=608
    assert np.allclose(found["losses"], [a, b], atol=2e-5)
    assert found["windows"] == 19
    assert found["difference"] == pytest.approx((b - a).mean(), abs=2e-5)
    assert found["standard_error"] == pytest.approx((b - a).std(ddof=1) / math.sqrt(19), rel=1e-3)
    assert found["standard_error"] < math.hypot(a.std(), b.std()) / math.sqrt(19)  # what pairing is for
    logged = [[m["loss"] for m in parsed(runs / name) if m["split"] == "val"][-1] for name in ("sa", "xsa")]
    assert np.allclose(np.mean(found["losses"], axis=1), logged, atol=1e-5)
    assert f"{found['difference']:+.4f} ± {found['standard_error']:.4f}" in capsys.readouterr().out


def test_a_run_against_itself_is_exactly_zero(runs):
    losses = paired.window_losses(paired.newest(runs / "sa"), torch.device("cpu"))
    assert paired.paired(losses, losses) == paired.Paired(0.0, 0.0, 19)
    assert paired.paired([1.0], [3.0]) == paired.Paired(2.0, None, 1)


@pytest.mark.parametrize("fault", ["nothing there", "no checkpoint", "other windows", "other data", "json", "a text"])
def test_bad_input(fault, runs, tmp_path, capsys):
    other, more = runs / "xsa", []
    if fault == "nothing there":
        other = tmp_path / "no"
    elif fault == "no checkpoint":
        other = tmp_path
    elif fault == "a text":
        other = tmp_path / "README.md"
        other.write_text("# A text\n")
    elif fault == "json":
        more = [f"--json={tmp_path}/no/x.json"]
    else:
        other = tmp_path / "run"
        shutil.copytree(runs / "xsa", other)
        path = other / "ckpt_00000012.pt"
        state = torch.load(path, weights_only=True)
        if fault == "other windows":
            state["config"]["eval_tokens"] = 320
        else:
            state["data"]["fingerprint"] = "another"
        torch.save(state, path)
    assert paired.main([str(runs / "sa"), str(other), *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1].startswith("error: ")
    assert fault != "a text" or captured.err == f"error: {other} is no checkpoint (ckpt_*.pt), or its end is missing\n"

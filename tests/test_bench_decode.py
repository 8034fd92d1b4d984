"""scripts/bench/decode.py: that both sides decode the same model and that the numbers are right."""

import json

import pytest
import torch

from configurator import load
from scripts.bench import __main__ as command
from scripts.bench import decode as bench

TINY = ["--device=cpu", "--n_layer=2", "--n_head=4", "--n_embd=32", "--block_size=32", "--vocab_size=61", "--eval_tokens=32"]


def arms(*names: str, seed: int = 1337) -> dict[str, bench.Arm]:
    config = load([*TINY, "--bias=True", f"--seed={seed}"])
    idx = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {name: bench.Arm(name, config, idx, 20) for name in names}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hugging_face_continues_as_we_do(seed):
    """And the text says something: not one token for ever, and not what it would be without the prompt."""
    pytest.importorskip("transformers")
    pair = arms("sa", "hf", seed=seed)
    bench.check_ids(pair)
    ids = pair["hf"].decode()
    assert ids.shape == (2, 29) and torch.equal(ids[:, :9], pair["hf"].idx)
    assert all(len(set(row.tolist())) > 2 for row in ids[:, 9:]) and not torch.equal(ids[0, 9:], ids[1, 9:])


def test_other_ids_end_the_measurement():
    pytest.importorskip("transformers")
    pair = arms("sa", "hf")
    with torch.no_grad():
        pair["hf"].model.gpt_neox.layers[0].attention.dense.weight.zero_()
    with pytest.raises(RuntimeError, match="different ids"):
        bench.check_ids(pair)


def test_summary_from_known_numbers():
    times = {"sa": [100.0, 200.0, 100.0], "hf": [150.0, 200.0, 200.0], "xsa": [100.0, 400.0, 125.0]}
    result = bench.summarize(times, batch=2, new=10)
    assert result["arms"]["sa"]["tokens_per_s"] == pytest.approx(200)
    assert result["speed_ratios"]["sa/hf"][1] == 1.5 and result["speed_ratios"]["xsa/sa"][1] == pytest.approx(0.8)
    assert "held, 50.0% to spare" in bench.table(result)


def test_command(tmp_path, capsys):
    pytest.importorskip("transformers")
    path = tmp_path / "decode.json"
    argv = ["decode", *TINY, "--prompt=4", "--new=6", "--batch=2", "--rounds=2", "--compare=hf,gsxa", f"--json={path}"]
    assert command.main(argv) == 0
    record = json.loads(path.read_text())
    assert list(record["arms"]) == ["sa", "hf", "gsxa"] and list(record["speed_ratios"]) == ["sa/hf", "gsxa/sa"]
    assert all(len(arm["ms"]) == 2 and min(arm["ms"]) > 0 for arm in record["arms"].values())
    assert "tokens/s, sa / Hugging Face" in capsys.readouterr().out


@pytest.mark.parametrize("argv, said", [
    (["--prompt=0"], "--prompt"), (["--new=31"], "block_size=32"), (["--compare=gpt2"], "found 'gpt2'"),
    (["--n_sink=1"], "--compare without hf"), (["--n_kv_head=2"], "--compare without hf"), (["--rounds=1"], "--rounds"),
])
def test_bad_arguments_exit_2_before_any_work(argv, said, capsys):
    assert command.main(["decode", *TINY, "--prompt=4", "--new=6", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err

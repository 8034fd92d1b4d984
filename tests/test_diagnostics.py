"""eval/diagnostics.py against models whose attention is known, and against the model's own forward pass."""

import json
import math
from pathlib import Path

import pytest
import torch

from eval.diagnostics import diagnose, main, read_diagnostics
from model import GPT
from presets import PRESETS, GPTConfig

TINY = {"block_size": 16, "vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32}


def tokens(T: int = 12) -> torch.Tensor:
    return torch.randint(0, 61, (2, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", PRESETS)
def test_its_pass_is_the_model_s_and_leaves_the_model_as_it_was(attention, monkeypatch):
    dropout = 0.0 if attention == "diff" else 0.1
    model = GPT(GPTConfig(**TINY, attention=attention, n_kv_head=2, n_sink=1, dropout=dropout), seed=0).train()
    outputs = []
    for block in model.h:
        block.register_forward_hook(lambda _, __, out: outputs.append(out[0].abs().max().item()))
    found = diagnose(model, tokens())
    assert not outputs and model.training and model.max_logits is None
    model.eval()(tokens())
    assert [layer["largest_activation"] for layer in found] == pytest.approx(outputs)
    assert all(math.isfinite(value) for layer in found for value in layer.values())
    switches = PRESETS[attention].switches
    assert ("gate_mean" in found[0], "ssmax" in found[0]) == ("gate" in switches, switches.get("softmax") == "ssmax")


def test_uniform_attention():
    """With q = 0 every query spreads itself evenly over the keys that it sees."""
    model = GPT(GPTConfig(**TINY), seed=0)
    with torch.no_grad():
        model.h[0].attn.c_attn.weight[:32] = 0
    found, t = diagnose(model, tokens())[0], torch.arange(1, 13)
    assert found["largest_logit"] == 0
    assert found["attention_entropy"] == pytest.approx(t.log().mean().item(), rel=1e-5)
    assert found["first_token_mass"] == pytest.approx((1 / t[1:]).mean().item(), rel=1e-5)


@pytest.mark.parametrize("attention", ["sa", "gated", "resformer", "sigmoid", "sink", "diff", "gpt_oss"])
def test_what_a_sequence_of_one_token_lacks_is_left_out(attention):
    shape = TINY | {"block_size": 1}
    one, two = (diagnose(GPT(GPTConfig(**shape, attention=attention, n_sink=sinks), seed=0), tokens(1))[0] for sinks in (0, 1))
    assert all(math.isfinite(value) for value in (*one.values(), *two.values()))
    assert two.keys() - one.keys() == {"first_token_mass"} and not one.keys() - two.keys()
    if attention == "sa":
        assert one["attention_entropy"] == 0
        narrow = {"n_embd": 1, "n_head": 1, "head_dim": 2}
        assert "kurtosis" not in diagnose(GPT(GPTConfig(**TINY | narrow), seed=0), tokens())[0]


def test_equal_tokens_have_the_value_s_direction():
    found = diagnose(GPT(GPTConfig(**TINY, attention="xsa"), seed=0), torch.full((2, 12), 5))
    assert found[0]["cos_y_v"] == pytest.approx(1.0, abs=1e-5)


def test_gate_and_scale_are_means():
    model = GPT(GPTConfig(**TINY, attention="gsxa"), seed=0)
    assert [layer["gate_mean"] for layer in diagnose(model, tokens())] == [1.0, 1.0]
    with torch.no_grad():
        model.h[1].attn.ssmax.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert diagnose(model, tokens())[1]["ssmax"] == pytest.approx(0.25)


@pytest.mark.parametrize("attention", ["sa", "gsxa", "softcap"])
def test_largest_logit_and_kurtosis_by_definition(attention):
    model = GPT(GPTConfig(**TINY, attention=attention, n_kv_head=4), seed=0)
    seen = {}
    attn = model.h[1].attn
    project = attn.project
    attn.project = lambda *a: seen.setdefault("qkv", project(*a))
    found = diagnose(model, tokens())[1]
    q, k, _ = seen["qkv"]
    s = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    assert found["largest_logit"] == pytest.approx(s.max().item(), rel=1e-4)
    del attn.project
    outputs = []
    model.h[1].register_forward_hook(lambda _, __, out: outputs.append(out[0].double()))
    model(tokens())
    z = (outputs[0] - outputs[0].mean(-1, keepdim=True)) / outputs[0].std(-1, correction=0, keepdim=True)
    assert found["kurtosis"] == pytest.approx((z**4).mean().item(), rel=1e-4)


# --- the picture -------------------------------------------------------------------------------------------------------------


def write_run(folder: Path, **more) -> Path:
    folder.mkdir(parents=True)
    lines = [{"step": 1, "tokens": 4, "split": "train", "loss": 1.0}]
    lines += [{"step": step, "split": "diagnostics", "kurtosis": [3.0, None, step], **more} for step in (2, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "tok')
    return folder


def test_what_was_logged_is_read_and_drawn(tmp_path, capsys):
    a, b = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", gate_mean=[1.0, 1.0, 1.0])
    assert read_diagnostics(a) == ([2, 4], {"kurtosis": [[3.0, None, 2], [3.0, None, 4]]})
    assert main([str(a)]) == 0 and (a / "diagnostics.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(a), str(b), f"--out={tmp_path / 'two.png'}"]) == 0
    assert (tmp_path / "two.png").stat().st_size > (a / "diagnostics.png").stat().st_size
    assert f"written: {tmp_path / 'two.png'}" in capsys.readouterr().out


@pytest.mark.parametrize("text, said", [
    (None, "cannot be read"), ("[]\n", "not the metrics file"), ("{\n", "not the metrics file"),
    ('{"step": 1, "split": "train"}\n', "--diagnostics_interval"),
])
def test_runs_without_diagnostics_are_named(tmp_path, text, said, capsys):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main([str(tmp_path)]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "diagnostics.png").exists()
    assert main([str(write_run(tmp_path / "r")), "--out=no/such/folder.png"]) == 2

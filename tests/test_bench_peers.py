"""scripts/bench/peers.py: the Hugging Face step computes what ours does where the models agree."""

import json
from itertools import cycle

import pytest
import torch
from torch import nn

from configurator import Config
from distributed import Ranks
from scripts.bench import __main__ as command
from scripts.bench import peers as bench
from train import Run

pytest.importorskip("transformers")
CONFIG = Config(n_layer=2, n_head=4, n_embd=32, vocab_size=61, block_size=24, eval_tokens=24, global_batch_size=4,
                micro_batch_size=2, warmup_iters=0, learning_rate=1e-3, grad_clip=0.1, device="cpu", dtype="float32")
NAMES = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "attention.dense",
         "mlp.c_fc": "mlp.dense_h_to_4h", "mlp.c_proj": "mlp.dense_4h_to_h", "attn.c_attn": "attention.query_key_value"}


def theirs(name: str) -> str:
    if name == "wte.weight":
        return "gpt_neox.embed_in.weight"
    if name == "ln_f.weight":
        return "gpt_neox.final_layer_norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"gpt_neox.layers.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def by_head(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """q, k, v of each head together, as GPT-NeoX has them."""
    return tensor.unflatten(0, (3, 4, 8)).transpose(0, 1).flatten(0, 2) if "c_attn" in name else tensor


@pytest.fixture
def pair() -> tuple[bench.HuggingFaceRun, Run]:
    """The same weights in fp64, without our LayerNorm after the embedding."""
    hf = bench.HuggingFaceRun(CONFIG, torch.device("cpu"))
    run = Run(CONFIG, Ranks(0, 1, torch.device("cpu")))
    run._build(None)
    hf.model.double()
    run.model.double().ln_emb = nn.Identity()
    run.parameters = list(run.model.parameters())
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.mul_(5) if p.ndim == 2 else p.add_(torch.linspace(-0.2, 0.2, len(p), dtype=p.dtype))
            hf.model.get_parameter(theirs(name)).copy_(by_head(name, p))
    return hf, run


def batches(n: int) -> list:
    tokens = torch.randint(61, (n, 2, 25), generator=torch.Generator().manual_seed(0))
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def test_the_same_parameters(pair):
    hf, run = pair
    assert sum(p.numel() for p in hf.model.parameters()) == sum(p.numel() for p in run.parameters)


def test_the_whole_optimizer_step_equals_ours(pair):
    """Loss, micro-steps, clipping and AdamW's groups, over three steps. GPT-NeoX's rotary table is fp32 in any case."""
    hf, run = pair
    left, right = cycle(batches(2)), cycle(batches(2))
    for _ in range(3):
        assert hf.train_step(left)["loss"] == pytest.approx(run.train_step(right)["loss"], rel=1e-6)
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(hf.model.get_parameter(theirs(name)), by_head(name, p), rtol=1e-4, atol=1e-6, msg=name)


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.step, "measure_memory", lambda name, config: 1000 + len(name))
    path = tmp_path / "peers.json"
    argv = ["peers", "--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--vocab_size=512", "--micro_batch_size=2",
            "--global_batch_size=4", "--rounds=2", "--device=cpu", f"--json={path}"]
    assert command.main(argv) == 0
    record = json.loads(path.read_text())
    assert list(record["arms"]) == ["nanogpt", "hf", "sa"] and list(record["ratios"]) == ["sa/nanogpt", "sa/hf"]
    assert "step time, sa / hf" in capsys.readouterr().out


@pytest.mark.parametrize("argv, said", [(["--n_sink=1"], "n_sink"), (["--head_dim=8"], "head_dim")])
def test_bad_arguments_exit_2(argv, said, capsys):
    assert command.main(["peers", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and said in err

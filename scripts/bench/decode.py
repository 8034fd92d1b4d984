"""What decoding costs: tokens/s of model.generate with its KV cache against Hugging Face's generate on the same weights.

    python -m scripts.bench decode                                          # GPT-2's 124M shape, prompt of 64, 64 new tokens
    python -m scripts.bench decode config/quickstart.py --batch=8 --new=128 --compare=hf,gsxa

The command line is train.py's: config files, then --key=value; without a config file the shape is GPT-2's 124M. Greedy, fp32,
eager, biases everywhere because the Hugging Face model (GPT-NeoX, which has the same parts) has them. Flags of its own:
    --prompt=N       tokens of each prompt (default 64)
    --new=N          tokens that follow (default 64)
    --batch=N        sequences at a time (default 1)
    --compare A B    what to measure beside sa: hf or attention presets (default hf,xsa)
    --rounds=N       timed rounds (default 10); in each every arm decodes once, in an order that changes from round to round
    --json=FILE      also write every measurement, with versions and hardware

First sa and Hugging Face must give the same ids. Weights are larger than at the start of training: with those the last token,
whose own logit the tied head makes large, would follow for ever, whatever attention does. A call's time has the prompt in it.
Ratios of speed are medians over rounds of the ratio within a round.
"""

import argparse
import json
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import distributed
from checkpoint import write_aside
from command_line import InputError
from configurator import Config, as_dict, load
from model import GPT
from presets import PRESETS
from scripts.bench import common
from scripts.bench.common import quartiles, take_turns, verdict
from tracker import environment


def build(config: Config, device: torch.device) -> GPT:
    with device:
        model = GPT(config.model_config(), seed=config.seed).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:  # deviation 0.02 at the start, less where they write into the residual stream
                p.mul_(4 / math.sqrt(config.n_embd) / 0.02)
    return model


@torch.no_grad()
def as_gpt_neox(model: GPT) -> nn.Module:
    """Hugging Face's GPT-NeoX, in eval mode, with the weights of a model of attention sa with biases.

    It has the paper's parts: LayerNorm, full rotary in halves, exact GELU of four times the width, sequential residual. The
    LayerNorm of the embedding, which it lacks, is put into the embedding matrix, every row normalised beforehand: its head is
    not tied."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    c = model.config
    like = model.wte.weight
    theirs = GPTNeoXForCausalLM(GPTNeoXConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        intermediate_size=4 * c.n_embd, hidden_act="gelu", max_position_embeddings=c.block_size, layer_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base, "partial_rotary_factor": 1.0},
        use_parallel_residual=False, attention_bias=True, tie_word_embeddings=False, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )).to(like.device, like.dtype).eval()
    theirs.get_input_embeddings().weight.copy_(model.ln_emb(like))
    theirs.get_output_embeddings().weight.copy_(like)
    pairs = [(model.ln_f, theirs.gpt_neox.final_layer_norm)]
    for a, b in zip(model.h, theirs.gpt_neox.layers, strict=True):
        pairs += [(a.ln_1, b.input_layernorm), (a.ln_2, b.post_attention_layernorm), (a.attn.c_proj, b.attention.dense),
                  (a.mlp.c_fc, b.mlp.dense_h_to_4h), (a.mlp.c_proj, b.mlp.dense_4h_to_h)]
        for name in ("weight", "bias"):  # ours has all heads' q, then k, then v; theirs q, k, v of head 0, then of head 1, ...
            qkv = getattr(a.attn.c_attn, name).unflatten(0, (3, c.n_head, c.head_dim)).transpose(0, 1).flatten(0, 2)
            getattr(b.attention.query_key_value, name).copy_(qkv)
    for a, b in pairs:
        b.load_state_dict(a.state_dict())
    return theirs


class Arm:
    """hf, or an attention preset, ready to continue the prompts idx (B, T)."""

    def __init__(self, name: str, config: Config, idx: Tensor, new: int):
        self.name, self.idx, self.new = name, idx, new
        model = build(config.with_attention("sa" if name == "hf" else name), idx.device)
        self.model = as_gpt_neox(model) if name == "hf" else model

    def decode(self) -> Tensor:
        """(B, T + new)."""
        if self.name != "hf":
            return self.model.generate(self.idx, self.new, temperature=0)
        with torch.no_grad():
            return self.model.generate(self.idx, attention_mask=torch.ones_like(self.idx), max_new_tokens=self.new,
                                       do_sample=False)

    def step(self) -> float:
        """Milliseconds of one call."""
        return common.milliseconds(self.decode, self.idx.device)


def check_ids(arms: dict[str, Arm]) -> None:
    """Raises RuntimeError where sa and hf, both measured, do not give the same ids."""
    if "hf" not in arms:
        return
    ours, theirs = arms["sa"].decode(), arms["hf"].decode()
    if ours.shape != theirs.shape or not torch.equal(ours, theirs):
        raise RuntimeError("sa and Hugging Face give different ids, so that their times cannot be compared; where two logits are "
                           "within rounding of each other another --seed helps")


def summarize(times: dict[str, list[float]], batch: int, new: int) -> dict[str, Any]:
    """Per arm tokens/s and milliseconds a token; the ratio of speeds of sa to hf, and of every preset to sa."""
    arms: dict[str, Any] = {}
    for name, ms in times.items():
        median = quartiles(ms)[1]
        arms[name] = {"ms": ms, "ms_quartiles": quartiles(ms), "tokens_per_s": 1000 * batch * new / median}
    pairs = [("sa", name) if name == "hf" else (name, "sa") for name in times if name != "sa"]
    ratios = {f"{a}/{b}": quartiles([y / x for x, y in zip(times[a], times[b], strict=True)]) for a, b in pairs}
    return {"arms": arms, "speed_ratios": ratios}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'arm':14} {'ms a call':>10}  {'quartiles':>21}  {'tokens/s':>9}"]
    for name, arm in result["arms"].items():
        low, median, high = arm["ms_quartiles"]
        lines.append(f"{name:14} {median:10.1f}  {low:9.1f} - {high:9.1f}  {arm['tokens_per_s']:9.1f}")
    for pair, (low, median, high) in result["speed_ratios"].items():
        lines.append(f"{pair}: tokens/s {median:.3f} (quartiles {low:.3f} - {high:.3f})")
    if "sa/hf" in result["speed_ratios"]:
        spread = result["speed_ratios"]["sa/hf"]
        lines.append(verdict("tokens/s, sa / Hugging Face", spread[1], 1.0, spread, at_least=True))
    return "\n".join(lines)


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags (with arms) and the model's settings. Raises InputError."""
    parser = common.parser("decode", rounds=10)
    for flag, default in (("--prompt", 64), ("--new", 64), ("--batch", 1)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--compare", default="hf,xsa")
    own, rest = parser.parse_known_args(argv)
    common.check(own)
    for name in ("prompt", "new", "batch"):
        if getattr(own, name) < 1:
            raise InputError(f"--{name}: wanted at least 1, found {getattr(own, name)}")
    own.arms = list(dict.fromkeys(["sa", *own.compare.split(",")]))
    if unknown := [name for name in own.arms if name != "hf" and name not in PRESETS]:
        raise InputError(f"--compare: wanted hf or some of {', '.join(PRESETS)}, found {unknown[0]!r}")
    config = replace(load(rest), bias=True)
    if own.prompt + own.new > config.block_size:
        raise InputError(f"--prompt, --new: wanted at most block_size={config.block_size} tokens together, found "
                         f"{own.prompt + own.new}: beyond it there is no cache")
    unlike = config.n_sink or config.n_kv_head != config.n_head or config.head_dim * config.n_head != config.n_embd
    if "hf" in own.arms and unlike:
        raise InputError("GPT-NeoX has no n_sink, no n_kv_head, and heads of n_embd / n_head: use --compare without hf")
    return own, config


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, config = parse(argv)
    device = distributed.start(config).device
    facts = environment(device)
    print(f"{', '.join(own.arms)} on {facts['hardware']['device']}, torch {torch.__version__}, float32, greedy\n"
          f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, vocabulary {config.vocab_size}; {own.batch} "
          f"prompts of {own.prompt} tokens, {own.new} new ones each; {own.rounds} rounds", flush=True)
    generator = torch.Generator().manual_seed(config.seed)
    idx = torch.randint(config.vocab_size, (own.batch, own.prompt), generator=generator).to(device)
    arms = {name: Arm(name, config, idx, own.new) for name in tqdm(own.arms, desc="models", disable=None)}
    check_ids(arms)
    result = summarize(take_turns(arms, own.rounds), own.batch, own.new)
    print(table(result))
    if own.json:
        record = {**result, "config": as_dict(config), "prompt": own.prompt, "new": own.new, "batch": own.batch, **facts}
        write_aside(own.json, json.dumps(record, indent=1) + "\n")
    return 0

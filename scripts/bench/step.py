"""What a training step costs: time and peak memory of this repository's step against NanoGPT's, and of XSA's against SA's.

    python -m scripts.bench step                                                       # a CPU-sized shape, two to three minutes
    python -m scripts.bench step config/1.4b.py --global_batch_size=8 --compare xsa gsxa --json=bench.json

The command line is train.py's: config files, then --key=value. A step is an optimizer step as these give it, train.py's own
for presets: forward and backward over global_batch_size / micro_batch_size micro-batches, clipping, AdamW. Flags of its own:
    --rounds=N       timed rounds (default 6); in each every arm makes one step, in an order that changes from round to round
    --compare A B    what to measure beside sa: nanogpt, hf (see `peers`), any presets of attention (default nanogpt,xsa)
    --json=FILE      also write every measurement, with versions and hardware

Ratios of time are medians over rounds of the ratio within a round, so that a machine that is slow for a while is slow for all.

Peak memory is that of a second step, in a fresh process for each arm. On CUDA it is torch's max_memory_allocated. On CPU it is
the process's largest resident set less what is resident before the model is built, and that process is started with
MALLOC_MMAP_THRESHOLD_=65536: by default glibc keeps freed blocks that are smaller than a threshold which grows as it goes, and
what a step has freed would count as well. glibc reads the variable when a process starts; every arm has it.
"""

import argparse
import gc
import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

import distributed
from checkpoint import write_aside
from command_line import InputError
from configurator import Config, as_dict
from distributed import Ranks
from model import GPT, IGNORE
from presets import PRESETS
from scripts.bench import common
from scripts.bench.common import WARM_UP_ROUNDS, quartiles, quotient, shown, synchronize, take_turns, verdict
from scripts.bench.memory import TINY_SHAPE, in_fresh_process, process_status
from tracker import environment, peak_flops
from train import Run, autocast_dtype

PEERS = ("nanogpt", "hf")
# Without a config file: GPT-2's width and vocabulary, cut in depth and length to what a CPU can do while one waits.
DEFAULT_SHAPE = ["--n_layer=4", "--block_size=512", "--micro_batch_size=4", "--global_batch_size=4"]

Batch = tuple[Tensor, Tensor]


# --- NanoGPT, restated ------------------------------------------------------------------------------------------------------


class NanoGPTBlock(nn.Module):
    """Pre-norm block of GPT-2: fused qkv, causal SDPA, GELU MLP of four times the width."""

    def __init__(self, config: Config):
        super().__init__()
        inner = config.n_head * config.head_dim
        self.n_head, self.dropout = config.n_head, config.dropout
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.qkv = nn.Linear(config.n_embd, 3 * inner, bias=config.bias)
        self.proj = nn.Linear(inner, config.n_embd, bias=config.bias)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.drop(self.proj(y.transpose(1, 2).contiguous().view(B, T, -1)))
        return x + self.drop(self.down(self.gelu(self.up(self.ln_2(x)))))


class NanoGPT(nn.Module):
    """NanoGPT's GPT written anew from its description (github.com/karpathy/nanoGPT; GPT-2, Radford 2019): learned positions,
    tied head, cross entropy over the whole logits. The head size is free as ours is, so that both have the same matrices."""

    def __init__(self, config: Config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(NanoGPTBlock(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """idx, targets (B, T) -> (logits (B, T, V), mean cross entropy)."""
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


class NanoGPTRun:
    """NanoGPT's training step, with the interface of train.Run: the whole model compiled, AdamW fused on CUDA only, clipping by
    torch's function."""

    def __init__(self, config: Config, device: torch.device):
        self.config = config
        dtype = autocast_dtype(config.dtype, device)
        self.autocast = nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
        torch.set_float32_matmul_precision("high")  # it allows TF32, as train.py does
        torch.manual_seed(config.seed)
        with device:
            self.model = self.build_model(config)
        groups = [{"params": [p for p in self.model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
                  {"params": [p for p in self.model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        fused = {"fused": True} if device.type == "cuda" else {}  # elsewhere the argument is not given at all
        self.optimizer = self.build_optimizer(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), **fused)
        self.forward = torch.compile(self.model) if common.compiles(config, device) else self.model

    def build_model(self, config: Config) -> nn.Module:
        return NanoGPT(config)

    def build_optimizer(self, groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **settings)

    def train_step(self, batches: Iterator[Batch]) -> dict[str, float]:
        """One optimizer step.

        What is alive when is what NanoGPT's loop has alive: its model returns the logits beside the loss, in training too, and
        `logits, loss = model(X, Y)` at the level of the script keeps them until the next assignment. So they last through
        backward, whose start is the peak: logits, log-softmax and two gradients of that size beside all activations. (There
        they last through the optimizer and the next forward pass as well, which never reaches this peak.)"""
        config, n_micro_steps = self.config, self.config.accumulation(1)
        for _ in range(n_micro_steps):
            x, y = next(batches)
            with self.autocast:
                logits, loss = self.forward(x, y)
                loss = loss / n_micro_steps
            loss.backward()
        if config.grad_clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        del logits
        return {"loss": loss.item() * n_micro_steps}


class OurRun(Run):
    """train.py's run without data, from which a step that is not finite could be told where it lies."""

    def _count_bad_step(self, *_: Any) -> None:
        """The step's loss is None, which ends the measurement."""


# --- measuring --------------------------------------------------------------------------------------------------------------


class Arm:
    """One of PEERS or a preset, ready to make steps on batches of uniform tokens: the cost does not depend on which they are."""

    def __init__(self, name: str, config: Config, ranks: Ranks):
        self.name, self.device = name, ranks.device
        if name == "nanogpt":
            self.run = NanoGPTRun(config, ranks.device)
        elif name == "hf":
            from scripts.bench.peers import HuggingFaceRun

            self.run = HuggingFaceRun(config, ranks.device)
        else:
            self.run = OurRun(config.with_attention(name), ranks)
            self.run._build(None)
        generator = torch.Generator().manual_seed(config.seed)
        shape = (config.micro_batch_size, config.block_size + 1)
        tokens = (torch.randint(config.vocab_size, shape, generator=generator) for _ in range(config.accumulation(1)))
        self.batches = itertools.cycle([(t[:, :-1].to(ranks.device), t[:, 1:].to(ranks.device)) for t in tokens])

    def step(self) -> float:
        """Milliseconds of one optimizer step."""
        synchronize(self.device)
        start = time.perf_counter()
        loss = self.run.train_step(self.batches)["loss"]
        synchronize(self.device)
        elapsed = 1000 * (time.perf_counter() - start)
        if loss is None or not math.isfinite(loss):
            raise RuntimeError(f"the loss of {self.name} is not finite: what its step costs means nothing")
        return elapsed


def measure_memory(name: str, config: Config) -> int:
    """Peak bytes of one arm's second step, in a process of its own (see the module's docstring)."""
    return in_fresh_process(_peak_memory, name, config)


def _peak_memory(name: str, config: Config) -> int:
    ranks = distributed.start(config)
    if ranks.device.type == "cuda":
        arm = Arm(name, config, ranks)
        arm.step()  # makes AdamW's state, and compiles
        torch.cuda.reset_peak_memory_stats(ranks.device)
        arm.step()
        return torch.cuda.max_memory_allocated(ranks.device)
    Arm(name, replace(config, **TINY_SHAPE), ranks).step()
    before = process_status("VmRSS")
    arm = Arm(name, config, ranks)
    arm.step()
    arm.step()
    return process_status("VmHWM") - before


def allow_compilations(n_arms: int) -> None:
    """As many compiled forms of a block's code, which all arms share, as they need. Past its limit torch would go on uncompiled
    and not say so: an error in place of that."""
    torch._dynamo.config.recompile_limit = 8 * n_arms
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def measure_time(names: list[str], config: Config, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm's step, round by round. All arms are in memory at once and take turns."""
    ranks = distributed.start(config)
    allow_compilations(len(names))
    return take_turns({name: Arm(name, config, ranks) for name in names}, rounds)


def measure_group(
    configs: dict[str, Config], rounds: int, deadline: float = math.inf
) -> tuple[dict[str, list[float]], dict[str, int], dict[str, str]]:
    """Milliseconds of each round and peak bytes by label, and what failed of each that did. Arms are in memory at once and take
    turns, for fewer rounds, but at least two, where all would end after `deadline` (time.monotonic). Everything that it makes
    is gone when it returns."""
    torch._dynamo.reset()
    allow_compilations(len(configs))
    built: dict[str, Arm] = {}
    memory: dict[str, int] = {}
    errors: dict[str, str] = {}
    round_s = 0.0
    for label, config in configs.items():
        try:
            built[label], memory[label], elapsed = _prepare(config)
            round_s += elapsed / 1000
        except Exception as error:  # torch's compiler and Triton raise whatever they like; the others are measured
            errors[label] = brief(error)
    if built and deadline < math.inf:
        rounds = max(2, min(rounds, int((deadline - time.monotonic()) / round_s)))
    times = take_turns(built, rounds, show=False, warm_up=0)
    built.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return times, memory, errors


def _prepare(config: Config) -> tuple[Arm, int, float]:
    """An arm that is warmed up, its peak bytes and milliseconds of its second step. On CUDA others may lie beside it."""
    ranks = distributed.start(config)
    on_gpu = ranks.device.type == "cuda"
    others = torch.cuda.memory_allocated(ranks.device) if on_gpu else 0
    arm = Arm(config.attention, config, ranks)
    arm.step()  # compiles, and makes AdamW's state
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(ranks.device)
    elapsed = arm.step()
    if not on_gpu:
        return arm, measure_memory(config.attention, config), elapsed
    return arm, torch.cuda.max_memory_allocated(ranks.device) - others, elapsed


def brief(error: BaseException) -> str:
    """Type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def estimate_minutes(config: Config, n_arms: int, rounds: int, device: torch.device) -> float:
    """How long it will take, roughly: a step is taken to run at half of the speed that a matrix product has here, a process to
    start in five seconds, and a compilation to take forty (it is done twice, the second time from the compiler's cache)."""
    compiled = common.compiles(config, device)
    flops = flops_per_token(config) * config.global_batch_size * config.block_size
    step_s = flops / (0.5 * matrix_product_speed(config, device))
    return n_arms * ((2 + WARM_UP_ROUNDS + rounds) * step_s + 5 + 60 * compiled) / 60


def matrix_product_speed(config: Config, device: torch.device) -> float:
    """FLOP/s of a large matrix product in config's dtype, the best of five."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=autocast_dtype(config.dtype, device) or torch.float32)
    seconds = math.inf
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * size**3 / seconds


def flops_per_token(config: Config) -> int:
    with torch.device("meta"):
        return GPT(config.model_config()).flops_per_token()


# --- telling ----------------------------------------------------------------------------------------------------------------


def pairs(names: list[str]) -> list[tuple[str, str]]:
    """Whose ratios are told: sa's to its peers, every other preset's to sa and to the first of them."""
    presets = [name for name in names if name not in (*PEERS, "sa")]
    return ([("sa", name) for name in names if name in PEERS] + [(name, "sa") for name in presets]
            + [(name, presets[0]) for name in presets[1:]])


def summarize(times: dict[str, list[float]], memory: dict[str, int], config: Config, peak: float | None) -> dict[str, Any]:
    """Per arm: median and quartiles of the step, tokens/s, MFU, peak memory; per pair of arms: ratios. `peak` is the device's in
    FLOP/s, None where it is not known."""
    arms, ratios = {}, {}
    for name, ms in times.items():
        low, median, high = quartiles(ms)
        rate = config.global_batch_size * config.block_size / median * 1000
        arms[name] = {
            "step_ms": ms, "step_ms_quartiles": [low, median, high], "tokens_per_s": rate,
            "mfu": rate * flops_per_token(config.with_attention("sa" if name in PEERS else name)) / peak if peak else None,
            "peak_memory_bytes": memory[name],
        }
    for a, b in pairs(list(times)):
        if a not in times or b not in times:
            continue
        low, median, high = quartiles([x / y for x, y in zip(times[a], times[b], strict=True)])
        ratios[f"{a}/{b}"] = {"time": median, "time_quartiles": [low, median, high], "memory": quotient(memory[a], memory[b])}
    return {"arms": arms, "ratios": ratios}


def table(result: dict[str, Any]) -> str:
    wide = max(8, *map(len, result["arms"]))
    lines = [f"{'arm':{wide}}  {'ms/step':>9}  {'quartiles':>19}  {'tokens/s':>10}  {'MFU':>6}  {'peak memory':>11}"]
    for name, arm in result["arms"].items():
        low, median, high = arm["step_ms_quartiles"]
        mfu = "n/a" if arm["mfu"] is None else f"{arm['mfu']:.3f}"
        lines.append(f"{name:{wide}}  {median:9.1f}  {low:8.1f} - {high:8.1f}  {arm['tokens_per_s']:10,.0f}  {mfu:>6}  "
                     f"{arm['peak_memory_bytes'] / 2**20:7,.0f} MiB")
    for pair, ratio in result["ratios"].items():
        low, median, high = ratio["time_quartiles"]
        lines.append(f"{pair}: time {median:.3f} (quartiles {low:.3f} - {high:.3f}), peak memory {shown(ratio['memory'])}")
    return "\n".join(lines)


def figures(result: dict[str, Any], config: Config, device: str, compiled: bool) -> list[str]:
    """One line for each figure that this project holds itself to and that this run can speak of. `device` is cpu or a GPU's
    name."""
    lines = []
    if ratio := result["ratios"].get("sa/nanogpt"):
        lines.append(verdict("step time, sa / nanogpt", ratio["time"], 1.0, ratio["time_quartiles"]))
        if config.vocab_size == 50304:
            lines.append(verdict("peak memory, sa / nanogpt", ratio["memory"], 0.7))
    if ratio := result["ratios"].get("sa/hf"):
        lines.append(verdict("step time, sa / hf", ratio["time"], 1.0, ratio["time_quartiles"]))
    if ratio := result["ratios"].get("xsa/sa"):
        if device == "cpu" or compiled:
            limit = 1.02 if device == "cpu" else 1.01
            lines.append(verdict("step time, xsa / sa", ratio["time"], limit, ratio["time_quartiles"]))
        lines.append(verdict("peak memory, xsa / sa", ratio["memory"], 1.02))
    shape = (config.n_layer, config.n_embd, config.n_head, config.head_dim, config.block_size)
    if "H200" in device and compiled and shape == (24, 2048, 24, 128, 2048):
        for name in ("sa", "xsa"):
            if name in result["arms"]:
                lines.append(verdict(f"MFU, {name}", result["arms"][name]["mfu"], 0.55, at_least=True))
    return lines


# --- command line -----------------------------------------------------------------------------------------------------------


def parse(argv: list[str], name: str = "step") -> tuple[argparse.Namespace, Config]:
    """The flags (rounds, arms, json) of the benchmark `name` and the run's settings. Raises InputError."""
    parser = common.parser(name, rounds=6)
    parser.add_argument("--compare", default="nanogpt,xsa")
    own, rest = parser.parse_known_args(argv)
    common.check(own)
    compared = list(dict.fromkeys(own.compare.split(",")))
    if unknown := [name for name in compared if name not in (*PEERS, *PRESETS)]:
        raise InputError(f"--compare: wanted some of {', '.join((*PEERS, *PRESETS))}, found {unknown[0]!r}")
    own.arms = [*(name for name in PEERS if name in compared), "sa", *(name for name in compared if name not in (*PEERS, "sa"))]
    if len(own.arms) < 2:
        raise InputError("--compare: wanted something other than sa, which is measured in any case")
    config = common.step_settings(rest, DEFAULT_SHAPE)
    for name in own.arms:
        try:
            config.with_attention("sa" if name in PEERS else name)
        except ValueError as error:
            raise InputError(f"--compare: {name}: {error}") from None
    if own.arms[0] != "sa" and (config.n_kv_head != config.n_head or config.n_sink):
        raise InputError("NanoGPT and GPT-NeoX have neither n_kv_head nor n_sink: use --compare=xsa")
    if "hf" in compared:
        if config.n_head * config.head_dim != config.n_embd:
            raise InputError(f"head_dim: GPT-NeoX's is n_embd / n_head, found {config.head_dim}: use --compare without hf")
        if find_spec("transformers") is None:
            raise InputError("hf needs transformers: pip install transformers, or use --compare without hf")
    return own, config


def main(argv: list[str], name: str = "step") -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, config = parse(argv, name)
    device = common.measurable(distributed.start(config).device)
    facts = environment(device)
    compiled = common.compiles(config, device)
    dtype = common.dtype_name(config, device)
    minutes = estimate_minutes(config, len(own.arms), own.rounds, device)
    print(
        f"{', '.join(own.arms)} on {facts['hardware']['device']}, torch {torch.__version__}, {dtype}, "
        f"{'compiled' if compiled else 'eager'}\n"
        f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads of {config.head_dim}, vocabulary "
        f"{config.vocab_size}; a step is {config.global_batch_size} sequences of {config.block_size} tokens, "
        f"{config.micro_batch_size} at a time\n"
        f"first each arm's peak memory in a process of its own, then {WARM_UP_ROUNDS} rounds to warm up and {own.rounds} timed "
        f"ones: about {minutes:.1f} minutes",
        flush=True,
    )
    memory = {name: measure_memory(name, config) for name in tqdm(own.arms, desc="peak memory", disable=None)}
    times = measure_time(own.arms, config, own.rounds)
    name = facts["hardware"]["device"] if device.type == "cuda" else "cpu"
    result = summarize(times, memory, config, peak_flops(name))
    print(table(result))
    print("\n".join(figures(result, config, name, compiled)))
    if own.json:
        record = {**result, "config": as_dict(config), "rounds": own.rounds, "compiled": compiled,
                  "dtype": dtype, **facts}
        write_aside(own.json, json.dumps(record, indent=1) + "\n")
    return 0

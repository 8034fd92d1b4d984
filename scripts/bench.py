"""What a training step costs: time and peak memory of this repository's step against NanoGPT's, and of XSA's against SA's.

    python -m scripts.bench step                                                       # a CPU-sized shape, some minutes
    python -m scripts.bench step config/1.4b.py --global_batch_size=8 --compare=xsa --json=bench.json

The command line is train.py's: config files, then --key=value. A step is an optimizer step as these give it: forward and
backward over global_batch_size / micro_batch_size micro-batches, clipping, AdamW. Three flags are the benchmark's own:
    --rounds=N       timed rounds (default 6); in each every arm makes one step, in an order that changes from round to round
    --compare=A,B    what to measure beside sa: nanogpt, xsa or both (default both)
    --json=FILE      also write every measurement, with versions and hardware
Ratios of time are medians over rounds of the ratio within a round, so that a machine that is slow for a while is slow for all.
Peak memory is taken in a process of its own for each arm, after a warm-up step. On CUDA it is torch's max_memory_allocated;
on CPU it is the process's largest resident set less that before the model was built.
"""

import gc
import itertools
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from configurator import Config, InputError, as_dict, load
from model import GPT
from tracker import peak_flops
from train import autocast_dtype, configure_optimizer

ARMS = ("nanogpt", "sa", "xsa")
USAGE = "usage: python -m scripts.bench step [config/FILE.py ...] [--key=value ...] [--rounds=N] [--compare=A,B] [--json=FILE]"
# Without a config file: GPT-2's width and vocabulary, cut in depth and length to what a CPU can do while one waits.
DEFAULT_SHAPE = ["--n_layer=4", "--block_size=512", "--micro_batch_size=4", "--global_batch_size=4"]
WARM_UP_STEPS = 2

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
        self.drop_attn, self.drop_mlp = nn.Dropout(config.dropout), nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.drop_attn(self.proj(y.transpose(1, 2).contiguous().view(B, T, -1)))
        return x + self.drop_mlp(self.down(self.gelu(self.up(self.ln_2(x)))))


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
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


# --- arms -------------------------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Where and how the arms run, from the settings."""

    device: torch.device
    dtype: torch.dtype
    compile: bool

    @classmethod
    def of(cls, config: Config) -> "Machine":
        name = config.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise InputError(f"device must be cpu or cuda here, found {name}: peak memory cannot be read elsewhere")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise InputError(f"device={name}, but torch sees {torch.cuda.device_count()} CUDA devices; use --device=cpu")
        dtype = autocast_dtype(config.dtype, device)
        if dtype == torch.float16:
            raise InputError("dtype must be float32 or bfloat16 here, found float16: its loss scaling skips steps")
        return cls(device, dtype or torch.float32, device.type == "cuda" if config.compile is None else config.compile)

    def autocast(self) -> Any:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, dtype=self.dtype)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Arm:
    """One model with its optimizer; `step(batches)` is one optimizer step and returns the mean loss as a tensor."""

    def __init__(self, name: str, config: Config, machine: Machine):
        self.name, self.config, self.machine = name, config, machine
        if name == "nanogpt":
            torch.manual_seed(config.seed)
            with machine.device:
                self.raw = NanoGPT(config)
            self.model = torch.compile(self.raw) if machine.compile else self.raw
            # NanoGPT takes AdamW's fused form on CUDA only.
            decayed = [p for p in self.raw.parameters() if p.ndim >= 2]
            plain = [p for p in self.raw.parameters() if p.ndim < 2]
            groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
            fused = {"fused": True} if machine.device.type == "cuda" else {}
            self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), **fused)
        else:
            with machine.device:
                self.raw = self.model = GPT(replace(config, attention=name).model_config(), seed=config.seed)
            self.raw.activation_checkpointing = config.activation_checkpointing
            if machine.compile:
                for block in self.raw.h:
                    block.compile()
            self.optimizer = configure_optimizer(self.raw, config)

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.machine.device)
        for x, y in batches:
            # NanoGPT's loop keeps the name `logits` bound through backward, which is part of its peak; ours are None.
            with self.machine.autocast():
                logits, loss = self.model(x, y)
            (loss / len(batches)).backward()
            total += loss.detach()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        del logits
        return total / len(batches)

    def _clip(self) -> None:
        if self.name == "nanogpt":
            torch.nn.utils.clip_grad_norm_(self.raw.parameters(), self.config.grad_clip or math.inf)
            return
        gradients = [p.grad for p in self.raw.parameters()]  # train.py's way: the norm is looked at, then used
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if self.config.grad_clip and norm > self.config.grad_clip:
            torch._foreach_mul_(gradients, self.config.grad_clip / norm)


def random_batches(config: Config, machine: Machine) -> list[Batch]:
    """The micro-batches of one step, uniform tokens: neither side's cost depends on which they are."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (config.micro_batch_size, config.block_size + 1)
    tokens = [torch.randint(config.vocab_size, shape, generator=generator) for _ in range(config.accumulation(1))]
    return [(t[:, :-1].contiguous().to(machine.device), t[:, 1:].contiguous().to(machine.device)) for t in tokens]


# --- measuring --------------------------------------------------------------------------------------------------------------


def measure_memory(name: str, config: Config) -> int:
    """Peak bytes of one arm's step in a fresh process (see the module's docstring)."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_memory, name, config, torch.get_num_threads()).result()


def _peak_memory(name: str, config: Config, n_threads: int) -> int:
    torch.set_num_threads(n_threads)
    machine = Machine.of(config)
    before = _largest_resident_set()
    batches = random_batches(config, machine)
    arm = Arm(name, config, machine)
    arm.step(batches)
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(machine.device)
        arm.step(batches)
        return torch.cuda.max_memory_allocated(machine.device)
    arm.step(batches)
    return _largest_resident_set() - before


def _largest_resident_set() -> int:
    """Bytes. Linux counts it in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_time(names: list[str], config: Config, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm's step, round by round. All arms are in memory at once and take turns."""
    machine = Machine.of(config)
    batches = random_batches(config, machine)
    arms = {name: Arm(name, config, machine) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    orders = list(itertools.permutations(names))
    gc.collect()
    gc.disable()  # a collection would land in whichever arm's turn it is
    try:
        for r in tqdm(range(-WARM_UP_STEPS, rounds), desc="rounds", disable=None):
            for name in orders[r % len(orders)]:
                machine.synchronize()
                start = time.perf_counter()
                loss = arms[name].step(batches)
                machine.synchronize()
                elapsed = 1000 * (time.perf_counter() - start)
                if not math.isfinite(loss.item()):
                    raise RuntimeError(f"the loss of arm {name} is {loss.item()} in round {r}: its time means nothing")
                if r >= 0:
                    times[name].append(elapsed)
    finally:
        gc.enable()
    return times


# --- reporting --------------------------------------------------------------------------------------------------------------


def hardware(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": _cpu_name(), "threads": torch.get_num_threads(), "device": machine.device.type}
    if machine.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(machine.device)
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def summarize(times: dict[str, list[float]], memory: dict[str, int], config: Config, peak: float | None) -> dict[str, Any]:
    """Per arm: median and quartiles of the step, tokens/s, MFU, peak memory; per pair of arms: ratios."""
    tokens = config.global_batch_size * config.block_size
    with torch.device("meta"):
        flops = GPT(config.model_config()).flops_per_token()
    arms: dict[str, Any] = {}
    for name, ms in times.items():
        low, median, high = statistics.quantiles(ms, n=4, method="inclusive")
        rate = tokens / median * 1000
        arms[name] = {
            "step_ms": ms, "step_ms_quartiles": [low, median, high], "tokens_per_s": rate,
            "mfu": rate * flops / peak if peak else None, "peak_memory_bytes": memory[name],
        }
    ratios: dict[str, Any] = {}
    for a, b in (("sa", "nanogpt"), ("xsa", "sa")):
        if a in times and b in times:
            per_round = [x / y for x, y in zip(times[a], times[b], strict=True)]
            ratios[f"{a}/{b}"] = {
                "time": statistics.median(per_round),
                "time_quartiles": statistics.quantiles(per_round, n=4, method="inclusive"),
                "memory": memory[a] / memory[b],
            }
    return {"arms": arms, "ratios": ratios}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'arm':8}  {'ms/step':>9}  {'quartiles':>19}  {'tokens/s':>10}  {'MFU':>6}  {'peak memory':>11}"]
    for name, arm in result["arms"].items():
        low, median, high = arm["step_ms_quartiles"]
        mfu = "n/a" if arm["mfu"] is None else f"{arm['mfu']:.3f}"
        lines.append(
            f"{name:8}  {median:9.1f}  {low:8.1f} - {high:8.1f}  {arm['tokens_per_s']:10,.0f}  {mfu:>6}  "
            f"{arm['peak_memory_bytes'] / 2**20:7,.0f} MiB"
        )
    for pair, ratio in result["ratios"].items():
        low, _, high = ratio["time_quartiles"]
        lines.append(f"{pair}: time {ratio['time']:.3f} (quartiles {low:.3f} - {high:.3f}), peak memory {ratio['memory']:.3f}")
    return "\n".join(lines)


def figures(result: dict[str, Any], config: Config, machine: Machine, gpu: str | None) -> list[str]:
    """One line for each figure that this project holds itself to and that this run can speak of."""
    on_gpu = machine.device.type == "cuda"
    ours, xsa = result["ratios"].get("sa/nanogpt"), result["ratios"].get("xsa/sa")
    lines = []
    if ours:
        lines.append(_verdict("step time, sa / nanogpt", ours["time"], 1.0))
        wide = config.vocab_size == 50304
        lines.append(_verdict("peak memory, sa / nanogpt", ours["memory"], 0.7 if wide else None, "set for vocab_size=50304"))
    if xsa:
        limit = None if on_gpu and not machine.compile else 1.01 if on_gpu else 1.02
        lines.append(_verdict("step time, xsa / sa", xsa["time"], limit, "set for compiled GPU steps"))
        lines.append(_verdict("peak memory, xsa / sa", xsa["memory"], 1.02))
    for name, arm in result["arms"].items():
        if arm["mfu"] is not None and name != "nanogpt":
            shape = (config.n_layer, config.n_embd, config.n_head, config.head_dim, config.block_size)
            asked = "H200" in (gpu or "") and machine.compile and shape == (24, 2048, 24, 128, 2048)
            low = 0.55 if asked else None
            lines.append(_verdict(f"MFU, {name}", arm["mfu"], low, "set for 1.4B compiled on an H200", at_least=True))
    return lines


def _verdict(what: str, found: float, limit: float | None, scope: str = "", at_least: bool = False) -> str:
    line = f"{what:26} {found:.3f}"
    if limit is None:
        return f"{line}  no figure here ({scope})"
    gap = (found - limit if at_least else limit - found) / limit
    word = "held, to spare" if gap >= 0 else "missed by"
    return f"{line}  {'>=' if at_least else '<='} {limit:.2f}  {word} {abs(gap):.1%}"


# --- command line -----------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[Config, dict[str, Any]]:
    """The run's settings and the benchmark's own: rounds, arms, json. Raises InputError."""
    if argv[:1] != ["step"]:
        raise InputError(f"the first argument must be step, found {argv[0] if argv else 'nothing'}; {USAGE}")
    own: dict[str, Any] = {"rounds": "6", "compare": "nanogpt,xsa", "json": None}
    rest = []
    for arg in argv[1:]:
        key, equals, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and key in own:
            if not value:
                raise InputError(f"--{key} needs a value: --{key}=VALUE; {USAGE}")
            own[key] = value
        else:
            rest.append(arg)
    if not own["rounds"].isdecimal() or int(own["rounds"]) < 2:
        raise InputError(f"--rounds must be a whole number of at least 2, found {own['rounds']!r}")
    compared = own["compare"].split(",")
    unknown = [name for name in compared if name not in ("nanogpt", "xsa")]
    if unknown:
        raise InputError(f"--compare takes nanogpt and xsa, found {unknown[0]!r}")
    if own["json"] and not Path(own["json"]).resolve().parent.is_dir():
        raise InputError(f"--json={own['json']}: there is no folder {Path(own['json']).parent}")
    has_file = any(not arg.startswith("-") for arg in rest)
    config = load(rest if has_file else DEFAULT_SHAPE + rest)
    if "nanogpt" in compared and (config.n_kv_head != config.n_head or config.n_sink):
        raise InputError("NanoGPT has neither n_kv_head nor n_sink: compare with --compare=xsa alone")
    config.accumulation(1)
    Machine.of(config)
    names = [name for name in ARMS if name == "sa" or name in compared]
    return config, {"rounds": int(own["rounds"]), "arms": names, "json": own["json"]}


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        config, own = parse(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = Machine.of(config)
    machine_facts = hardware(machine)
    print(
        f"{', '.join(own['arms'])}: {config.n_layer} layers, n_embd {config.n_embd}, n_head {config.n_head} of "
        f"{config.head_dim}, vocab_size {config.vocab_size}; a step is {config.global_batch_size} sequences of "
        f"{config.block_size} tokens, {config.micro_batch_size} at a time; {str(machine.dtype).removeprefix('torch.')}, "
        f"{'compiled' if machine.compile else 'eager'}, torch {torch.__version__}, "
        + ", ".join(f"{key} {value}" for key, value in machine_facts.items())
    )
    memory = {name: measure_memory(name, config) for name in tqdm(own["arms"], desc="peak memory", disable=None)}
    times = measure_time(own["arms"], config, own["rounds"])
    result = summarize(times, memory, config, peak_flops(machine_facts["gpu"]) if "gpu" in machine_facts else None)
    print(table(result))
    print("\n".join(figures(result, config, machine, machine_facts.get("gpu"))))
    if own["json"]:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
        record = {"config": as_dict(config), **result, "rounds": own["rounds"], "compiled": machine.compile,
                  "dtype": str(machine.dtype).removeprefix("torch."), "versions": versions, "hardware": machine_facts}
        _write_json(Path(own["json"]), record)
    return 0


def _write_json(path: Path, record: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

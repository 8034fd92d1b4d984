"""What the loss costs, forward and backward, from the last hidden state: ours, the plain one over whole logits, torch's
linear_cross_entropy and Liger kernel's.

    python -m scripts.bench loss                                                     # 2048 tokens, width 768, vocabulary 50304
    python -m scripts.bench loss config/1.4b.py --dtypes=bfloat16 --json=loss.json   # those of a micro-step of the 1.4B model

The command line is train.py's: config files, then --key=value; of it count micro_batch_size x block_size tokens, n_embd,
vocab_size, device, compile and seed. Flags of its own:
    --dtypes=A,B     of the hidden state, the weight staying fp32 as in training (default float32,bfloat16)
    --compare A B    what to measure beside ours (default: all that there are)
    --rounds=N       timed rounds (default 8); in each every arm makes one step, in an order that changes from round to round
    --json=FILE      also write every measurement, with versions and hardware

    ours             model.linear_cross_entropy, which takes one of the next two by dtype
    own              model.LinearCrossEntropy, its gradients taken in the forward pass, a chunk of logits at a time
    torch_chunked    F.linear_cross_entropy with chunks as long as ours
    torch_auto       F.linear_cross_entropy with chunks of torch's choice
    torch            F.linear_cross_entropy without options
    plain            F.cross_entropy of the whole logits in fp32
    liger            Liger kernel's fused linear cross entropy: on CUDA, where it is installed (pip install liger-kernel)

Peak memory is beside hidden state and weight, but with their gradients; `step` says how it is read. The error of the loss is to
that in fp64 of the same inputs.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import distributed
from checkpoint import write_aside
from command_line import InputError
from configurator import Config, as_dict
from model import IGNORE, ChunkLoss, LinearCrossEntropy, linear_cross_entropy, loss_rows
from scripts.bench import common
from scripts.bench.common import milliseconds, quartiles, quotient, shown, take_turns
from scripts.bench.memory import TINY_SHAPE, in_fresh_process, process_status
from tracker import environment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHAPE = ["--block_size=512", "--micro_batch_size=4"]
ARMS = ("ours", "own", "torch_chunked", "torch_auto", "torch", "plain", "liger")

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x (N, C), weight (V, C) in fp32, targets (N,)


def available(device: torch.device) -> list[str]:
    """The arms that can run here."""
    missing = set() if hasattr(nn, "LinearCrossEntropyOptions") else {"torch_chunked", "torch_auto", "torch"}
    if device.type != "cuda" or find_spec("liger_kernel") is None:
        missing.add("liger")
    return [name for name in ARMS if name not in missing]


def loss_function(name: str, device: torch.device, compiled: bool) -> Loss:
    """An arm's loss, whose matrix products are in x's dtype."""
    rows = loss_rows(device)
    if name in ("ours", "own"):
        chunk_loss = ChunkLoss()
        if compiled:
            chunk_loss.compile()
        if name == "ours":
            return lambda x, w, targets: linear_cross_entropy(x, w, targets, chunk_loss)
        return lambda x, w, targets: LinearCrossEntropy.apply(x, w, targets, chunk_loss, rows, True)
    if name == "plain":
        def plain(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy((x @ w.to(x.dtype).T).float(), targets, ignore_index=IGNORE)

        return torch.compile(plain) if compiled else plain
    if name == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE)
        return lambda x, w, targets: liger(w.to(x.dtype), x, targets)
    options = {"torch": None, "torch_auto": {}, "torch_chunked": {"batch_chunk_size": rows}}[name]
    given = {} if options is None else {"options": nn.LinearCrossEntropyOptions(**options)}
    return lambda x, w, targets: F.linear_cross_entropy(x, w.to(x.dtype), targets, ignore_index=IGNORE, **given)


class Inputs:
    """A hidden state (N, C) as the last LayerNorm leaves it, a head (V, C) as at the start of training, uniform targets."""

    def __init__(self, config: Config, dtype: str, device: torch.device):
        generator = torch.Generator(device).manual_seed(config.seed)
        N = config.micro_batch_size * config.block_size
        self.x = torch.empty(N, config.n_embd, dtype=DTYPES[dtype], device=device).normal_(generator=generator).requires_grad_()
        self.weight = torch.empty(config.vocab_size, config.n_embd, device=device).normal_(0, 0.02, generator=generator)
        self.weight.requires_grad_()
        self.targets = torch.randint(config.vocab_size, (N,), generator=generator, device=device)

    @torch.no_grad()
    def exact(self) -> float:
        """The loss in fp64."""
        total, weight = 0.0, self.weight.to(self.x.dtype).double()
        for x, targets in zip(self.x.split(256), self.targets.split(256), strict=True):
            total += F.cross_entropy(x.double() @ weight.T, targets, reduction="sum").item()
        return total / len(self.targets)


class Arm:
    """One of ARMS, ready to make steps."""

    def __init__(self, name: str, inputs: Inputs, compiled: bool):
        self.inputs, self.loss_function = inputs, loss_function(name, inputs.x.device, compiled)
        self.loss = 0.0

    def run(self) -> None:
        loss = self.loss_function(self.inputs.x, self.inputs.weight, self.inputs.targets)
        loss.backward()
        self.loss = loss.item()

    def step(self) -> float:
        """Milliseconds of one forward and backward pass."""
        elapsed = milliseconds(self.run, self.inputs.x.device)
        self.inputs.x.grad = self.inputs.weight.grad = None
        return elapsed


def peak_memory(name: str, config: Config, dtype: str, compiled: bool) -> int:
    """Bytes of a step's peak beside its inputs; on a CPU for a process of its own."""
    device = torch.device(config.device)
    Arm(name, Inputs(replace(config, **TINY_SHAPE), dtype, device), False).step()  # loads libraries
    arm = Arm(name, Inputs(config, dtype, device), compiled)
    if device.type != "cuda":
        before = process_status("VmRSS")
        arm.step()
        return process_status("VmHWM") - before
    arm.step()  # compiles
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    arm.step()
    return torch.cuda.max_memory_allocated(device) - before


def measure(names: list[str], config: Config, dtype: str, rounds: int, compiled: bool) -> dict[str, dict[str, Any]]:
    """Per arm milliseconds of each round, peak memory, the loss's error, and ratios to ours."""
    device = torch.device(config.device)
    memory = {name: peak_memory(name, config, dtype, compiled) if device.type == "cuda" else
              in_fresh_process(peak_memory, name, config, dtype, compiled) for name in tqdm(names, desc=dtype, disable=None)}
    inputs = Inputs(config, dtype, device)
    exact = inputs.exact()
    arms = {name: Arm(name, inputs, compiled) for name in names}
    times = take_turns(arms, rounds)
    return {name: {"ms": ms, "ms_quartiles": quartiles(ms), "peak_memory_bytes": memory[name],
                   "loss_error": abs(arms[name].loss - exact), "memory_to_ours": quotient(memory[name], memory["ours"]),
                   "time_to_ours": quartiles([a / b for a, b in zip(ms, times["ours"], strict=True)])}
            for name, ms in times.items()}


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [f"{'dtype':9} {'loss':14} {'ms':>9}  {'to ours':>8} {'(quartiles)':>15}  {'peak memory':>11} {'to ours':>8}  "
             f"{'error of loss':>13}"]
    for dtype, arms in results.items():
        for name, arm in arms.items():
            low, median, high = arm["time_to_ours"]
            lines.append(f"{dtype:9} {name:14} {arm['ms_quartiles'][1]:9.1f}  {median:8.3f} ({low:.3f} - {high:.3f})  "
                         f"{arm['peak_memory_bytes'] / 2**20:7,.0f} MiB {shown(arm['memory_to_ours'], '.2f'):>8}  "
                         f"{arm['loss_error']:13.1e}")
    return "\n".join(lines)


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags (with arms) and the settings. Raises InputError."""
    parser = common.parser("loss", rounds=8)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--compare")
    own, rest = parser.parse_known_args(argv)
    common.check(own)
    own.dtypes = own.dtypes.split(",")
    if unknown := [name for name in own.dtypes if name not in DTYPES]:
        raise InputError(f"--dtypes: wanted some of {', '.join(DTYPES)}, found {unknown[0]!r}")
    config = common.settings(rest, DEFAULT_SHAPE)
    device = common.measurable(distributed.start(config).device)
    config = replace(config, device=str(device))
    there = available(device)
    own.arms = list(dict.fromkeys(["ours", *(own.compare.split(",") if own.compare else there)]))
    if unknown := [name for name in own.arms if name not in there]:
        raise InputError(f"--compare: wanted some of {', '.join(there)}, found {unknown[0]!r}")
    return own, config


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, config = parse(argv)
    device = torch.device(config.device)
    facts = environment(device)
    compiled = common.compiles(config, device)
    print(f"{', '.join(own.arms)} on {facts['hardware']['device']}, torch {torch.__version__}, "
          f"{'compiled where it can be' if compiled else 'eager'}\n"
          f"{config.micro_batch_size * config.block_size} tokens, width {config.n_embd}, vocabulary {config.vocab_size}; "
          f"{', '.join(own.dtypes)}; peak memory, then {own.rounds} timed rounds", flush=True)
    if "liger" not in own.arms:
        print("liger: left out; it runs on CUDA where liger-kernel is installed")
    results = {dtype: measure(own.arms, config, dtype, own.rounds, compiled) for dtype in own.dtypes}
    print(table(results))
    if own.json:
        record = {"dtypes": results, "config": as_dict(config), "compiled": compiled, "rounds": own.rounds, **facts}
        write_aside(own.json, json.dumps(record, indent=1) + "\n")
    return 0

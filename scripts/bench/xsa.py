"""What XSA's pass after attention costs by itself, forward and backward, eager and compiled: bytes moved over bytes needed, time,
and the bandwidth that it reaches of a copy's on the same device.

    python -m scripts.bench xsa                                       # a CPU: 4 x 512 tokens, 12 heads of 64; a GPU: the 1.4B's
    python -m scripts.bench xsa config/0.7b.py --micro_batch_size=16 --json=xsa.json

The command line is train.py's: config files, then --key=value, of which the shape of attention, micro_batch_size, block_size,
device, dtype and seed count. Flags of its own:
    --rounds=N       timed rounds (default 10); in each every arm makes its calls, in an order that changes from round to round
    --json=FILE      also write every measurement, with versions and hardware

The pass is model.exclude, which reads y and v and writes z, and model.exclude_backward, which reads y, v and dz and writes
dy, dv and z: these bytes, each tensor once, are needed. Moved are, eager, the inputs and outputs of every operator but views
(what leaves the processor's registers, whether or not its caches absorb it), compiled, what the kernels that torch.compile
generates read and write, by its own account. GB/s are of the bytes needed.
"""

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distributed
from checkpoint import write_aside
from configurator import Config, as_dict
from model import exclude, exclude_backward
from scripts.bench import common
from scripts.bench.common import milliseconds, quartiles, take_turns, verdict
from tracker import environment
from train import autocast_dtype

DEFAULTS = {
    "cuda": ["--n_embd=2048", "--n_head=24", "--head_dim=128", "--micro_batch_size=8"],
    "cpu": ["--block_size=512", "--micro_batch_size=4"],
}
LIMIT = 1.05  # bytes moved over bytes needed, compiled: the coefficients of each head are the rest
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}  # more than any cache holds
CALLS = {"cuda": 20, "cpu": 1}  # timed together: a GPU takes less time for one than its launch from here

Call = Callable[[], Any]


class Traffic(TorchDispatchMode):
    """Adds up in `bytes` what operators under this mode read and write, each by itself; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read, written = ([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in ((args, kwargs), result))
        storages = {t.untyped_storage().data_ptr() for t in read}
        if func._schema.is_mutable or any(t.untyped_storage().data_ptr() not in storages for t in written):
            self.bytes += sum(t.nbytes for t in (*read, *written))
        return result


def moved_eager(call: Call) -> int:
    """Bytes read and written by the operators of a call."""
    with Traffic() as traffic:
        call()
    return traffic.bytes


def moved_compiled(call: Call) -> int:
    """Bytes read and written by the kernels that torch.compile generates in a call that compiles."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering

    moved: list[int] = []
    original = GraphLowering.compile_to_module

    def counting(graph: GraphLowering, *arguments: Any, **more: Any) -> Any:
        module = original(graph, *arguments, **more)
        moved.append(int(graph.count_bytes()[0]))
        return module

    uncached = torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False)
    with patch.object(GraphLowering, "compile_to_module", counting), uncached[0], uncached[1]:
        call()
    return sum(moved)


def needed(config: Config, itemsize: int) -> dict[str, int]:
    """Bytes of the tensors that each direction must read and write: query heads' y, z, dz, dy and kv heads' v, dv."""
    token = config.micro_batch_size * config.block_size * config.head_dim * itemsize
    H, K = config.n_head, config.n_kv_head
    return {"forward": token * (2 * H + K), "backward": token * (4 * H + 2 * K)}


def make_inputs(config: Config, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random y (B, H, T, d), v (B, K, T, d) and dz (B, T, H*d) that lie in memory as in training: all in the order of tokens."""
    B, T, H, K, d = config.micro_batch_size, config.block_size, config.n_head, config.n_kv_head, config.head_dim
    generator = torch.Generator(device).manual_seed(config.seed)
    dtype = autocast_dtype(config.dtype, device) or torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return draw(B, T, H, d).transpose(1, 2), draw(B, T, K, d).transpose(1, 2), draw(B, T, H * d)


class Arm:
    """Some calls, timed together."""

    def __init__(self, call: Call, calls: int, device: torch.device):
        self.call, self.calls, self.device = call, calls, device

    def _run(self) -> None:
        for _ in range(self.calls):
            self.call()

    def step(self) -> float:
        """Milliseconds of one call."""
        return milliseconds(self._run, self.device) / self.calls


@torch.no_grad()
def measure(config: Config, rounds: int, device: torch.device) -> dict[str, Any]:
    """By form (eager, compiled) and direction bytes moved and needed, milliseconds and GB/s; and a copy's GB/s."""
    calls = CALLS[device.type]
    y, v, dz = make_inputs(config, device)
    eager: dict[str, Call] = {"forward": lambda: exclude(y, v), "backward": lambda: exclude_backward(y, v, dz)}
    itemsize = (autocast_dtype(config.dtype, device) or torch.float32).itemsize
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    arms = {"copy": Arm(lambda: target.copy_(source), calls, device)}
    moved = {}
    for direction, call in eager.items():
        compiled = torch.compile(call, dynamic=False)
        moved[f"eager {direction}"] = moved_eager(call)
        moved[f"compiled {direction}"] = moved_compiled(compiled)
        arms[f"eager {direction}"], arms[f"compiled {direction}"] = Arm(call, calls, device), Arm(compiled, calls, device)
    times = take_turns(arms, rounds)
    copy = 2 * source.nbytes / quartiles(times.pop("copy"))[1] / 1e6
    result = {}
    for name, ms in times.items():
        wanted = needed(config, itemsize)[name.split()[1]]
        speed = wanted / quartiles(ms)[1] / 1e6
        result[name] = {"bytes_needed": wanted, "bytes_moved": moved[name], "moved_to_needed": moved[name] / wanted, "ms": ms,
                        "ms_quartiles": quartiles(ms), "gb_per_s": speed, "share_of_copy": speed / copy}
    return {"copy_gb_per_s": copy, "passes": result}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'pass':18} {'MB needed':>9} {'moved':>9} {'ratio':>6}  {'ms':>8} {'(quartiles)':>19}  {'GB/s':>7} {'of copy':>7}"]
    for name, one in result["passes"].items():
        low, median, high = one["ms_quartiles"]
        lines.append(f"{name:18} {one['bytes_needed'] / 1e6:9.2f} {one['bytes_moved'] / 1e6:9.2f} {one['moved_to_needed']:6.2f}"
                     f"  {median:8.3f} {f'({low:.3f} - {high:.3f})':>19}  {one['gb_per_s']:7.1f} {one['share_of_copy']:7.2f}")
    lines.append(f"a copy: {result['copy_gb_per_s']:.1f} GB/s, read and written")
    lines += [verdict(f"bytes, {name}", one["moved_to_needed"], LIMIT) for name, one in result["passes"].items()
              if name.startswith("compiled")]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, rest = common.parser("xsa", rounds=10).parse_known_args(argv)
    common.check(own)
    device = common.measurable(distributed.start(common.settings(rest, [])).device)
    config = common.settings(rest, DEFAULTS[device.type])
    facts = environment(device)
    dtype = common.dtype_name(config, device)
    print(f"XSA's pass on {facts['hardware']['device']}, torch {torch.__version__}, {dtype}: {config.micro_batch_size} x "
          f"{config.block_size} tokens, {config.n_head} heads of {config.head_dim}, {config.n_kv_head} kv heads; both directions "
          f"are compiled, then {own.rounds} rounds", flush=True)
    result = measure(config, own.rounds, device)
    print(table(result))
    if own.json:
        write_aside(own.json, json.dumps({**result, "config": as_dict(config), "rounds": own.rounds, **facts}, indent=1) + "\n")
    return 0

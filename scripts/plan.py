"""What a run needs before it is started: parameters, FLOPs, memory per GPU by part, hours, disk.

    python -m scripts.plan config/1.4b.py --attention=xsa --gpu=H100 --n_gpus=8 --mfu=0.4
    python -m scripts.plan --n_layer=4 --n_embd=128 --n_head=4 --block_size=256 --global_batch_size=8 --n_gpus=1 --measure

The command line is train.py's (python train.py --help): config files, then --key=value. Flags of its own:
    --gpu=NAME     a GPU of tracker.GPUS, which has its bf16 peak and its memory (default H100)
    --n_gpus=N     GPUs of the run, each with a copy of the model and of AdamW's state, or by the setting parallel=fsdp with a
                   share of them (default 8)
    --mfu=X        share of the peak that the run is taken to reach (default 0.4)
    --calibrate=PATH   take speed and memory from what was measured once, at any other shape: the folder of a run of train.py, or
                   a file that --measure --json wrote; in place of --mfu
    --measure      also make three real steps on this machine (`device`) and put their peak memory beside the prediction, which is
                   too small for a CPU with dropout: attention is not fused there and keeps its probabilities
    --json=FILE    also write every number

The memory is that of a real training step of model.py, rehearsed on tensors that have shapes and no data
(torch's FakeTensorMode), with blocks as eager mode runs them; what torch.compile keeps may differ. FlexAttention is rehearsed as
the fused attention, which keeps the same but for a copy of the output under sigmoid or sinks; logits that QK-Clip looks at,
0.5 GB for a moment, are left out.

`python train.py config/1.4b.py --attention=list` sets the presets' weights, FLOPs and KV caches side by side.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoint import write_aside
from command_line import ArgumentParser, InputError, check_output
from configurator import Config, as_dict, load
from model import GPT, loss_rows
from scripts.bench.common import quotient, shown
from scripts.bench.memory import TINY_SHAPE, in_fresh_process, process_status
from tracker import GPUS, peak_flops
from train import autocast_dtype, configure_optimizer

ALLOWANCE = 1.5e9  # bytes for CUDA's context, cuBLAS's workspace, NCCL's buffers and fragmentation: a guess, and shown as one
FP32 = 4


@dataclass
class Memory:
    """Bytes on one GPU at the peak of a training step, by part."""

    weights: int
    gradients: int  # as from the second micro-step on; with DDP always, its buckets being views of them
    optimizer: int  # AdamW's two moments
    weight_copies: int  # half-precision copies that autocast makes of the blocks' matrices, kept until the backward pass
    activations: int  # what autograd keeps of the forward pass, and the last hidden state
    loss: int  # gradients of head and last hidden state, and one chunk of logits
    backward: int  # by how much the backward pass rises above all of these
    gathered: int  # by FSDP: what is whole for a time

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive, now and at most, among those that operators under this mode return; those of
    `others` are not counted, although views of them and writes into them are returned too."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakSet(t.untyped_storage() for t in others)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        n_bytes = storage.nbytes()
        self._known.add(storage)
        finalize(storage, self._drop, n_bytes)
        self.now += n_bytes
        self.peak = max(self.peak, self.now)

    def _drop(self, n_bytes: int) -> None:
        self.now -= n_bytes


def rehearse(config: Config, micro_batch_size: int, device_type: str = "cuda", n_ranks: int = 1) -> Memory:
    """Memory of a training step with micro_batch_size sequences per forward pass, found by running it without data; of the state
    its share on the first of n_ranks.

    The tensors pretend to be on the CPU, whose fused attention keeps what the GPU's does: q, k, v, its output and one fp32
    number per query. Dropout's masks are counted, one byte an element, and not run: with dropout the CPU's attention is not
    fused. The loss is counted too: its logits never leave the operator, or come in chunks of another size."""
    model = _on_meta(replace(config, dropout=0.0))
    model.activation_checkpointing = config.activation_checkpointing
    if device_type == "cuda" and not config.dropout:
        _without_flex(model)
    half = config.dtype != "float32"
    whole, shares = (FP32 * sum(rows(p) * p[0].numel() for p in model.parameters())
                     for rows in (len, lambda p: -(-len(p) // n_ranks)))
    weights = shares if config.parallel == "fsdp" else whole
    tokens = micro_batch_size * config.block_size
    with FakeTensorMode():
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(p.shape)))
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        idx = torch.empty(micro_batch_size, config.block_size, dtype=torch.long)
        with LiveBytes([idx, *model.parameters(), *(p.grad for p in model.parameters())]) as live:
            kept = 0

            def note(*_: Any) -> None:
                nonlocal kept
                kept = live.now

            model.ln_f.register_forward_hook(note)
            called: set[nn.Linear] = set()  # autocast keeps a copy of their weights; our own functions cast in passing
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_hook(lambda module, *_: called.add(module))
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                _, loss = model(idx, idx)
            loss.backward()
    copies = 2 * sum(module.weight.numel() for module in called) if half else 0
    masked = 1 + 2 * (1 if config.activation_checkpointing else config.n_layer)  # the embedding's and two a block
    masks = tokens * config.n_embd * masked if config.dropout else 0
    head = _loss_bytes(config, tokens, loss_rows(torch.device(device_type)), half)
    memory = Memory(
        weights=weights,
        gradients=weights,
        optimizer=2 * weights,
        weight_copies=copies,
        activations=kept - copies + masks,
        loss=head,
        backward=max(0, live.peak - kept - head),
        gathered=0,
    )
    if weights == whole:
        return memory
    block = FP32 * max(sum(p.numel() for p in block.parameters()) for block in model.h)
    outside = whole - FP32 * sum(p.numel() for p in model.h.parameters())
    # In backward: the embedding; one block's weights and gradients, the next one's weights as they arrive, the last one's
    # gradients as they leave. In evaluation all weights, while there is nothing else of a step.
    step = memory.total - memory.weights - memory.optimizer
    return replace(memory, gathered=max(outside + 4 * block, whole - step))


def _without_flex(model: GPT) -> None:
    """Plain attention where a GPU would use FlexAttention, which is not to be had without one."""
    for block in model.h:
        attn = block.attn
        if attn.path(attn.longest, torch.device("cuda")) == "flex":
            attn.softcap, attn.window = 0.0, 0
            if attn.softmax in ("sigmoid", "sink"):
                attn.softmax = "softmax"


def _loss_bytes(config: Config, tokens: int, rows: int, half: bool) -> int:
    """Most that model.linear_cross_entropy holds at once beside its input and the weight."""
    head, chunk = config.vocab_size * config.n_embd, min(rows, tokens) * config.vocab_size
    if not half:
        return FP32 * (tokens * config.n_embd + head + chunk)  # input's and head's gradient, logits
    # Input in half precision and its gradient; head's gradient in fp32, its share of a chunk and a copy of the head in half
    # precision; a chunk of logits in fp32 and in half precision.
    return 4 * tokens * config.n_embd + (FP32 + 2 + 2) * head + (FP32 + 2) * chunk


def _on_meta(config: Config) -> GPT:
    with torch.device("meta"):
        return GPT(config.model_config())


def largest_that_fits(config: Config, n_gpus: int, room: float) -> int | None:
    """The largest micro_batch_size below config's that keeps the recipe and needs at most `room` bytes; None: not even 1."""
    share = config.global_batch_size // n_gpus
    sizes = [n for n in range(1, config.micro_batch_size) if share % n == 0]
    low, high = 0, len(sizes)  # the first `low` fit, those from `high` on do not
    while low < high:
        middle = (low + high) // 2
        if rehearse(config, sizes[middle], n_ranks=n_gpus).total <= room:
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None


def cost(config: Config, gpu: str, n_gpus: int, mfu: float) -> dict[str, Any]:
    """What a run takes but for memory, by name: FLOPs, tokens, hours, bytes on disk. Raises InputError where the batch does not
    divide."""
    micro_steps = config.accumulation(n_gpus)
    model = _on_meta(config)
    total = sum(p.numel() for p in model.parameters())
    tokens_per_step = config.global_batch_size * config.block_size
    tokens = tokens_per_step * config.max_iters
    peak, _ = GPUS[gpu]
    train_flops = model.flops_per_token() * tokens
    evaluations = 1 + -(-config.max_iters // config.eval_interval)  # at the start, every eval_interval steps, at the end
    eval_flops = model.flops_per_token() / 3 * config.eval_tokens * evaluations  # forward alone: a third
    flops_per_s = n_gpus * peak * mfu
    checkpoint_bytes = 3 * FP32 * total  # weights and AdamW's two moments
    milestones = config.max_iters // config.milestone_interval if config.milestone_interval else 0
    return {
        "gpu": gpu, "gpu_peak_flops": peak, "n_gpus": n_gpus, "mfu": mfu,
        "n_params": model.num_params(), "n_params_embedding": total - model.num_params(), "n_params_total": total,
        "flops_per_token": model.flops_per_token(), "kv_cache_bytes_per_token": model.kv_cache_bytes_per_token(),
        "attention_path": model.attention_path(torch.device("cuda")),
        "tokens_per_step": tokens_per_step, "steps": config.max_iters, "tokens": tokens, "micro_steps": micro_steps,
        "tokens_per_s": flops_per_s / model.flops_per_token(),
        "step_s": model.flops_per_token() * tokens_per_step / flops_per_s,
        "hours": train_flops / flops_per_s / 3600, "gpu_hours": train_flops / (peak * mfu) / 3600,
        "evaluation_hours": eval_flops / flops_per_s / 3600,
        "checkpoint_bytes": checkpoint_bytes,
        # One more than are kept while the next is being written.
        "run_folder_bytes": checkpoint_bytes * (config.keep_checkpoints + milestones + 1),
        "data_bytes": 2 * tokens,
    }


@dataclass
class Calibration:
    """What one measurement says of others: FLOP/s that a device reached, as flops_per_token counts them, and its peak memory to
    the predicted one, 1 where it was not measured by itself."""

    flops_per_s: float
    memory_factor: float = 1.0


def calibrate(path: Path) -> Calibration:
    """From a run's folder, by the median of its lines but the first, which compiles; or from a file of --measure --json. Raises
    InputError."""
    try:
        if not path.is_dir():
            plan = json.loads(path.read_text(encoding="utf-8"))
            measured = plan["measured"]
            return Calibration(plan["flops_per_token"] * measured["tokens_per_s"],
                               measured["peak_bytes"] / measured["predicted_bytes"])
        info = json.loads((path / "config.json").read_text(encoding="utf-8"))
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        train = [record for record in records if record["split"] == "train"][1:]
        speed = statistics.median(record["tokens_per_s"] for record in train)
        config = Config(**{key: value for key, value in info["config"].items() if key in {f.name for f in fields(Config)}})
        factor = 1.0
        if not info["hardware"]["device"].startswith(("cpu", "mps")):  # there it is the process's memory, not a step's
            predicted = rehearse(config, config.micro_batch_size, n_ranks=info["world_size"]).total
            factor = train[-1]["peak_memory_gb"] * 1e9 / predicted
        return Calibration(info["flops_per_token"] * speed / info["world_size"], factor)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--calibrate: wanted the folder of a run with at least two lines of training, or a file of --measure "
                         f"--json, found {path}: {type(error).__name__}: {error}") from None


def make_plan(config: Config, gpu: str, n_gpus: int, mfu: float, memory_factor: float = 1.0) -> dict[str, Any]:
    """Every number of the plan by name: cost() and the bytes of a GPU's memory. Raises InputError as cost() does."""
    costs = cost(config, gpu, n_gpus, mfu)
    memory_gb = GPUS[gpu][1]
    memory = rehearse(config, config.micro_batch_size, n_ranks=n_gpus)
    room = (memory_gb * 1e9 - ALLOWANCE) / memory_factor
    fits = memory.total <= room
    with_checkpointing = replace(config, activation_checkpointing=True)
    advise = not fits and not config.activation_checkpointing
    return costs | {
        "gpu_memory_bytes": memory_gb * 1e9,
        "memory_bytes": asdict(memory), "memory_total_bytes": memory.total, "memory_factor": memory_factor,
        "allowance_bytes": ALLOWANCE, "fits": fits,
        "micro_batch_size_that_fits": None if fits else largest_that_fits(config, n_gpus, room),
        "micro_batch_size_with_checkpointing": (
            largest_that_fits(replace(with_checkpointing, micro_batch_size=config.micro_batch_size + 1), n_gpus, room)
            if advise else None
        ),
        "config": as_dict(config),
    }


def check_machine(gpu: str, n_gpus: int, mfu: float) -> str:
    """The GPU's name as GPUS has it. Raises InputError for a machine that cannot be."""
    name = next((name for name in GPUS if name.lower() == gpu.lower()), None)
    if name is None:
        raise InputError(f"--gpu: wanted one of {', '.join(GPUS)}, found {gpu!r}")
    if n_gpus < 1:
        raise InputError(f"--n_gpus: wanted at least 1, found {n_gpus}")
    if not 0 < mfu <= 1:
        raise InputError(f"--mfu: wanted a share above 0 and at most 1, found {mfu}")
    return name


def measure(config: Config) -> dict[str, Any]:
    """Peak bytes of three training steps of two micro-steps each on this machine, the prediction, and seconds per micro-step.

    On CUDA the bytes are torch's max_memory_allocated; on CPU scripts.bench.memory's. Raises InputError for other devices."""
    device = torch.device(config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"--measure: wanted device=cpu or a GPU that is there, found {device}")
    if device.type == "cpu" and not Path("/proc/self/status").exists():
        raise InputError("--measure: peak memory on CPU is read from /proc, which this system does not have")
    dtype = autocast_dtype(config.dtype, device)
    config = replace(config, dtype="float32" if dtype is None else "bfloat16")
    of = (config, device, dtype)
    peak_bytes, seconds = _peak_on_gpu(*of) if device.type == "cuda" else in_fresh_process(_peak_on_cpu, *of)
    memory = rehearse(config, config.micro_batch_size, device.type)
    tokens = config.micro_batch_size * config.block_size
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops_per_s = _on_meta(config).flops_per_token() * tokens / seconds
    return {
        "device": str(device), "dtype": config.dtype, "peak_bytes": peak_bytes, "predicted_bytes": memory.total,
        "predicted": asdict(memory), "micro_step_s": seconds, "tokens_per_s": tokens / seconds,
        "mfu": flops_per_s / peak if peak else None, "unfused": device.type == "cpu" and config.dropout > 0,
    }


def _peak_on_gpu(config: Config, device: torch.device, dtype: torch.dtype | None) -> tuple[int, float]:
    _steps(replace(config, **TINY_SHAPE), device, dtype)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seconds = _steps(config, device, dtype)
    return torch.cuda.max_memory_allocated(device) - before, seconds


def _peak_on_cpu(config: Config, device: torch.device, dtype: torch.dtype | None) -> tuple[int, float]:
    _steps(replace(config, **TINY_SHAPE), device, dtype)
    before = process_status("VmRSS")
    seconds = _steps(config, device, dtype)
    return process_status("VmHWM") - before, seconds


def _steps(config: Config, device: torch.device, dtype: torch.dtype | None) -> float:
    """Seconds of the last micro-step of three training steps."""
    with device:
        model = GPT(config.model_config(), seed=config.seed)
    model.activation_checkpointing = config.activation_checkpointing
    optimizer = configure_optimizer(model, config)
    if config.compile or (config.compile is None and device.type == "cuda"):
        model.compile_parts()
    idx = torch.randint(config.vocab_size, (config.micro_batch_size, config.block_size), device=device)
    seconds = 0.0
    for _ in range(3):
        for _ in range(2):
            start = time.perf_counter()
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                _, loss = model(idx, idx)
            loss.backward()
            loss.item()  # waits for a GPU
            seconds = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seconds


# --- telling ----------------------------------------------------------------------------------------------------------------


def render(plan: dict[str, Any], config: Config) -> str:
    """The plan as a table of at most 100 columns."""
    heads = f"{config.n_head} heads of {config.head_dim}"
    if config.n_kv_head != config.n_head:
        heads += f" ({config.n_kv_head} kv)"
    if config.n_sink:
        heads += f", {config.n_sink} sinks"
    embedding = "embedding, sinks, gains" if config.n_sink else "embedding, gains"
    sharded = config.parallel == "fsdp" and plan["n_gpus"] > 1
    share = f", a share of 1/{plan['n_gpus']} (FSDP)" if sharded else ""
    buckets = "fp32; DDP's buckets are views of them" if plan["n_gpus"] > 1 and not sharded else f"fp32{share}"
    kept = "each block's input" if config.activation_checkpointing else "all that the backward pass reads"
    notes = {
        "weights": ("weights", f"fp32{share}"),
        "gradients": ("gradients", buckets),
        "optimizer": ("AdamW", f"two moments, fp32{share}"),
        "weight_copies": ("weight copies", "of the blocks' matrices in half precision, by autocast"),
        "activations": ("activations", f"{kept}, {config.micro_batch_size} sequences x {config.n_layer} layers"),
        "loss": ("loss", f"gradients at the head, {loss_rows(torch.device('cuda')):,} rows of logits"),
        "backward": ("backward", "above all of these"),
    }
    if sharded:
        notes["gathered"] = ("gathered", "embedding and blocks in work, or all weights in evaluation")
    rows = [
        ("model", f"{config.attention}, {config.n_layer} layers, width {config.n_embd}, {heads}, T {config.block_size}, "
                  f"V {config.vocab_size}"),
        ("parameters", f"{plan['n_params']:,} + {embedding} {plan['n_params_embedding']:,} = {plan['n_params_total']:,}"),
        ("attention", plan["attention_path"]),
        ("KV cache", f"{plan['kv_cache_bytes_per_token']:,} bytes a token and sequence in decoding, at 2 bytes a number"),
        ("compute", f"{plan['flops_per_token'] / 1e9:.4g} GFLOP per token, forward and backward; attention counted in full"),
        ("step", f"{plan['tokens_per_step']:,} tokens = {plan['n_gpus']} GPUs x {plan['micro_steps']} micro-steps x "
                 f"{config.micro_batch_size} sequences x {config.block_size}"),
        ("run", f"{plan['steps']:,} steps, {plan['tokens'] / 1e9:.4g}B tokens"),
        ("", ""),
        ("", f"memory per GPU, GB (1e9 bytes), {plan['n_gpus']} x {plan['gpu']}"),
    ]
    rows += [(label, f"{_gb(plan['memory_bytes'][part])}  {note}") for part, (label, note) in notes.items()]
    total = plan["memory_total_bytes"] * plan["memory_factor"] + plan["allowance_bytes"]
    calibration = [("calibration", f"{plan['memory_factor']:8.3f}  of these, measured once to predicted")]
    verdict = "fits" if plan["fits"] else "DOES NOT FIT"
    peak, mfu = f"{plan['gpu_peak_flops'] / 1e12:.0f} TFLOP/s", f"{100 * plan['mfu']:.3g}%"
    rows += [
        ("allowance", f"{_gb(plan['allowance_bytes'])}  CUDA, cuBLAS, NCCL, fragmentation: a guess"),
        *(calibration if plan["memory_factor"] != 1 else []),
        ("total", f"{_gb(total)}  of {plan['gpu_memory_bytes'] / 1e9:.0f}: {verdict}"),
        ("", ""),
        ("time", f"{plan['hours']:,.1f} h, {plan['gpu_hours']:,.1f} GPU-hours, at {mfu} of {peak} a GPU "
                 f"({plan['source']}; bf16)"),
        ("", f"{plan['step_s'] * 1e3:,.0f} ms a step, {plan['tokens_per_s']:,.0f} tokens/s; evaluation adds "
             f"{plan['evaluation_hours']:,.1f} h"),
        ("disk", f"{plan['checkpoint_bytes'] / 1e9:.2f} GB a checkpoint, up to {plan['run_folder_bytes'] / 1e9:.2f} GB of them"),
        ("", f"{plan['data_bytes'] / 1e9:.2f} GB for a data set of as many tokens at 2 bytes each"),
    ]
    return "\n".join([f"{label:>13}  {text}".rstrip() for label, text in rows] + _warning(plan))


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:8.2f}"


def _warning(plan: dict[str, Any]) -> list[str]:
    if plan["fits"]:
        return []
    size, size_checkpointing = plan["micro_batch_size_that_fits"], plan["micro_batch_size_with_checkpointing"]
    advice = []
    if size is not None:
        advice.append(f"--micro_batch_size={size} fits (same training, more micro-steps)")
    if size_checkpointing is not None:
        advice.append(f"--activation_checkpointing=true --micro_batch_size={size_checkpointing} fits (a third more FLOPs)")
    if not advice:
        advice.append("no micro_batch_size fits: use a GPU with more memory or a smaller model")
    return ["", f"warning: a step does not fit into the memory of {plan['gpu']}", *("  " + line for line in advice)]


def render_measured(m: dict[str, Any]) -> str:
    mfu = "" if m["mfu"] is None else f", MFU {m['mfu']:.1%}"
    if "calibrated_micro_step_s" in m:
        mfu += (f"; by calibration {m['calibrated_micro_step_s'] * 1e3:,.0f} ms "
                f"({m['calibrated_micro_step_s'] / m['micro_step_s']:.2f} of it), "
                f"{m['calibrated_bytes'] / 1e9:.3f} GB ({shown(quotient(m['calibrated_bytes'], m['peak_bytes']), '.2f')} of it)")
    return "\n".join([
        "",
        f"{'measured':>13}  on {m['device']}, {m['dtype']}: a step's peak is {m['peak_bytes'] / 1e9:.3f} GB, "
        f"predicted {m['predicted_bytes'] / 1e9:.3f} GB ({shown(quotient(m['predicted_bytes'], m['peak_bytes']), '.2f')} of it)",
        f"{'':>13}  {m['micro_step_s'] * 1e3:,.0f} ms a micro-step, {m['tokens_per_s']:,.0f} tokens/s{mfu}",
        *([f"{'':>13}  with dropout a CPU's attention is not fused: its probabilities are not in the prediction, a GPU's"]
          if m["unfused"] else []),
    ])


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--n_gpus", type=int, default=8)
    parser.add_argument("--mfu", type=float, default=0.4)
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--json", type=Path)
    try:
        own, rest = parser.parse_known_args(argv)
        config = load(rest)
        gpu = check_machine(own.gpu, own.n_gpus, own.mfu)
        if own.json:
            check_output("--json", own.json)
        calibration = calibrate(own.calibrate) if own.calibrate else Calibration(own.mfu * GPUS[gpu][0])
        mfu = calibration.flops_per_s / GPUS[gpu][0]
        plan = make_plan(config, gpu, own.n_gpus, mfu, calibration.memory_factor)
        plan["source"] = "measured" if own.calibrate else "assumed"
        if own.measure:
            print(f"measuring three training steps with micro_batch_size={config.micro_batch_size} here", file=sys.stderr)
        measured = measure(config) if own.measure else None
        if measured and own.calibrate:
            tokens = config.micro_batch_size * config.block_size
            measured["calibrated_micro_step_s"] = plan["flops_per_token"] * tokens / calibration.flops_per_s
            measured["calibrated_bytes"] = calibration.memory_factor * measured["predicted_bytes"]
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(render(plan, config))
    if measured:
        print(render_measured(measured))
    if own.json:
        write_aside(own.json, json.dumps(plan | {"measured": measured}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

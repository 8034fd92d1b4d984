"""What XSA costs in one block (attention and FFN), forward and backward: time and peak memory over sequence length and over
model width, the paper's Fig 2.

    python -m scripts.bench block                                        # a GPU: the paper's settings; a CPU: sizes cut for it
    python -m scripts.bench block config/0.7b.py --micro_batch_size=32 --lengths=1024,2048 --widths=1536 --out=runs/block_0.7b

The command line is train.py's: config files, then --key=value. The block is that of model.py in a training step: fp32 residual
stream and weights, autocast as `dtype` says, compiled if `compile` says so; micro_batch_size sequences; its input takes a
gradient as any block's but the first. Flags of its own:
    --lengths=A,B    sequence lengths T, at width n_embd
    --widths=A,B     widths d_model, at length block_size; the head size stays, the number of heads grows in proportion
    --compare A B    attention presets beside the baseline, which is `attention` (default xsa)
    --rounds=N       timed rounds (default 10); in each every arm makes one step, in an order that changes from round to round
    --minutes=X      a size that, by estimate, would pass this limit is left out; the smallest come first (default 5)
    --out=DIR        where block.json, with every measurement, versions and hardware, and block.png go (default runs/block)
    --json=FILE      another place for block.json, of which --out then has none; an earlier one is replaced when all is measured

Without a config file: on a GPU the block of the paper's 1.4B model (width 2048, 24 heads of 128), 32 sequences, T 512 to 16384,
width 1024 to 4096 at T 2048 with 1.5 heads per 128 channels as there (the paper gives batch and precision, the rest only in
the picture); on a CPU width 256, 4 sequences, T 128 to 1024, width 128 to 512 at T 256.

Ratios of time are medians over rounds of the ratio within a round. Peak memory is that of a second step, and counts the block's
weights and their gradients, its input, and the gradients at both ends: on CUDA torch's max_memory_allocated, on CPU as `step`
measures it, in a process of its own (a compiler's memory too, if it runs there). A size for which a GPU's memory is too small is
marked and the rest goes on.
"""

import argparse
import gc
import json
import math
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import distributed
from checkpoint import until_done, write_aside
from command_line import InputError, make_output_folder
from configurator import Config, as_dict, load
from model import GPT, rope_table
from presets import PRESETS, preset_switches
from scripts.bench import common
from scripts.bench.common import WARM_UP_ROUNDS, quartiles, quotient, shown, synchronize, take_turns, verdict
from scripts.bench.memory import TINY_SHAPE, in_fresh_process, process_status
from scripts.bench.step import flops_per_token, matrix_product_speed
from scripts.compare import BASELINE_COLOUR, COLOURS, STYLE, pyplot, save_picture
from tracker import environment
from train import autocast_dtype

DEFAULTS = {
    "cuda": (["--n_embd=2048", "--n_head=24", "--head_dim=128", "--block_size=2048", "--micro_batch_size=32"],
             "512,1024,2048,4096,8192,16384", "1024,2048,3072,4096"),
    "cpu": (["--n_embd=256", "--n_head=4", "--head_dim=64", "--block_size=256", "--micro_batch_size=4"],
            "128,256,512,1024", "128,256,384,512"),
}
COMPILE_SECONDS = 10  # of one block
PROCESS_SECONDS = 5  # to start one and load torch
OUT_OF_MEMORY, NO_TIME = "out of memory", "no time left"
TIME_LIMIT = {"cuda": 1.01, "cpu": 1.02}  # XSA / SA of a training step, compiled on a GPU, to which a block is held too
MEMORY_LIMIT = 1.02
CPU_FORM = "cut down for a CPU: neither the sizes nor the kind of machine of the paper's Fig 2"


# --- measuring --------------------------------------------------------------------------------------------------------------


class Arm:
    """A block with one attention, ready to make steps on an input (B, T, C) from the gradient at its output.

    It is a model's first block; with value residual, which that one only feeds, the second. QK-Clip's look at the logits, which
    a training step takes outside of the block, belongs to its cost."""

    def __init__(self, name: str, config: Config, inputs: tuple[Tensor, Tensor]):
        self.name, (self.x, self.dout) = name, inputs
        self.device = self.x.device
        torch.set_float32_matmul_precision("high")  # as train.py
        config = replace(config, n_layer=2, vocab_size=1).with_attention(name)
        with self.device:
            self.block = GPT(config.model_config(), seed=config.seed).h[int(config.value_residual)]
        if common.compiles(config, self.device):
            self.block.compile()
        dtype = autocast_dtype(config.dtype, self.device)
        self.autocast: AbstractContextManager = nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)
        T, attn = config.block_size, self.block.attn
        v1 = None
        if config.value_residual:
            shape = (len(self.x), config.n_kv_head // attn.maps, T, config.head_dim * attn.maps)
            v1 = torch.randn(shape, dtype=dtype, device=self.device, requires_grad=True)
        self.inputs = (self.x, rope_table(0, T, config.head_dim, config.rope_base, like=self.x), v1, attn.mask(T, self.device))

    def step(self) -> float:
        """Milliseconds of one forward and backward pass."""
        synchronize(self.device)
        start = time.perf_counter()
        with self.autocast:
            out, _, watched = self.block(*self.inputs)
            if watched is not None:
                self.block.attn.largest_logits(*watched)
        out.backward(self.dout)
        synchronize(self.device)
        elapsed = 1000 * (time.perf_counter() - start)
        finite = self.x.grad.isfinite().all().item()
        for tensor in (self.x, self.inputs[2], *self.block.parameters()):
            if tensor is not None:
                tensor.grad = None
        if not finite:
            raise RuntimeError(f"the gradient of {self.name} is not finite: what its step costs means nothing")
        return elapsed


def make_inputs(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Input and output gradient (B, T, C), fp32 as the residual stream is; what their values are costs nothing."""
    generator = torch.Generator(device).manual_seed(config.seed)
    shape = (config.micro_batch_size, config.block_size, config.n_embd)
    x, dout = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return x.requires_grad_(), dout


def warm_up(name: str, config: Config, device: torch.device) -> None:
    """Loads what a first step loads: libraries, thread pools, cuBLAS's workspaces. None of it is an arm's memory."""
    tiny = replace(config, **TINY_SHAPE)
    Arm(name, tiny, make_inputs(tiny, device)).step()


def peak_memory_on_cpu(name: str, config: Config) -> int:
    """Bytes of one arm's second step; for a process of its own, whose largest resident set this is."""
    device = torch.device("cpu")
    warm_up(name, config, device)
    before = process_status("VmRSS")
    arm = Arm(name, config, make_inputs(config, device))
    arm.step()
    arm.step()
    return process_status("VmHWM") - before


def prepare(name: str, config: Config, inputs: tuple[Tensor, Tensor]) -> tuple[Arm, int]:
    """An arm that has been warmed up, and its peak memory in bytes. On CUDA other arms may lie beside it, on the same inputs."""
    device = inputs[0].device
    on_gpu = device.type == "cuda"
    others = torch.cuda.memory_allocated(device) - sum(t.nbytes for t in inputs) if on_gpu else 0
    arm = Arm(name, config, inputs)
    arm.step()  # compiles
    if not on_gpu:
        return arm, in_fresh_process(peak_memory_on_cpu, name, config)
    torch.cuda.reset_peak_memory_stats(device)
    arm.step()
    return arm, torch.cuda.max_memory_allocated(device) - others


def measure(names: list[str], config: Config, rounds: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Per arm of one size, peak memory and milliseconds of each round, or why it failed."""
    results: dict[str, dict[str, Any]] = {name: {"failed": OUT_OF_MEMORY} for name in names}
    arms: dict[str, Arm] = {}
    torch._dynamo.reset()  # every size is compiled for itself, as in training; else the second one's shapes would be dynamic
    try:
        warm_up(names[0], config, device)
        inputs = make_inputs(config, device)
        for name in names:
            try:
                arms[name], memory = prepare(name, config, inputs)
                results[name] = {"peak_memory_bytes": memory}
            except torch.OutOfMemoryError:
                pass
            free(device)
        times = take_turns(arms, rounds, show=False)
        for name, ms in times.items():
            results[name] |= {"step_ms": ms, "step_ms_quartiles": quartiles(ms)}
    except torch.OutOfMemoryError:  # the inputs alone; or in a round, where the arms' weights lie beside each other
        results = {name: result if "failed" in result else {"failed": OUT_OF_MEMORY} for name, result in results.items()}
    return results


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ratios(arms: dict[str, dict[str, Any]], baseline: str) -> dict[str, dict[str, Any]]:
    """Of each arm to the baseline: time, as the median over rounds with quartiles, and peak memory."""
    found = {}
    base = arms[baseline]
    for name, arm in arms.items():
        if name != baseline and "failed" not in arm and "failed" not in base:
            low, median, high = quartiles([a / b for a, b in zip(arm["step_ms"], base["step_ms"], strict=True)])
            found[f"{name}/{baseline}"] = {"time": median, "time_quartiles": [low, median, high],
                                           "memory": quotient(arm["peak_memory_bytes"], base["peak_memory_bytes"])}
    return found


def estimate_seconds(config: Config, n_arms: int, rounds: int, speed: float, compiled: bool) -> float:
    """How long one size will take, roughly: a step is taken to run at half of the speed (FLOP/s) of a matrix product."""
    flops = flops_per_token(replace(config, n_layer=1, vocab_size=1)) * config.micro_batch_size * config.block_size
    steps = 2 + WARM_UP_ROUNDS + rounds
    return n_arms * (steps * flops / (0.5 * speed) + (COMPILE_SECONDS if compiled else 0)
                     + (0 if torch.device(config.device).type == "cuda" else PROCESS_SECONDS))


# --- telling ----------------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """One line per size and arm."""
    lines = [f"{'T':>6} {'d_model':>8} {'heads':>6}  {'arm':10} {'ms':>9}  {'quartiles':>19}  {'peak memory':>11}  "
             f"{'time':>6} {'(quartiles)':>15} {'memory':>7}"]
    for cell in record["cells"]:
        for name, arm in cell["arms"].items():
            line = f"{cell['T']:6} {cell['n_embd']:8} {cell['n_head']:6}  {name:10} "
            if "failed" in arm:
                lines.append(line + arm["failed"])
                continue
            low, median, high = arm["step_ms_quartiles"]
            line += f"{median:9.2f}  {low:8.2f} - {high:8.2f}  {arm['peak_memory_bytes'] / 2**20:7,.0f} MiB"
            if ratio := cell["ratios"].get(f"{name}/{record['arms'][0]}"):
                low, median, high = ratio["time_quartiles"]
                line += f"  {median:6.3f} ({low:.3f} - {high:.3f}) {shown(ratio['memory']):>7}"
            lines.append(line)
    return "\n".join(lines)


def figures(record: dict[str, Any]) -> list[str]:
    """XSA's figures to hold, which are those of a whole step: time where the two axes cross, memory at its worst, which may have
    been at a size that was left out."""
    found = [(cell, cell["ratios"]["xsa/sa"]) for cell in record["cells"] if "xsa/sa" in cell["ratios"]]
    config, on_gpu, lines = record["config"], record["device"] == "cuda", []
    for cell, ratio in found:
        if (cell["T"], cell["n_embd"]) == (config["block_size"], config["n_embd"]) and (record["compiled"] or not on_gpu):
            what = f"time, xsa / sa, T {cell['T']}, d_model {cell['n_embd']}"
            lines.append(verdict(what, ratio["time"], TIME_LIMIT[record["device"]], ratio["time_quartiles"]))
    if found:
        cell, ratio = max(found, key=lambda pair: pair[1]["memory"] or 0)
        planned = len(record["cells"])
        of = f"{planned} sizes" if len(found) == planned else f"the {len(found)} measured of {planned} sizes"
        what = f"peak memory, xsa / sa, T {cell['T']}, d_model {cell['n_embd']} (the worst of {of})"
        lines.append(verdict(what, ratio["memory"], MEMORY_LIMIT))
    return lines


def slopes(record: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """How cost grows: by axis ("T", "n_embd") and arm, the exponents of "time" (medians) and "memory", which are slopes of least
    squares between logarithms over all sizes of the axis; arms with fewer than two sizes, and a cost of 0, are left out."""
    config = record["config"]
    found: dict[str, dict[str, dict[str, float]]] = {"T": {}, "n_embd": {}}
    for key, fixed, held in (("T", "n_embd", config["n_embd"]), ("n_embd", "T", config["block_size"])):
        for name in record["arms"]:
            arms = {cell[key]: cell["arms"][name] for cell in record["cells"] if cell[fixed] == held}
            good = {x: arm for x, arm in arms.items() if "failed" not in arm}
            if len(good) > 1:
                costs = {"time": [arm["step_ms_quartiles"][1] for arm in good.values()],
                         "memory": [arm["peak_memory_bytes"] for arm in good.values()]}
                logs = {what: [math.log(value) for value in values] for what, values in costs.items() if all(values)}
                found[key][name] = {what: statistics.linear_regression([math.log(x) for x in good], values).slope
                                    for what, values in logs.items()}
    return found


def slope_lines(record: dict[str, Any]) -> list[str]:
    """slopes(), a line for each axis."""
    lines = []
    for key, arms in slopes(record).items():
        label = "T" if key == "T" else "d_model"
        for what in ("time", "memory") if arms else ():
            powers = ", ".join(f"{shown(arms[n].get(what), '.2f')} ({n})" for n in arms)
            lines.append(f"{what} grows as {label} to the power of {powers}")
    return lines


def draw(record: dict[str, Any], path: Path) -> None:
    """block.png from the content of block.json: time and memory, over T and over d_model. Raises InputError without
    matplotlib."""
    plt = pyplot()
    config, arms = record["config"], record["arms"]
    axes_of = (("T", "sequence length T", "n_embd"), ("n_embd", "d_model", "T"))
    held = {"T": config["block_size"], "n_embd": config["n_embd"]}
    most = max(arm.get("peak_memory_bytes", 0) for cell in record["cells"] for arm in cell["arms"].values())
    unit, unit_name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
        for row, (key, label, fixed) in enumerate(axes_of):
            cells = sorted((cell for cell in record["cells"] if cell[fixed] == held[fixed]), key=lambda cell: cell[key])
            x = [cell[key] for cell in cells]
            where = f"{'d_model' if fixed == 'n_embd' else 'T'} {held[fixed]}"
            grows = slopes(record)[key]
            for i, name in enumerate(arms):
                good = [cell for cell in cells if "failed" not in cell["arms"][name]]
                places = [cell[key] for cell in good]
                measured = [cell["arms"][name] for cell in good]
                look = {"color": BASELINE_COLOUR if i == 0 else COLOURS[(i - 1) % len(COLOURS)], "marker": "os^vD"[i % 5],
                        "markersize": 4, "linewidth": 1.3, "linestyle": "-" if i == 0 else "--", "label": name}
                ms = [arm["step_ms_quartiles"] for arm in measured]
                spread = [[middle - low for low, middle, _ in ms], [high - middle for _, middle, high in ms]]
                axes[row, 0].errorbar(places, [middle for _, middle, _ in ms], yerr=spread, capsize=2, **look)
                axes[row, 1].plot(places, [arm["peak_memory_bytes"] / unit for arm in measured], **look)
            _write(axes[row], cells, key, arms, unit)
            for axis, title, what, cost in ((axes[row, 0], "Time", "ms", "time"),
                                            (axes[row, 1], "Peak memory", unit_name, "memory")):
                slope = ", ".join(f"{name} {shown(grows[name].get(cost), '.2f')}" for name in grows)
                title = f"{title}, {where}" + (f"\nslope {slope}" if slope else "")
                axis.set(title=title, xlabel=label, ylabel=f"{cost} ({what})")
                axis.set_xscale("log")
                axis.set_xticks(x, [str(value) for value in x])
                if len(x) > 1:
                    axis.margins(x=0.12, y=0.14)
                found = [arm for cell in cells for arm in cell["arms"].values() if "failed" not in arm]
                if not found or cost == "memory" and not most:
                    axis.minorticks_off()
                    axis.set_yticks([])  # an axis without a number can have no logarithm
                    continue
                axis.set_yscale("log")
                axis.minorticks_off()
                axis.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
                axis.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
        missing = sum("failed" in cell["arms"][name] for cell in record["cells"] for name in arms)
        figure.suptitle(
            f"One block, forward and backward: {record['hardware']['device']}, {record['dtype']}, "
            f"{'compiled' if record['compiled'] else 'eager'}, batch {config['micro_batch_size']}"
            + (f"; {missing} measurements are missing, see the table" if missing else "")
            + ("" if record["device"] == "cuda" else f"\n{CPU_FORM}"), fontsize=10,
        )
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(arms), 6))
        save_picture(figure, path)


def _write(axes: Any, cells: list[dict[str, Any]], key: str, arms: list[str], unit: int) -> None:
    """What is missing; and with one arm beside the baseline, its ratio above every point."""
    for cell in cells:
        found = cell["arms"]
        failed: dict[str, list[str]] = {}
        for name in arms:
            if "failed" in found[name]:
                failed.setdefault(found[name]["failed"], []).append(name)
        if failed:
            text = "\n".join(reason if len(names) == len(arms) else f"{reason}: {', '.join(names)}" if len(names) < 4
                             else f"{reason}: {len(names)} of {len(arms)}" for reason, names in failed.items())
            for axis in axes:
                axis.axvline(cell[key], alpha=0)  # the place belongs to the axis
                axis.annotate(text, (cell[key], 0.03), xycoords=("data", "axes fraction"), rotation=90, ha="center", va="bottom",
                              fontsize=7)
        elif len(arms) == 2:
            ratio = cell["ratios"][f"{arms[1]}/{arms[0]}"]
            tops = (max(found[name]["step_ms_quartiles"][2] for name in arms),
                    max(found[name]["peak_memory_bytes"] for name in arms) / unit)
            for axis, top, value in zip(axes, tops, (ratio["time"], ratio["memory"]), strict=True):
                axis.annotate(f"× {shown(value)}", (cell[key], top), textcoords="offset points", xytext=(5, 6), ha="right",
                              fontsize=7, color=COLOURS[0])


# --- command line -----------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags, and the run's settings where the two axes cross. Raises InputError."""
    parser = common.parser("block", rounds=10)
    parser.add_argument("--lengths")
    parser.add_argument("--widths")
    parser.add_argument("--compare", default="xsa")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("runs/block"))
    own, rest = parser.parse_known_args(argv)
    common.check(own)
    if not 0 < own.minutes < math.inf:
        raise InputError(f"--minutes: wanted a number above 0, found {own.minutes}")
    device = common.measurable(distributed.start(load(rest)).device)
    shape, lengths, widths = DEFAULTS[device.type]
    config = replace(common.settings(rest, shape), device=str(device))
    if config.n_sink:
        raise InputError("n_sink: a block sees sinks as positions like all others; add them to --lengths")
    if config.activation_checkpointing:
        raise InputError("activation_checkpointing: wanted False, a block alone has nothing to gain from it")
    own.lengths = whole_numbers("--lengths", own.lengths or lengths)
    own.widths = whole_numbers("--widths", own.widths or widths)
    own.arms = list(dict.fromkeys([config.attention, *own.compare.split(",")]))
    if unknown := [name for name in own.arms if name not in PRESETS]:
        raise InputError(f"--compare: wanted some of {', '.join(PRESETS)}, found {unknown[0]!r}")
    if len(own.arms) < 2:
        raise InputError(f"--compare: wanted an attention other than the baseline, which is {config.attention}")
    own.sizes = sizes(config, own.lengths, own.widths)
    pyplot()
    make_output_folder("--out", own.out, ["block.json", "block.png"])
    return own, config


def whole_numbers(flag: str, text: str) -> list[int]:
    """ "512,1024" -> [512, 1024], sorted and each once. Raises InputError."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise InputError(f"{flag}: wanted whole numbers above 0 with commas between them, found {text!r}")
    return numbers


def sizes(config: Config, lengths: list[int], widths: list[int]) -> list[Config]:
    """Settings of every size, each once, the cheapest first. Raises InputError where a width has no whole number of heads."""
    points = {(T, config.n_embd) for T in lengths} | {(config.block_size, C) for C in widths}

    def scaled(heads: int, C: int) -> int:
        if heads * C % config.n_embd:
            raise InputError(f"--widths: {C} would have {heads * C / config.n_embd:g} heads, {heads} at n_embd={config.n_embd} "
                             f"grown in proportion; wanted a whole number")
        return heads * C // config.n_embd

    preset = preset_switches(config)
    derived = {key: None for key in preset if getattr(config, key) == preset[key]}  # follow the size, as a window may
    found = []
    for T, C in sorted(points):
        shape = {"block_size": T, "n_embd": C, "n_head": scaled(config.n_head, C), "n_kv_head": scaled(config.n_kv_head, C)}
        found.append(replace(config, **shape | derived))
    return sorted(found, key=lambda c: flops_per_token(replace(c, n_layer=1, vocab_size=1)) * c.block_size)


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, config = parse(argv)
    device = torch.device(config.device)
    facts = environment(device)
    compiled = common.compiles(config, device)
    dtype = common.dtype_name(config, device)
    speed = matrix_product_speed(config, device)
    seconds = [estimate_seconds(size, len(own.arms), own.rounds, speed, compiled) for size in own.sizes]
    print(
        f"one block, forward and backward: {', '.join(own.arms)} on {facts['hardware']['device']}, torch {torch.__version__}, "
        f"{dtype}, {'compiled' if compiled else 'eager'}, batch {config.micro_batch_size}\n"
        f"T {', '.join(map(str, own.lengths))} at d_model {config.n_embd} ({config.n_head} heads of {config.head_dim}); d_model "
        f"{', '.join(map(str, own.widths))} at T {config.block_size}\n"
        f"{own.rounds} timed rounds each after {WARM_UP_ROUNDS} to warm up: about {sum(seconds) / 60:.1f} minutes, and no new "
        f"size after {own.minutes:g}; into {own.out}" + ("" if device.type == "cuda" else f"\n{CPU_FORM}"),
        flush=True,
    )
    record: dict[str, Any] = {"arms": own.arms, "cells": [], "config": as_dict(config), "rounds": own.rounds,
                              "compiled": compiled, "dtype": dtype, "device": device.type, **facts}
    path = own.json or own.out / "block.json"
    meanwhile = until_done(path)
    start, slower = time.monotonic(), 1.0
    for i, size in enumerate(tqdm(own.sizes, desc="sizes", disable=None)):
        if i and time.monotonic() - start + slower * seconds[i] > 60 * own.minutes:
            arms: dict[str, dict[str, Any]] = {name: {"failed": NO_TIME} for name in own.arms}
        else:
            arms = measure(own.arms, size, own.rounds, device)
            free(device)
            slower = max(1.0, (time.monotonic() - start) / sum(seconds[: i + 1]))
        record["cells"].append({"T": size.block_size, "n_embd": size.n_embd, "n_head": size.n_head, "arms": arms,
                                "ratios": ratios(arms, own.arms[0])})
        write_aside(meanwhile, json.dumps(record | {"slopes": slopes(record)}, indent=1) + "\n")
    print(table(record))
    print("\n".join(slope_lines(record) + figures(record)))
    if all("failed" in arm for cell in record["cells"] for arm in cell["arms"].values()):
        raise RuntimeError("nothing could be measured: " + ", ".join(
            sorted({arm["failed"] for cell in record["cells"] for arm in cell["arms"].values()})))
    meanwhile.replace(path)
    draw(record, own.out / "block.png")
    print(f"written: {path}, {own.out / 'block.png'}")
    return 0

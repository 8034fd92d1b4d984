"""What the paper's sizes cost on one GPU, in at most nine minutes: tokens/s, MFU and peak memory of sa, xsa and gsxa, what the
latter two add, XSA's pass against the device's bandwidth, and the forms of the loss.

    python -m scripts.bench sizes                              # a GPU with 90 GB or more; into runs/sizes
    python -m scripts.bench sizes --device=cpu                 # the same at a size for two cores, to check the command

Measured one after another, the most telling first: 1.4B at T 2048; XSA's pass (as `xsa`) and the loss (as `loss`, bfloat16) at
its shape; 0.7B; 2.7B; 1.4B at T 8192. --key=value goes to all of them. Flags of its own:
    --rounds=N       timed rounds (default 10), fewer where the time would not do; in each every arm makes one step
    --minutes=X      be done after so many (default 8.5): parts that cannot be are left out and named, one that hangs is ended
    --out=DIR        where sizes.json and results.md go, written anew after every part (default runs/sizes)
    --json=FILE      another place for sizes.json, of which --out then has none

A step is train.py's optimizer step on 65,536 tokens, what one of 8 GPUs has of the paper's batch. The micro-batch is the largest
whose memory, by plan.py's account and what torch.compile keeps beyond it, is there beside the arms' weights and AdamW states.
The three arms lie in memory and take turns where that costs no more than half of the micro-batch, else sa with each of the
others; where memory does run out, half of the micro-batch is tried. Before anything is timed, processes side by side compile
every arm's blocks, the same in a model of two layers, into the compiler's cache. Each part has a process of its own.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import distributed
from checkpoint import write_aside
from command_line import InputError, make_output_folder
from configurator import Config, as_dict, load
from model import GPT
from scripts.bench import common, loss, step, xsa
from scripts.bench.memory import end_with_parent
from scripts.bench.step import Arm, brief, flops_per_token, matrix_product_speed, measure_group
from scripts.compare import markdown
from scripts.plan import rehearse
from tracker import environment, peak_flops

ARMS = ("sa", "xsa", "gsxa")
SEQUENCES = 32  # of 2048 tokens in a step
# Name, config file, and how many times the block size; in the order of importance.
SIZES = {"1.4B": ("config/1.4b.py", 1), "0.7B": ("config/0.7b.py", 1), "2.7B": ("config/2.7b.py", 1),
         "1.4B long": ("config/1.4b.py", 4)}
CUT = ["--n_layer=2", "--n_embd=64", "--n_head=8", "--head_dim=8", "--vocab_size=512"]  # on a CPU
CUT_BLOCK, CUT_SEQUENCES = 64, 4
# What a block of any arm keeps for backward in bf16 over what plain attention's keeps in eager mode, at most. Counted on CPU,
# torch 2.13, heads together 1.5 times as wide as the model, in numbers per token and channel: compiled sa 17.1, xsa 18.7, gsxa
# 19.2; eager 14.1, 14.1, 24.3.
KEEPS = {True: 1.4, False: 1.75}
ROOM = 0.85  # of the device's memory; the rest is CUDA's, cuBLAS's, lost between blocks, and for a wrong account
COMPILERS = 6  # processes at a time
COMPILE_SHARE = 0.4  # of the minutes, at most
START_SECONDS, TRACE_SECONDS, COMPILE_SECONDS = 12.0, 6.0, 30.0  # of a process; of an arm from the compiler's cache, and without
FEWEST_ROUNDS = 3
NO_TIME, NO_ROOM = "no time left", "memory is too small for two arms"


# --- what to measure --------------------------------------------------------------------------------------------------------


def sizes(overrides: list[str], device: torch.device) -> dict[str, Config]:
    """Settings of each size with plain attention, one sequence at a time. Raises InputError."""
    on_cpu = device.type == "cpu"
    block, sequences = (CUT_BLOCK, CUT_SEQUENCES) if on_cpu else (2048, SEQUENCES)
    found = {}
    for name, (file, times) in SIZES.items():
        shape = [*(CUT if on_cpu else []), f"--block_size={block * times}", f"--global_batch_size={max(1, sequences // times)}"]
        config = common.step_settings([file, "--micro_batch_size=1", *shape, *overrides], [])
        found[name] = replace(config.with_attention("sa"), device=str(device))
    return found


def memory_beside_state(config: Config, compiled: bool) -> Callable[[int], float]:
    """Bytes at a step's peak but for weights and AdamW's state, as a function of micro_batch_size. Blocks are alike and sequences
    are too: one and two of the former, two and four of the latter tell of all."""
    def beside(n_layer: int, n: int) -> float:
        parts = asdict(rehearse(replace(config, n_layer=n_layer), n, torch.device(config.device).type))
        parts["activations"] *= KEEPS[compiled]
        return sum(parts.values()) - parts["weights"] - parts["optimizer"]

    two, four = (one + (config.n_layer - 1) * (beside(2, n) - one) for n, one in ((n, beside(1, n)) for n in (2, 4)))
    return lambda n: two + (n - 2) / 2 * (four - two)


def state_bytes(config: Config) -> int:
    """Of weights and AdamW's two moments in fp32."""
    with torch.device("meta"):
        return 12 * sum(p.numel() for p in GPT(config.model_config()).parameters())


def groups(config: Config, names: tuple[str, ...], room: float, compiled: bool) -> list[dict[str, Config]]:
    """Arms to be in memory at once, the micro-batch chosen, each group with sa; see the module's docstring. Empty: no room."""
    arms = {name: config.with_attention(name) for name in names}
    states = {name: state_bytes(arm) for name, arm in arms.items()}
    beside = memory_beside_state(config, compiled)

    def largest(group: list[str]) -> int:
        """The largest power of two that divides the batch and fits, 0 where none does."""
        left = room - sum(states[name] for name in group)
        sizes = (2**i for i in range(config.global_batch_size.bit_length()) if config.global_batch_size % 2**i == 0)
        return max((n for n in sizes if beside(n) <= left), default=0)

    pairs = [["sa", name] for name in names if name != "sa"]
    whole = list(names)
    chosen = [whole] if 2 * largest(whole) >= max(map(largest, pairs)) else pairs
    return [{name: replace(arms[name], micro_batch_size=n) for name in group} for group in chosen if (n := largest(group))]


# --- in processes of their own ----------------------------------------------------------------------------------------------


def apart(function: Callable[..., Any], *arguments: Any, deadline: float) -> Any:
    """What `function` returns in a new process; {"failed": reason} where it raises, dies, or is not done by `deadline`
    (time.monotonic), when it is ended."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            return {"failed": NO_TIME}
        found = receiver.recv()
        process.join(10)
        return found
    except EOFError:
        process.join(10)
        return {"failed": f"its process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    try:
        found = function(*arguments)
    except Exception as error:
        found = {"failed": brief(error)}
    sender.send(found)
    sender.close()


def compile_ahead(config: Config) -> dict[str, float]:
    """Compiles what a step does, forward and backward, into the compiler's cache on the disk. Seconds."""
    start = time.monotonic()
    step.allow_compilations(1)
    Arm(config.attention, replace(config, n_layer=2, global_batch_size=config.micro_batch_size), distributed.start(config)).step()
    return {"seconds": time.monotonic() - start}


def measure_arms(configs: dict[str, Config], rounds: int, deadline: float, peak: float | None) -> dict[str, Any]:
    """step.summarize of arms that take turns, with what failed under "errors"."""
    times, memory, errors = measure_group(configs, rounds, deadline)
    return {**step.summarize(times, memory, next(iter(configs.values())), peak), "errors": errors}


def measure_loss(config: Config, rounds: int) -> dict[str, Any]:
    device = torch.device(config.device)
    names = loss.available(device)
    return loss.measure(names, config, "bfloat16", rounds, common.compiles(config, device))


# --- the whole --------------------------------------------------------------------------------------------------------------


class Measurement:
    """The parts, how far they are, and the files that tell of them."""

    def __init__(self, own: argparse.Namespace, configs: dict[str, Config], device: torch.device, speed: float):
        self.start = time.monotonic()
        self.deadline = self.start + 60 * own.minutes
        self.own, self.device, self.speed = own, device, speed
        self.compiled = common.compiles(configs["1.4B"], device)
        on_gpu = device.type == "cuda"
        self.memory = (torch.cuda.get_device_properties(device).total_memory if on_gpu
                       else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
        if on_gpu:
            torch.cuda.empty_cache()  # what took `speed` lies in this process
        self.facts = environment(device)
        self.name = self.facts["hardware"]["device"] if on_gpu else "cpu"
        self.peak = peak_flops(self.name)
        self.configs = configs
        room = ROOM * self.memory
        self.groups = {name: groups(config, ARMS, room, self.compiled) for name, config in configs.items()}
        self.record: dict[str, Any] = {"sizes": {}, "failed": {}, "rounds": own.rounds, "compiled": self.compiled,
                                       "dtype": common.dtype_name(configs["1.4B"], device), "config": as_dict(configs["1.4B"]),
                                       **self.facts}
        arms = [arm for found in self.groups.values() for group in found for arm in group.values()] if self.compiled else []
        self.to_compile = list({json.dumps(as_dict(arm)): arm for arm in arms}.values())  # each once
        self.compilers = max(1, min(COMPILERS, (os.cpu_count() or 1) // 2))
        self.failed: dict[str, str] = self.record["failed"]
        self.done: set[str] = set()
        for name, found in self.groups.items():
            if not found:
                self.failed[name] = NO_ROOM

    def parts(self) -> list[str]:
        """All that is to be measured, in order."""
        first, *others = self.configs
        return [first, "XSA's pass", "the loss", *others]

    def seconds(self, part: str, rounds: int = FEWEST_ROUNDS) -> float:
        """How long a part takes, roughly."""
        if part not in self.configs:
            return START_SECONDS + 15
        return sum(self.group_seconds(group, rounds) for group in self.groups[part])

    def group_seconds(self, group: dict[str, Config], rounds: int = FEWEST_ROUNDS) -> float:
        """A step is taken to run at 0.6 of the speed of a matrix product."""
        config = group["sa"]
        step_s = flops_per_token(config) * config.global_batch_size * config.block_size / (0.6 * self.speed)
        return START_SECONDS + len(group) * (TRACE_SECONDS * self.compiled + (2 + rounds) * step_s)

    def run(self) -> None:
        self.record["compiling"] = {"seconds": 0.0, "arms": []}
        if self.to_compile:
            self.compile()
        for part in tqdm(self.parts(), desc="parts", disable=None):
            if part not in self.failed and time.monotonic() + self.seconds(part) > self.deadline:
                self.failed[part] = NO_TIME
            elif part not in self.failed:
                (self.measure_size if part in self.configs else self.measure_part)(part)
            self.done.add(part)
            self.write()
            self.tell(f"{part}: {self.outcome(part)}")

    def outcome(self, part: str) -> str:
        """In a word or two."""
        reasons = [reason for name, reason in self.failed.items() if name == part or name.startswith(f"{part}, ")]
        return "; ".join(dict.fromkeys(reasons)) or "measured"

    def tell(self, done: str) -> None:
        """A line at once, also where there is no progress bar."""
        with tqdm.external_write_mode():
            print(f"{done}, {time.monotonic() - self.start:.0f} s so far", flush=True)

    def compile(self) -> None:
        """All arms' code, side by side. What fails or takes too long here is compiled, and fails, where it is measured."""
        start = time.monotonic()
        deadline = start + 60 * COMPILE_SHARE * self.own.minutes
        # Each process would by itself have as many helpers as there are cores; the variable is no part of the cache's keys.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, 2 * (os.cpu_count() or 1) // self.compilers)))
        with ThreadPoolExecutor(self.compilers) as pool, tqdm(total=len(self.to_compile), desc="compiling", disable=None) as bar:
            def one(config: Config) -> Any:
                found = apart(compile_ahead, config, deadline=deadline) if time.monotonic() < deadline else {"failed": NO_TIME}
                bar.update()
                return found

            found = list(pool.map(one, self.to_compile))
        told = ("attention", "n_embd", "block_size", "micro_batch_size")
        self.record["compiling"] = {"seconds": time.monotonic() - start, "arms": [
            {key: getattr(arm, key) for key in told} | result for arm, result in zip(self.to_compile, found, strict=True)]}
        self.tell(f"compiling: {len(found)} arms")

    def measure_size(self, name: str) -> None:
        """Every group of a size; again with half of the micro-batch where memory runs out."""
        waiting = sum(self.seconds(part) for part in self.parts() if part not in self.done)
        for group in self.groups[name]:
            waiting -= self.group_seconds(group)
            n = group["sa"].micro_batch_size
            while True:
                configs = {label: replace(arm, micro_batch_size=n) for label, arm in group.items()}
                soon = min(max(time.monotonic() + self.group_seconds(group), self.deadline - waiting), self.deadline - 2)
                found = apart(measure_arms, configs, self.own.rounds, soon, self.peak, deadline=self.deadline)
                errors = found.get("errors", {})
                if n == 1 or not any("OutOfMemory" in error for error in errors.values()):
                    break
                n //= 2
            if "failed" in found:
                self.failed[f"{name}, {' and '.join(group)}"] = found["failed"]
                continue
            for label, error in errors.items():
                self.failed[f"{name}, {label}"] = error
            cell = self.record["sizes"].setdefault(name, {"config": as_dict(self.configs[name]), "arms": {}, "ratios": {}})
            for label, arm in found["arms"].items():
                cell["arms"].setdefault(label, arm | {"micro_batch_size": n})
            cell["ratios"] |= found["ratios"]

    def measure_part(self, part: str) -> None:
        first = self.groups["1.4B"][0]["sa"] if self.groups["1.4B"] else self.configs["1.4B"]
        function, key = (xsa.measure, "xsa") if part == "XSA's pass" else (measure_loss, "loss")
        arguments = (first, self.own.rounds, self.device) if key == "xsa" else (first, self.own.rounds)
        found = apart(function, *arguments, deadline=self.deadline)
        if "failed" in found:
            self.failed[part] = found["failed"]
        else:
            self.record[key] = found

    def write(self) -> None:
        """What there is so far; a run that is cut off keeps it."""
        self.record["seconds"] = time.monotonic() - self.start
        self.record["waiting"] = [part for part in self.parts() if part not in self.done]
        write_aside(self.own.json or self.own.out / "sizes.json", json.dumps(self.record, indent=1) + "\n")
        write_aside(self.own.out / "results.md", self.text() + "\n")

    # --- telling ------------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """results.md."""
        record = self.record
        lines = [f"{self.facts['hardware']['device']}, torch {torch.__version__}, {record['dtype']}, "
                 f"{'compiled' if self.compiled else 'eager'}; {record['seconds']:.0f} s, of which "
                 f"{record['compiling']['seconds']:.0f} for compiling", "", table(record["sizes"]), ""]
        lines += self.figures()
        for key, tell in (("xsa", xsa.table), ("loss", lambda found: loss.table({"bfloat16": found}))):
            if key in record:
                lines += ["", "```", tell(record[key]), "```"]
        if self.failed or record["waiting"]:
            lines += ["", *(f"not measured: {name}: {reason}" for name, reason in self.failed.items()),
                      *(f"not measured yet: {part}" for part in record["waiting"])]
        return "\n".join(lines)

    def figures(self) -> list[str]:
        """The figures to hold, held or missed; of MFU on the machine and at the shape that they are for."""
        lines = []
        for name, cell in self.record["sizes"].items():
            lines += [f"{name}: {line}  " for line in step.figures(cell, self.configs[name], self.name, self.compiled)]
            if ratio := cell["ratios"].get("gsxa/sa"):
                low, median, high = ratio["time_quartiles"]
                lines.append(f"{name}: step time, gsxa / sa   {median:.3f} ({low:.3f} - {high:.3f})  ")
        return lines


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Markdown, a row for each arm of each size."""
    rows = [["size", "T", "micro-batch", "attention", "ms a step", "tokens/s", "MFU", "peak memory", "time / sa", "memory / sa"]]
    for name, cell in cells.items():
        for label, arm in cell["arms"].items():
            low, median, high = arm["step_ms_quartiles"]
            ratio = cell["ratios"].get(f"{label}/sa")
            spread = "{1:.3f} ({0:.3f} - {2:.3f})".format(*ratio["time_quartiles"]) if ratio else "1"
            rows.append([name.split()[0], str(cell["config"]["block_size"]), str(arm["micro_batch_size"]), label,
                         f"{median:.1f} ({low:.1f} - {high:.1f})", f"{arm['tokens_per_s']:,.0f}",
                         "n/a" if arm["mfu"] is None else f"{arm['mfu']:.1%}", f"{arm['peak_memory_bytes'] / 1e9:.2f} GB", spread,
                         common.shown(ratio["memory"]) if ratio else "1"])
    return markdown(rows)


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Config], torch.device]:
    """The benchmark's flags, the settings of each size, the device. Raises InputError."""
    parser = common.parser("sizes", rounds=10)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--out", type=Path, default=Path("runs/sizes"))
    own, rest = parser.parse_known_args(argv)
    common.check(own)
    if not 0 < own.minutes < math.inf:
        raise InputError(f"--minutes: wanted above 0, found {own.minutes}")
    if files := [argument for argument in rest if not argument.startswith("-")]:
        raise InputError(f"sizes: wanted --key=value alone, since it has its own config files, found {files[0]!r}")
    device = common.measurable(distributed.start(load(rest)).device)
    configs = sizes(rest, device)
    make_output_folder("--out", own.out, ["sizes.json", "results.md"])
    return own, configs, device


def main(argv: list[str]) -> int:
    """Runs the benchmark; 1 where a part fails for another reason than time or memory. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, configs, device = parse(argv)
    first = configs["1.4B"]
    work = Measurement(own, configs, device, matrix_product_speed(first, device))
    print(f"{', '.join(ARMS)} on {work.facts['hardware']['device']}, torch {torch.__version__}, {work.record['dtype']}, "
          f"{'compiled' if work.compiled else 'eager'}, into {own.out}", flush=True)
    total = math.ceil(len(work.to_compile) / work.compilers) * (START_SECONDS + COMPILE_SECONDS)
    for part in work.parts():
        total += work.seconds(part, own.rounds)
        shape = ""
        if part in configs:
            config, found = configs[part], work.groups[part]
            batches = " and ".join(f"{group['sa'].micro_batch_size} ({', '.join(group)})" for group in found)
            shape = (f", {config.n_layer} layers, width {config.n_embd}, T {config.block_size}, micro-batch "
                     f"{batches or 'none fits'}")
        print(f"  {part}{shape}: about {work.seconds(part, own.rounds):.0f} s")
    less = "" if total <= 60 * own.minutes else ": there will be fewer rounds, or the last parts are left out"
    print(f"about {total / 60:.1f} minutes, compiling included; at most {own.minutes:g}{less}", flush=True)
    work.run()
    print(work.text())
    return int(any(reason not in (NO_TIME, NO_ROOM) for reason in work.failed.values()))

"""What waiting for data costs: the share of a training step, and micro-batches/s of data.loader beside a plain loop.

    python -m scripts.bench loader                                                  # random tokens in a temporary file
    python -m scripts.bench loader config/1.4b.py --dataset=fineweb --json=loader.json

The command line is train.py's: config files, then --key=value; without a config file a model of 4 layers and 512 tokens a
sequence; without --dataset 20M random tokens. Flags of its own:
    --batches=N      micro-batches in a timed turn of the loaders (default 256)
    --rounds=N       timed rounds (default 6), of the loaders in turns and of the training step
    --json=FILE      also write every measurement, with versions and hardware

    loader           data.loader: its thread, keyed windows, int64 copies, the check of every id
    memmap           NanoGPT's way: random starts from torch's generator, a window at a time from np.memmap, stacked

The share is what a step of train.py waits in the loader, of the whole step: time in which no next micro-batch was ready. What
the thread takes from the step's own cores is in the step's time. The file is in the page cache after the first round; a disk
that is slower than training shows in training's own `data_ms`.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import distributed
from checkpoint import write_aside
from command_line import InputError
from configurator import Config, as_dict
from data.loader import Batch, Loader
from data.shards import TOKEN, TokenStream, open_dataset
from scripts.bench import common
from scripts.bench.common import WARM_UP_ROUNDS, milliseconds, quartiles, take_turns, verdict
from scripts.bench.step import DEFAULT_SHAPE, OurRun
from tracker import environment

RANDOM_TOKENS = 20_000_000
SHARE_LIMIT = 0.01


def plain_batches(stream: TokenStream, config: Config, device: torch.device) -> Iterator[Batch]:
    """NanoGPT's loading restated: no thread, the memory map opened anew for every micro-batch, as there. From the first shard."""
    shard = stream.shards[0]
    T = config.block_size
    while True:
        tokens = np.memmap(shard.path, dtype=TOKEN, mode="r", offset=shard.first_byte, shape=(shard.n_tokens,))
        starts = torch.randint(len(tokens) - T, (config.micro_batch_size,)).tolist()
        x, y = (torch.stack([torch.from_numpy(tokens[i + shift : i + shift + T].astype(np.int64)) for i in starts])
                for shift in (0, 1))
        if device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


class Turn:
    """Draws some micro-batches from batches made anew, so that none was read ahead."""

    def __init__(self, make: Callable[[], Any], count: int, device: torch.device):
        self.make, self.count, self.device = make, count, device

    def step(self) -> float:
        def draw() -> None:
            with closing(self.make()) as batches:
                for _ in range(self.count):
                    next(batches)

        return milliseconds(draw, self.device)


def make_loader(stream: TokenStream, config: Config, device: torch.device) -> Loader:
    return Loader(stream, block_size=config.block_size, global_batch_size=config.global_batch_size,
                  micro_batch_size=config.micro_batch_size, rank=0, world_size=1, seed=config.seed, sampling=config.sampling,
                  vocab_size=config.vocab_size, device=device)


def measure_loaders(stream: TokenStream, config: Config, count: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Per loader milliseconds of each round of `count` micro-batches, and micro-batches/s; the ratio of speeds."""
    loader = make_loader(stream, config, device)
    turns = {"loader": Turn(loader.batches, count, device),
             "memmap": Turn(lambda: plain_batches(stream, config, device), count, device)}
    times = take_turns(turns, rounds)
    ratio = quartiles([b / a for a, b in zip(times["loader"], times["memmap"], strict=True)])
    return {"arms": {name: {"ms": ms, "micro_batches_per_s": 1000 * count / quartiles(ms)[1]} for name, ms in times.items()},
            "speed_ratio": ratio}


def measure_share(stream: TokenStream, config: Config, rounds: int, ranks: distributed.Ranks) -> dict[str, Any]:
    """Milliseconds of each step and of its waiting for data, and the waiting's share."""
    run = OurRun(config, ranks)
    run._build(None)
    steps, waits = [], []
    with make_loader(stream, config, ranks.device).batches() as batches:
        for i in tqdm(range(-WARM_UP_ROUNDS, rounds), desc="steps", disable=None):
            batches.take_waited()
            elapsed = milliseconds(lambda: run.train_step(batches), ranks.device)
            if i >= 0:
                steps.append(elapsed)
                waits.append(1000 * batches.take_waited())
    return {"step_ms": steps, "data_ms": waits, "share": quartiles([a / b for a, b in zip(waits, steps, strict=True)])}


def table(result: dict[str, Any]) -> str:
    lines = [f"{name:8} {arm['micro_batches_per_s']:12,.0f} micro-batches/s" for name, arm in result["loaders"]["arms"].items()]
    low, median, high = result["loaders"]["speed_ratio"]
    step = result["step"]
    lines += [
        f"loader/memmap: speed {median:.2f} (quartiles {low:.2f} - {high:.2f})",
        f"step {quartiles(step['step_ms'])[1]:.1f} ms, of which {quartiles(step['data_ms'])[1]:.3f} ms wait for data",
        verdict("share of a step", step["share"][1], SHARE_LIMIT, step["share"]),
    ]
    return "\n".join(lines)


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags and the run's settings. Raises InputError."""
    parser = common.parser("loader", rounds=6)
    parser.add_argument("--batches", type=int, default=256)
    own, rest = parser.parse_known_args(argv)
    common.check(own)
    if own.batches < 1:
        raise InputError(f"--batches: wanted at least 1, found {own.batches}")
    own.random = not any(argument.startswith("--dataset=") for argument in rest)
    config = common.settings(rest, DEFAULT_SHAPE)
    config.accumulation(1)
    if own.random and config.block_size >= RANDOM_TOKENS:
        raise InputError(f"block_size: wanted below {RANDOM_TOKENS} without --dataset, found {config.block_size}")
    return own, config


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, config = parse(argv)
    ranks = distributed.start(config)
    with tempfile.TemporaryDirectory() as folder:
        if own.random:  # a folder as NanoGPT's, which open_dataset takes
            tokens = np.random.default_rng(config.seed).integers(min(config.vocab_size, 2**16), size=RANDOM_TOKENS, dtype=TOKEN)
            tokens.tofile(Path(folder) / "train.bin")
            tokens[: config.block_size + 1].tofile(Path(folder) / "val.bin")
        data = open_dataset(folder if own.random else config.dataset)
        facts = environment(ranks.device)
        print(f"{own.batches} micro-batches of {config.micro_batch_size} x {config.block_size} tokens from "
              f"{'random tokens' if own.random else config.dataset}, {own.rounds} rounds, then {own.rounds} training steps on "
              f"{facts['hardware']['device']}", flush=True)
        loaders = measure_loaders(data.train, config, own.batches, own.rounds, ranks.device)
        result = {"loaders": loaders, "step": measure_share(data.train, config, own.rounds, ranks)}
    print(table(result))
    if own.json:
        write_aside(own.json, json.dumps({**result, "config": as_dict(config), "batches": own.batches, **facts}, indent=1) + "\n")
    return 0

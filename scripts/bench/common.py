"""What the benchmarks share: flags, arms taking turns, the spread of what was measured, and whether a figure was held. Loads
torch only to wait for a GPU."""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from command_line import ArgumentParser, InputError

WARM_UP_ROUNDS = 2


class Steps(Protocol):
    """What take_turns measures."""

    def step(self) -> float:
        """Milliseconds of one step."""


def parser(name: str, rounds: int) -> ArgumentParser:
    """The flags that every benchmark has; `rounds` is the default."""
    parser = ArgumentParser(prog=f"python -m scripts.bench {name}", add_help=False)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path)
    return parser


def check(own: argparse.Namespace) -> None:
    """Raises InputError."""
    if own.rounds < 2:
        raise InputError(f"--rounds: wanted at least 2, found {own.rounds}")
    if own.json and not own.json.parent.is_dir():
        raise InputError(f"--json: no folder {own.json.parent}")


def measurable(device: Any) -> Any:
    """A torch.device whose peak memory can be read. Raises InputError for another."""
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device: wanted cpu or cuda, found {device}: peak memory cannot be read elsewhere")
    if device.type == "cpu" and not Path("/proc/self/status").exists():
        raise InputError("peak memory on CPU is read from /proc, which this system does not have")
    return device


def milliseconds(call: Callable[[], Any], device: Any) -> float:
    """Of one call that computes on a torch.device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return 1000 * (time.perf_counter() - start)


def synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def take_turns(arms: Mapping[str, Steps], rounds: int, show: bool = True) -> dict[str, list[float]]:
    """Milliseconds of each arm's step, round by round. All arms make a step in each, in an order that changes: every arm comes
    first, and before and after every other."""
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection would land in whichever arm's turn it is
    try:
        for i in tqdm(range(-WARM_UP_ROUNDS, rounds), desc="rounds", disable=None if show else True):
            first = i % max(1, len(names))
            order = names[first:] + names[:first]
            for name in order if i // max(1, len(names)) % 2 == 0 else reversed(order):
                elapsed = arms[name].step()
                if i >= 0:
                    times[name].append(elapsed)
    finally:
        gc.enable()
    return times


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile of at least two values."""
    return statistics.quantiles(values, n=4, method="inclusive")


def verdict(what: str, found: float, limit: float, quartiles: list[float] | None = None, at_least: bool = False) -> str:
    """One line: the figure found, the one to hold, and by how much it is held or missed."""
    gap = (found - limit if at_least else limit - found) / limit
    word = f"held, {gap:.1%} to spare" if gap >= 0 else f"missed by {-gap:.1%}"
    if quartiles and quartiles[0] < limit < quartiles[2]:
        word += ", but within the spread: more rounds on a quieter machine decide"
    return f"{what:26} {found:.3f}  {'at least' if at_least else 'at most'} {limit:.2f}: {word}"

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

from command_line import ArgumentParser, InputError, check_output

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
    if own.json:
        check_output("--json", own.json)


def with_commas(argv: list[str], flag: str = "--compare") -> list[str]:
    """`--compare A B` as `--compare=A,B`. A config file may follow: it ends the list."""
    result: list[str] = []
    inside = False
    for argument in argv:
        inside = argument == flag or (inside and not argument.startswith("-") and not argument.endswith(".py"))
        if not inside or argument == flag:
            result.append(argument)
        else:
            result[-1] += ("=" if result[-1] == flag else ",") + argument
    return result


def settings(rest: list[str], default_shape: list[str]) -> Any:
    """train.py's settings; `default_shape` comes before them where no config file is named. Raises InputError."""
    from configurator import load

    return load(rest if any(not argument.startswith("-") for argument in rest) else default_shape + rest)


def step_settings(rest: list[str], default_shape: list[str]) -> Any:
    """settings() for whole training steps on one rank, each of which must do the same work. Raises InputError."""
    config = settings(rest, default_shape)
    config.accumulation(1)
    if config.dtype == "float16":
        raise InputError("dtype: wanted float32 or bfloat16, found float16: its loss scale skips steps")
    return config


def compiles(config: Any, device: Any) -> bool:
    """Whether train.py would, with these settings on a torch.device."""
    return bool(config.compile or (config.compile is None and device.type == "cuda"))


def dtype_name(config: Any, device: Any) -> str:
    """Of matrix products."""
    from train import autocast_dtype

    return str(autocast_dtype(config.dtype, device) or "float32").removeprefix("torch.")


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


def take_turns(
    arms: Mapping[str, Steps], rounds: int, show: bool = True, warm_up: int = WARM_UP_ROUNDS
) -> dict[str, list[float]]:
    """Milliseconds of each arm's step, round by round, after `warm_up` rounds. All arms make a step in each, in an order that
    changes: every arm comes first, and before and after every other."""
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection would land in whichever arm's turn it is
    try:
        for i in tqdm(range(-warm_up, rounds), desc="rounds", disable=None if show else True):
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


def quotient(a: float, b: float) -> float | None:
    """a / b; None where b is 0, as peak memory is that found room in what the process had already."""
    return a / b if b else None


def shown(value: float | None, form: str = ".3f") -> str:
    return "n/a" if value is None else f"{value:{form}}"


def verdict(
    what: str, found: float | None, limit: float, quartiles: list[float] | None = None, at_least: bool = False
) -> str:
    """One line: the figure found, the one to hold, and by how much it is held or missed."""
    if found is None:
        return f"{what:26} n/a  {'at least' if at_least else 'at most'} {limit:.2f}: not measured"
    gap = (found - limit if at_least else limit - found) / limit
    word = f"held, {gap:.1%} to spare" if gap >= 0 else f"missed by {-gap:.1%}"
    if quartiles and quartiles[0] < limit < quartiles[2]:
        word += ", but within the spread: more rounds on a quieter machine decide"
    return f"{what:26} {found:.3f}  {'at least' if at_least else 'at most'} {limit:.2f}: {word}"

"""What the benchmarks share: flags, the spread of what was measured, and whether a figure was held. Loads no torch."""

import argparse
import statistics
from pathlib import Path

from command_line import ArgumentParser, InputError


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

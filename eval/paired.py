"""Two checkpoints on the same validation windows: the difference of their losses, and its standard error.

    python -m eval.paired runs/1.4b-sa runs/1.4b-xsa
    python -m eval.paired runs/a/ckpt_00010000.pt runs/b/ckpt_00010000.pt --json=paired.json

Each is a run's folder (its newest checkpoint) or a checkpoint file; the difference is the second minus the first, in nats. The
windows are those of train.py's evaluation (`eval_tokens`, `block_size`, the data set), on which both are hard or easy together:
the standard error is that of the mean of the windows' differences, windows taken as independent. It says how far other
validation text would move the difference of these two checkpoints, not how far another seed would.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import checkpoint
from checkpoint import write_aside
from command_line import ArgumentParser, InputError, check_output
from data.loader import validation_batches
from data.shards import open_dataset
from model import GPT
from scripts.sample import choose_device
from train import autocast_dtype


@dataclass(frozen=True)
class Paired:
    """Mean difference in nats, b minus a, its standard error (None for one window), and the number of windows."""

    difference: float
    standard_error: float | None
    windows: int


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Of the windows' losses, in the same order."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    n = len(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    return Paired(statistics.fmean(differences), error, n)


def newest(place: Path) -> Path:
    """The checkpoint file itself, or the newest of a run's folder. Raises InputError."""
    path = checkpoint.latest(place) if place.is_dir() else place
    if path is None:
        raise InputError(f"{place} holds no checkpoint (ckpt_*.pt)")
    return path


@torch.no_grad()
def window_losses(path: Path, device: torch.device, progress: bool = False) -> list[float]:
    """Mean loss in nats of a checkpoint on each window of its run's evaluation. Raises InputError where the checkpoint or its
    data set is not there, or not the one it was trained on."""
    try:
        model = GPT.from_checkpoint(path, device)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise InputError(f"checkpoint {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(" ".join(str(error).split())) from None
    config = state["config"]
    data = open_dataset(config["dataset"])
    if data.fingerprint != state["data"]["fingerprint"]:
        raise InputError(f"{path} was trained on other data than dataset {config['dataset']} has now")
    # One window at a time: the model gives the mean over a batch, and never holds the logits.
    batches = validation_batches(
        data.val, block_size=config["block_size"], eval_tokens=config["eval_tokens"], micro_batch_size=1, rank=0, world_size=1,
        vocab_size=config["vocab_size"], device=device,
    )
    dtype = autocast_dtype(config["dtype"], device)
    losses = []
    for x, y in tqdm(batches, desc=path.parent.name, unit="window", disable=None if progress else True, leave=False):
        with nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype):
            losses.append(model(x, y)[1])
    return torch.stack(losses).tolist()


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m eval.paired", description=__doc__)
    parser.add_argument("places", nargs=2, type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the losses of every window")
    try:
        args = parser.parse_args(argv)
        device = choose_device(args.device)
        paths = [newest(place) for place in args.places]
        if args.json:
            check_output("--json", args.json, inputs=paths)
        _check_same_windows(paths)
        print(f"{paths[1]} minus {paths[0]}, window by window, on {device}", file=sys.stderr)
        losses = [window_losses(path, device, progress=True) for path in paths]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = paired(*losses)
    means = [statistics.fmean(values) for values in losses]
    error = "s.e. n/a" if result.standard_error is None else f"± {result.standard_error:.4f}"
    print(f"{means[0]:.4f}, {means[1]:.4f}: difference {result.difference:+.4f} {error} nats ({result.windows:,} windows)")
    if args.json:
        record: dict[str, Any] = {"checkpoints": [str(path) for path in paths], "losses": losses, **asdict(result)}
        write_aside(args.json, json.dumps(record) + "\n")
    return 0


def _check_same_windows(paths: list[Path]) -> None:
    """Raises InputError for checkpoints whose runs were not evaluated on the same windows."""
    states = [checkpoint.load(path, mmap=True) for path in paths]
    for key in ("block_size", "eval_tokens"):
        if len(values := {state["config"][key] for state in states}) > 1:
            raise InputError(f"{paths[0]} and {paths[1]} were not evaluated on the same windows: {key} is {values}")
    if len({state["data"]["fingerprint"] for state in states}) > 1:
        raise InputError(f"{paths[0]} and {paths[1]} were trained on different data")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

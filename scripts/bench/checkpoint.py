"""What saving a checkpoint costs: the copy to the host, the writing, and training steps while a thread writes against steps
without.

    python -m scripts.bench checkpoint                                          # 126 MB of state, about a minute on a CPU
    python -m scripts.bench checkpoint config/1.4b.py --global_batch_size=8 --out_dir=runs --json=bench.json

The command line is train.py's: config files, then --key=value. The checkpoints go into a folder of their own in out_dir's parent
folder, which should be on the disk that training would write to; it is removed at the end. Model, step and writer are
train.py's. A round makes steps, saves, makes steps until the writer is done, and steps again: those while writing are held
against those before and after. Of the former count the ones that end before the writing does or, where there is none such, the
first. Flags of its own:
    --rounds=N       saves that are timed, after one that is not (default 6)
    --json=FILE      also write every measurement, with versions and hardware
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

import checkpoint
import distributed
from checkpoint import write_aside
from command_line import InputError
from configurator import Config, as_dict
from distributed import Ranks
from scripts.bench import common
from scripts.bench.common import quartiles, verdict
from scripts.bench.step import Arm, synchronize
from tracker import environment

DEFAULT_SHAPE = ["--n_layer=2", "--n_head=8", "--n_embd=512", "--vocab_size=8192", "--block_size=64", "--micro_batch_size=2",
                 "--global_batch_size=2", "--eval_tokens=64"]
LIMIT = 1.1  # step time while writing / without
MOST_STEPS = 20  # without writing, on each side of a save


class Saver:
    """A run of train.py that is warmed up, and its writer."""

    def __init__(self, config: Config, ranks: Ranks, folder: Path):
        self.arm, self.folder, self.writer = Arm(config.attention, config, ranks), folder, checkpoint.Writer()
        self.arm.run.data = SimpleNamespace(fingerprint="", tokenizer=None, vocab_size=None)
        self.write_s = 0.0
        for _ in range(3):  # makes AdamW's state, and compiles
            self.arm.step()

    def save(self) -> float:
        """Seconds for which training waits; the writing goes on."""
        synchronize(self.arm.device)
        begin = time.perf_counter()
        self.writer.start(self.arm.run._state(0), self._write)
        return time.perf_counter() - begin

    def _write(self, state: dict[str, Any]) -> None:
        begin = time.perf_counter()
        checkpoint.save(self.folder, state, keep=1, hurry=self.writer.hurry)
        self.write_s = time.perf_counter() - begin

    def size(self) -> int:
        """Bytes of the checkpoint."""
        return checkpoint.list_checkpoints(self.folder)[-1].stat().st_size

    def round(self, n_quiet: int) -> dict[str, Any]:
        """Steps without, a save with the steps during it, steps without: seconds and milliseconds."""
        quiet = [self.arm.step() for _ in range(n_quiet)]
        copy_s, steps, whole = self.save(), [self.arm.step()], 0
        while self.writer.busy:
            whole = len(steps)
            steps.append(self.arm.step())
        self.writer.wait()
        quiet += [self.arm.step() for _ in range(n_quiet)]
        step_ms, saving_ms = statistics.mean(quiet), statistics.mean(steps[:whole] or steps[:1])
        return {"copy_s": copy_s, "write_s": self.write_s, "step_ms": step_ms, "step_while_writing_ms": saving_ms,
                "steps_while_writing": whole, "ratio": saving_ms / step_ms}


def measure(config: Config, rounds: int, folder: Path) -> dict[str, Any]:
    """All rounds, and their medians with quartiles. Steps without writing are as many as fit into the first save's writing."""
    saver = Saver(config, distributed.start(config), folder)
    first = saver.round(1)
    n_quiet = max(1, min(MOST_STEPS, round(1000 * first["write_s"] / first["step_ms"] / 2)))
    found = [saver.round(n_quiet) for _ in tqdm(range(rounds), desc="rounds", disable=None)]
    keys = ("copy_s", "write_s", "step_ms", "step_while_writing_ms", "ratio")
    return {"bytes": saver.size(), "first_copy_s": first["copy_s"], "rounds": found} | {
        f"{key}_quartiles": quartiles([one[key] for one in found]) for key in keys}


def report(result: dict[str, Any]) -> str:
    def spread(key: str, form: str, unit: str) -> str:
        low, median, high = (format(value, form) for value in result[f"{key}_quartiles"])
        return f"{median} {unit} ({low} - {high})"

    gigabytes, inside = result["bytes"] / 1e9, [one["steps_while_writing"] for one in result["rounds"]]
    speed = gigabytes / result["write_s_quartiles"][1]
    return "\n".join([
        f"{'checkpoint':26} {gigabytes:.3f} GB",
        f"{'copy to the host':26} {spread('copy_s', '.3f', 's')}, the first {result['first_copy_s']:.3f} s",
        f"{'writing':26} {spread('write_s', '.3f', 's')}, {speed:.2f} GB/s",
        f"{'step':26} {spread('step_ms', '.1f', 'ms')}",
        f"{'step while writing':26} {spread('step_while_writing_ms', '.1f', 'ms')}, {min(inside)} to {max(inside)} a save",
        verdict("step, writing / not", result["ratio_quartiles"][1], LIMIT, result["ratio_quartiles"]),
    ])


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags and the run's settings. Raises InputError."""
    own, rest = common.parser("checkpoint", rounds=6).parse_known_args(argv)
    common.check(own)
    return own, common.step_settings(rest, DEFAULT_SHAPE)


def main(argv: list[str]) -> int:
    """Runs the benchmark. Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    own, config = parse(argv)
    place = Path(config.out_dir).parent
    if not place.is_dir():
        raise InputError(f"out_dir={config.out_dir}: no folder {place}, in which the checkpoints would be written")
    facts = environment(distributed.start(config).device)
    print(f"{config.attention} on {facts['hardware']['device']}, torch {facts['versions']['torch']}; {config.n_layer} layers, "
          f"width {config.n_embd}, vocabulary {config.vocab_size}; a step is {config.global_batch_size} sequences of "
          f"{config.block_size} tokens; {own.rounds} saves below {place}", flush=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-", dir=place) as folder:
        result = measure(config, own.rounds, Path(folder))
    print(report(result))
    if own.json:
        write_aside(own.json, json.dumps({**result, "config": as_dict(config), **facts}, indent=1) + "\n")
    return 0

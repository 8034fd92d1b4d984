"""Kills runs at random, again and again, and compares each with one that was left alone. scripts/soak.sh is its command.

    python -m tests.faults.soak --kills=50 --seed=0

A round is a run of twelve steps with settings of its own that is killed a few times, at a chosen place or a random moment, one
rank or all, forked or started from nothing, and then left to end with --init_from=auto. Its metrics, weights and files are
those of the undisturbed run: bit for bit on one rank, within fp32 rounding on several.
"""

import contextlib
import io
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from command_line import ArgumentParser, InputError
from tests.faults.conftest import build_dataset
from tests.faults.driver import SMALL, Fault, Job, assert_same_run, kill_group, launch, processes_of, run
from tests.faults.inject import PLACES

SETTINGS = {
    "plain": [], "dropout, shuffle": ["--dropout=0.1", "--sampling=shuffle"],
    "fp16, save every step": ["--dtype=float16", "--save_interval=1"], "sinks, bf16": ["--n_sink=2", "--dtype=bfloat16"],
}
MASTER_ONLY = ("checkpoint write", "fsync", "rename", "removal", "metrics")


class Soak:
    """Rounds until there were so many kills, or no time is left. `counts` has kills by place and number of ranks."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed = folder, seed
        self.counts: Counter[tuple[str, str]] = Counter()
        self.rounds = 0
        self.seconds = 1.0  # that a run takes
        self.common = [*SMALL, f"--dataset={folder}/data", "--init_from=auto"]

    def prepare(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            build_dataset(self.folder / "data")
        for name, settings in SETTINGS.items():
            begin = time.monotonic()
            job = run([*self.common, *settings, f"--out_dir={self.folder}/straight/{name}"], self.folder / "jobs")
            assert job.statuses == [0], job.text()
            self.seconds = time.monotonic() - begin  # of the last, with everything warm

    def round(self, number: int) -> None:
        """One run, killed one to five times."""
        rng = random.Random(f"{self.seed} {number}")
        ranks = rng.choice((1, 1, 1, 2))
        name = rng.choice(list(SETTINGS)) if ranks == 1 else "plain"  # other dtypes round otherwise on two ranks
        out_dir = self.folder / f"run-{number}"
        arguments = [*self.common, *SETTINGS[name], f"--out_dir={out_dir}"]
        for _ in range(rng.randint(1, 5)):
            kind = rng.choices(("place", "moment", "command"), (5, 3, 1))[0]
            {"place": self.at_place, "moment": self.at_moment, "command": self.from_nothing}[kind](arguments, ranks, rng)
        job = run(arguments, self.folder / "jobs", ranks=ranks)
        assert job.statuses == [0] * ranks, f"{job.statuses}\n{job.text()}"
        assert_same_run(out_dir, self.folder / "straight" / name, exactly=ranks == 1)
        shutil.rmtree(out_dir)
        self.rounds += 1

    def _count(self, place: str, ranks: int) -> None:
        self.counts[place, "1 rank" if ranks == 1 else f"{ranks} ranks"] += 1

    def at_place(self, arguments: list[str], ranks: int, rng: random.Random) -> None:
        rank = rng.randrange(ranks)
        place = rng.choice([place for place in PLACES if rank == 0 or place not in MASTER_ONLY])
        count = 1 if place in ("start-up", "build") else rng.randint(1, 12)
        job = run(arguments, self.folder / "jobs", ranks=ranks, fault=Fault("kill", place, count, rank))
        if job.statuses[rank] == -signal.SIGKILL:
            self._count(place, ranks)
            # 0: rank 0 was killed in the last save, which the others, done already, do not wait for.
            ends = (0, 1) if place in MASTER_ONLY else (1,)
            others = [status for other, status in enumerate(job.statuses) if other != rank]
            assert all(status in ends for status in others), f"{place}: {job.statuses}\n{job.text()}"
        else:  # the run did not come there so often
            assert set(job.statuses) == {0}, f"{place}: {job.statuses}\n{job.text()}"

    def at_moment(self, arguments: list[str], ranks: int, rng: random.Random) -> None:
        job = Job(arguments, self.folder / "jobs", ranks=ranks)
        time.sleep(rng.uniform(0, 1.2 * ranks * self.seconds))
        alive = [rank for rank, process in enumerate(job.processes) if process.exitcode is None]
        place = job.place()
        job.kill([rng.choice(alive)] if alive and rng.random() < 0.3 else None)
        statuses = job.wait()
        if -signal.SIGKILL in statuses:
            self._count(f"any moment: {place}", ranks)
        assert set(statuses) <= {-signal.SIGKILL, 0, 1}, f"{place}: {statuses}\n{job.text()}"

    def from_nothing(self, arguments: list[str], ranks: int, rng: random.Random) -> None:
        """train.py, or torchrun, as a command: killed from its first moment on, with everything it has started."""
        process = launch(arguments, ranks=0 if ranks == 1 else ranks)
        time.sleep(rng.uniform(0.1, 5 if ranks == 1 else 9))
        ended = process.poll()
        text = kill_group(process)
        assert ended in (None, 0), text
        if ended is None:
            self._count("a command's first seconds", ranks)
        out_dir = arguments[-1].partition("=")[2]
        assert processes_of(out_dir) == []


def describe(soak: Soak) -> str:
    places = dict.fromkeys(place for place, _ in sorted(soak.counts))
    rows = [f"  {place:30} {soak.counts[place, '1 rank']:5} {soak.counts[place, '2 ranks']:7}" for place in places]
    return "\n".join([f"  {'killed in':30} {'1 rank':>5} {'2 ranks':>7}", *rows])


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no new round after so many")
    try:
        arguments = parser.parse_args(argv)
        if arguments.kills < 1 or not arguments.minutes > 0:
            raise InputError("--kills and --minutes want a number above 0")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name), arguments.seed)
        soak.prepare()
        bar = tqdm(total=arguments.kills, desc="kills", unit="kill", file=sys.stdout)
        number = 0
        while (done := soak.counts.total()) < arguments.kills and time.monotonic() < deadline:
            try:
                soak.round(number)
            except AssertionError as error:
                bar.close()
                print(describe(soak))
                print(f"error: round {number} of --seed={arguments.seed}: {error}", file=sys.stderr)
                return 1
            number += 1
            bar.update(soak.counts.total() - done)
        bar.close()
        print(f"{soak.counts.total()} kills in {soak.rounds} runs, each then equal to the undisturbed one; seed {arguments.seed}")
        print(describe(soak))
        if soak.counts.total() < arguments.kills:
            print(f"error: --minutes={arguments.minutes:g} were over before {arguments.kills} kills", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

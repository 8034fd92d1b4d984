"""Broken input by the thousand: each case ends in success or in one clean line, within seconds and a bounded memory.

    python -m tests.faults.fuzz --cases=10000 --seed=0       # counts by kind of input; exit 1 at the first fault, with its seed

Everything runs in this process. A case is a function of (seed, kind, number), so that a fault can be made again alone.
"""

import contextlib
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import checkpoint
import configurator
import tracker
import train
from command_line import ArgumentParser, InputError
from configurator import Config
from data.shards import META, open_dataset
from data.verify import inspect, verify
from distributed import Ranks
from model import GPT
from scripts import compare, experiments, runs
from tests.faults.driver import ROOT, SMALL

SECONDS = 10  # that a case may take; the slowest takes a tenth of one on a quiet machine
MEMORY = 3 << 29  # bytes that a case may ask for beyond what the process has

PIECES = [
    "seed", "n_layer", "n_embd", "max_iters", "learning_rate", "out_dir", "attention", "grid", "base", "tiny", "figure", "=",
    "==", ":=", "**", "*", "//", "%", "-", "(", ")", "[", "]", "{", "}", "'", '"', "\\", "#", ":", ";", ",", ".", "@", "\n",
    "\t", "\0", "0", "7", "1e6", "1e400", "-1", "0x", "9" * 30, "10**9", "2**10**9", "9**9**9", "1j", "None", "True", "NaN",
    "null", "Infinity", "'xsa'", "f'{seed}'", "b'x'", "lambda: 1", "import os", "__import__('os')", "seed.__class__",
    "().__class__.__mro__", "'{0.__class__}'.format(seed)", "(x := 1)", "[i for i in range(10**9)]", "'a' * 10**9",
    "[0] * 10**9", "...", "é", "\u2028", "\ufeff", "\ud800", "(" * 3000, "[" * 3000, "-" * 3000, "{" * 3000, '{"a":' * 3000,
    "1" * 6000,
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.5, float("nan"), float("inf"), "", "x", "a\nb", "\0", "..",
    "/etc/passwd", "\ud800", "x" * 10_000, [], [[]], [0] * 1000, {}, {"a": {}}, {"": None}, "train", "val", "gpt2", "sa",
]


class Fault(AssertionError):
    """A case that ended otherwise than it should."""


class Hang(BaseException):
    """A case that took too long."""


def mutate_text(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice((0, 0, 1, 2, 5, 20, 200)))
        text = text[:start] + "".join(rng.choices(PIECES, k=rng.choice((0, 1, 1, 2)))) + text[stop:]
    return text


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 1, 4, 8, 64, 4096))
        match rng.randrange(6):
            case 0 if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + rng.randbytes(size) + data[at + size :]
            case 3:
                data = data[:at] + data[at + size :]
            case 4:
                data = data[:at] + rng.choice((b"\xff", b"\0", b"\x7f")) * size + data[at + size :]
            case _:
                data = data[:at] + data[at : at + size] * 2 + data[at + size :]
    return data


def mutate_value(value: Any, rng: random.Random, others: list[Any] = VALUES) -> Any:  # noqa: B006 - read alone
    """The same nest of dictionaries and lists with one place changed: another value, one more key, one less."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return value | {rng.choice(["x", "", 5, "step"]): rng.choice(others)}
            case _:
                return value | {key: mutate_value(value[key], rng, others)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(([mutate_value(value[at], rng, others)], [], [value[at]] * 2)) + value[at + 1 :]
    return rng.choice(others)


class Fuzzer:
    """What the cases start from: a data set and a run's folder, both small."""

    def __init__(self, folder: Path, dataset: Path, run: Path):
        self.folder, self.dataset, self.run = folder, dataset, run
        self.configs = [path.read_text() for path in sorted((ROOT / "config").glob("*.py"))]
        self.configs += [f"{f.name} = {f.default!r}\n" for f in fields(Config)]
        self.experiments = [path.read_text() for path in sorted((ROOT / "config" / "experiments").glob("*.py"))]
        self.settings = [f"--{f.name}={f.default}" for f in fields(Config)]
        self.checkpoint = max(run.glob("ckpt_*.pt"))
        self.state = torch.load(self.checkpoint, weights_only=True)
        self.config = configurator.load([*SMALL, f"--dataset={dataset}", f"--out_dir={folder}/out"])
        self.fingerprint = open_dataset(dataset).fingerprint
        self.kinds: dict[str, Callable[[random.Random], Any]] = {
            "config file": self.config_file, "command line": self.command_line, "experiment file": self.experiment_file,
            "meta.json": self.meta, "shard": self.shard, "checkpoint bytes": self.checkpoint_bytes,
            "checkpoint pickle": self.checkpoint_pickle, "checkpoint state": self.checkpoint_state,
            "metrics.jsonl": self.metrics, "config.json": self.config_json,
        }

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return path

    def config_file(self, rng: random.Random) -> None:
        path = self.write("config.py", mutate_text(rng.choice(self.configs), rng))
        configurator.load([str(path)])

    def command_line(self, rng: random.Random) -> None:
        argv = [mutate_text(argument, rng) if rng.random() < 0.7 else argument for argument in rng.sample(self.settings, 2)]
        with contextlib.suppress(SystemExit):  # --help
            configurator.load(argv)
            parser = ArgumentParser(prog="fuzz")
            for argument in self.settings:
                parser.add_argument(argument.partition("=")[0])
            parser.parse_args(argv)

    def experiment_file(self, rng: random.Random) -> None:
        path = self.write("experiment.py", mutate_text(rng.choice(self.experiments), rng))
        experiments.read(str(path), rng.choice(experiments.SCALES)).cells([])

    def _look_at_data(self, folder: Path) -> None:
        """All three commands look, and only inspect and training may refuse: verify names every fault."""
        faults, _ = verify(folder)
        for look in (open_dataset, inspect):
            with contextlib.suppress(InputError):
                look(folder)
        if faults:
            raise InputError(faults[0])

    def _copy_data(self) -> Path:
        folder = self.folder / "data"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.dataset, folder)
        return folder

    def meta(self, rng: random.Random) -> None:
        folder = self._copy_data()
        text = (folder / META).read_text()
        text = mutate_text(text, rng) if rng.random() < 0.4 else json.dumps(mutate_value(json.loads(text), rng))
        (folder / META).write_bytes(text.encode("utf-8", "surrogatepass"))
        self._look_at_data(folder)

    def shard(self, rng: random.Random) -> None:
        folder = self._copy_data()
        path = rng.choice(sorted(folder.glob("*.bin")))
        data = path.read_bytes()
        data = mutate_bytes(data[:1024], rng) + data[1024:] if rng.random() < 0.7 else mutate_bytes(data, rng)
        path.write_bytes(data)
        if rng.random() < 0.5:
            (folder / META).unlink()
        if rng.random() < 0.1:
            path.rename(folder / rng.choice(["train.bin", "val.bin", "x_val_.bin", "x_train_\n.bin"]))
        self._look_at_data(folder)

    def _read_checkpoint(self, path: Path) -> None:
        with contextlib.suppress(ValueError):  # as documented
            GPT.from_checkpoint(path)
        state = checkpoint.load(path)
        checkpoint.check(path, state, self.config, self.fingerprint)
        run = train.Run(self.config, Ranks(0, 1, torch.device("cpu")))
        random_state = torch.get_rng_state()
        try:
            run._build(state)
        finally:
            torch.set_rng_state(random_state)

    def checkpoint_bytes(self, rng: random.Random) -> None:
        data = self.checkpoint.read_bytes()
        cut = 4096 if rng.random() < 0.3 else len(data) - 30_000 if rng.random() < 0.6 else 0  # the pickle, the zip's directory
        data = mutate_bytes(data[:cut], rng) + data[cut:] if cut == 4096 else data[:cut] + mutate_bytes(data[cut:], rng)
        path = self.write("ckpt_00000012.pt", data)
        if (fault := checkpoint.damage(path)) is not None:
            with contextlib.suppress(InputError):
                self._read_checkpoint(path)
            raise InputError(fault)
        self._read_checkpoint(path)

    def checkpoint_pickle(self, rng: random.Random) -> None:
        """The pickle inside changed and the archive's checksums right."""
        path = self.folder / "ckpt_00000012.pt"
        with zipfile.ZipFile(self.checkpoint) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                data = old.read(name)
                new.writestr(name, mutate_bytes(data, rng) if name.endswith("data.pkl") else data)
        self._read_checkpoint(path)

    def checkpoint_state(self, rng: random.Random) -> None:
        """A file that is sound, with something else in one place."""
        others = [*VALUES, torch.zeros(0), torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), torch.tensor(1.0)]
        path = self.folder / "ckpt_00000012.pt"
        try:
            torch.save(mutate_value(self.state, rng, others), path)
        except Exception:  # what cannot be saved is no case
            return
        self._read_checkpoint(path)

    def _copy_run(self) -> Path:
        folder = self.folder / "run"
        folder.mkdir(exist_ok=True)
        for name in ("config.json", "metrics.jsonl"):
            shutil.copyfile(self.run / name, folder / name)
        return folder

    def _look_at_run(self, folder: Path) -> None:
        wanted = configurator.as_dict(self.config)
        runs.state_of(folder, wanted, {"attention"})
        runs.last_step(folder)
        variants = compare.group([runs.read_run(folder), runs.read_run(self.run)])
        compare.report(variants, min(max(run.train) for variant in variants for run in variant.runs), [])
        compare.title(variants)

    def metrics(self, rng: random.Random) -> None:
        folder = self._copy_run()
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        at = rng.randrange(len(lines))
        changed = mutate_text(lines[at], rng) if rng.random() < 0.5 else json.dumps(mutate_value(json.loads(lines[at]), rng))
        text = "\n".join([*lines[:at], changed, *lines[at + 1 :]]) + rng.choice(("\n", "\n", ""))
        path = self.write("run/metrics.jsonl", text)
        whole = path.read_bytes()
        tracker.cut_back(path, 6, True)
        assert all(json.loads(line)["step"] <= 6 for line in path.read_text(errors="replace").split("\n")[:-1])
        path.write_bytes(whole)
        self._look_at_run(folder)

    def config_json(self, rng: random.Random) -> None:
        folder = self._copy_run()
        text = (self.run / "config.json").read_text()
        text = mutate_text(text, rng) if rng.random() < 0.4 else json.dumps(mutate_value(json.loads(text), rng))
        self.write("run/config.json", text)
        self._look_at_run(folder)


def case(fuzzer: Fuzzer, kind: str, seed: int, number: int) -> str:
    """One case: "accepted" or "refused". Raises Fault."""
    rng = random.Random(f"{seed} {kind} {number}")
    name = f"{kind}, seed {seed}, number {number}"

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    begin = time.monotonic()
    try:
        fuzzer.kinds[kind](rng)
        outcome = "accepted"
    except InputError as error:
        if not str(error) or "\n" in str(error):
            raise Fault(f"{name}: not one line: {str(error)!r:.300}") from error
        outcome = "refused"
    except Hang as error:
        raise Fault(f"{name}: took more than {SECONDS} s") from error
    except Exception as error:
        raise Fault(f"{name}: {type(error).__name__}: {error!s:.300}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - begin > SECONDS:
        raise Fault(f"{name}: took {time.monotonic() - begin:.1f} s")
    return outcome


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """No more address space than there is now and MEMORY."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def cases(fuzzer: Fuzzer, n_cases: int, seed: int, go_on: bool = False) -> tuple[Counter[tuple[str, str]], list[Fault]]:
    """`n_cases`, all kinds in turn: counts by kind and outcome, and the faults, at most the first unless `go_on`."""
    counts: Counter[tuple[str, str]] = Counter()
    faults: list[Fault] = []
    kinds = list(fuzzer.kinds)
    bar = tqdm(total=n_cases, desc="fuzz", unit="case", disable=None, file=sys.stdout)
    with warnings.catch_warnings(), bounded_memory():
        warnings.simplefilter("ignore")
        for number in range(n_cases):
            kind = kinds[number % len(kinds)]
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    counts[kind, case(fuzzer, kind, seed, number)] += 1
            except Fault as fault:
                faults.append(fault)
                counts[kind, "FAULT"] += 1
                if not go_on:
                    break
            bar.update()
    bar.close()
    return counts, faults


def describe(counts: Counter[tuple[str, str]]) -> str:
    kinds = dict.fromkeys(kind for kind, _ in counts)
    return "\n".join(f"  {kind:18} {counts[kind, 'accepted']:6,} accepted {counts[kind, 'refused']:6,} refused"
                     + (f" {n} FAULTS" if (n := counts[kind, "FAULT"]) else "") for kind in kinds)


def main(argv: list[str]) -> int:
    from tests.faults.conftest import build_dataset

    parser = ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--go_on", action="store_true", help="report every fault instead of the first")
    try:
        arguments = parser.parse_args(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(name)
        with contextlib.redirect_stdout(io.StringIO()):
            build_dataset(folder / "source", n_documents=12)
            assert train.main([*SMALL, f"--dataset={folder}/source", f"--out_dir={folder}/straight"]) == 0
        fuzzer = Fuzzer(folder, folder / "source", folder / "straight")
        counts, faults = cases(fuzzer, arguments.cases, arguments.seed, arguments.go_on)
    print(describe(counts))
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs that are disturbed: starts them, waits for them with a limit, and compares them with a run that was left alone.

Every rank is a process of its own, killed by real signals. They are forked from a server that has loaded torch once, so that
a start takes a fifth of a second; `launch` starts a command from nothing, with torchrun where ranks are asked for.
"""

import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import inject
from tests.faults.inject import ROOT, Fault

SMALL = [
    "--vocab_size=257", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--global_batch_size=8",
    "--micro_batch_size=2", "--max_iters=12", "--lr_decay_iters=12", "--warmup_iters=3", "--learning_rate=1e-2",
    "--eval_interval=4", "--eval_tokens=608", "--log_interval=1", "--save_interval=3", "--device=cpu", "--attention=xsa",
    "--dist_timeout=8",
]
LIMIT = 90  # seconds that a run may take on a busy machine: it takes one

soak = pytest.mark.skipif("SOAK" not in os.environ, reason="takes long; scripts/soak.sh runs it")


class Job:
    """The processes of a run, one a rank."""

    def __init__(self, argv: list[str], folder: Path, *, ranks: int = 1, fault: Fault | None = None,
                 environment: dict[str, str] | None = None, prepare: Callable[[], None] | None = None):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("output-*-0")))
        self.outputs = [folder / f"output-{number}-{rank}" for rank in range(ranks)]
        self.notes = [folder / f"place-{number}-{rank}" for rank in range(ranks)]
        places = [{}] if ranks == 1 else [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port)} for port in [free_port()] for rank in range(ranks)]
        self.processes = [
            _server().Process(target=inject.main, daemon=True, args=(
                argv, (environment or {}) | place, str(output), str(note), fault, prepare))
            for place, output, note in zip(places, self.outputs, self.notes, strict=True)]
        for process in self.processes:
            process.start()

    def wait(self, limit: float = LIMIT) -> list[int]:
        """Exit statuses, a signal's negative. AssertionError, and all is killed, where it takes longer than `limit` seconds."""
        deadline = time.monotonic() + limit
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        statuses = [process.exitcode for process in self.processes]
        self.kill()
        assert not late, f"ranks {late} were still there after {limit} s:\n{self.text()}"
        return statuses

    def kill(self, ranks: list[int] | None = None) -> None:
        """SIGKILL to some ranks or all, at once."""
        chosen = [process for rank, process in enumerate(self.processes) if ranks is None or rank in ranks]
        for process in chosen:
            process.kill()
        for process in chosen:
            process.join()

    def signal(self, number: int, rank: int = 0) -> None:
        os.kill(self.processes[rank].pid, number)

    def place(self, rank: int = 0) -> str:
        """The last place that a rank has passed."""
        return self._note(rank).get("place", "start-up")

    def passed(self, rank: int = 0) -> dict[str, int]:
        """How often a rank has passed each place."""
        return self._note(rank).get("passed", {})

    def _note(self, rank: int) -> dict[str, Any]:
        path = self.notes[rank]
        return json.loads(path.read_text() or "{}") if path.exists() else {}

    def text(self, rank: int | None = None) -> str:
        chosen = self.outputs if rank is None else [self.outputs[rank]]
        return "\n".join(output.read_text() for output in chosen if output.exists())

    def last_line(self, rank: int = 0) -> str:
        return (self.text(rank).strip().splitlines() or [""])[-1]


class ImportFirst:
    """Puts a folder before all that modules are imported from, in a job's process."""

    def __init__(self, folder: str):
        self.folder = folder

    def __call__(self) -> None:
        sys.path.insert(0, self.folder)
        sys.modules.pop("wandb", None)


_context: Any = None


def _server() -> Any:
    global _context
    if _context is None:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, paths)), OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE",
                          PYTHONWARNINGS="ignore::UserWarning:multiprocessing.resource_tracker")  # tqdm's locks, of the killed
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["train", "torch._dynamo", "tests.faults.inject"])
    return _context


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(argv: list[str], folder: Path, *, limit: float = LIMIT, **more: Any) -> Job:
    """A job that has ended; `statuses` are its exit statuses."""
    job = Job(argv, folder, **more)
    job.statuses = job.wait(limit)
    return job


def launch(argv: list[str], *, ranks: int = 0, environment: dict[str, str] | None = None) -> subprocess.Popen:
    """`python train.py`, or torchrun with so many ranks, in a process group of its own."""
    launcher = [sys.executable, "-u"] if not ranks else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.Popen([*launcher, "train.py", *argv], cwd=ROOT, text=True, start_new_session=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}))


def processes_of(text: str) -> list[int]:
    """Processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def kill_group(process: subprocess.Popen) -> str:
    """SIGKILL to a launched command and all that it has started; torchrun's ranks are in sessions of their own."""
    out_dir = next(argument for argument in process.args if argument.startswith("--out_dir="))
    for pid in {process.pid, *processes_of(out_dir)}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return process.communicate()[0]


def await_lines(out_dir: Path, lines: int) -> None:
    """Until the run has written so many metrics."""
    metrics, deadline = out_dir / "metrics.jsonl", time.monotonic() + LIMIT
    while not (metrics.exists() and metrics.read_text().count("\n") >= lines):
        assert time.monotonic() < deadline, f"{out_dir} did not get going"
        time.sleep(0.05)


# --- what a run has come to ---------------------------------------------------------------------------------------------------


def curve(out_dir: Path) -> list[tuple]:
    """What two equal runs have in common: everything in metrics.jsonl but times and memory."""
    records = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    passing = ("step_ms", "data_ms", "tokens_per_s", "mfu", "peak_memory_gb")
    return [tuple((key, value) for key, value in record.items() if key not in passing) for record in records]


def assert_same_run(out_dir: Path, straight: Path, exactly: bool = True) -> None:
    """The disturbed run has the straight one's metrics, last weights and files; `exactly`, or within fp32 rounding."""
    ours, theirs = curve(out_dir), curve(straight)
    if exactly:
        assert ours == theirs, differences(ours, theirs)
    else:
        assert [key_of(line) for line in ours] == [key_of(line) for line in theirs]
        for a, b in zip(map(dict, ours), map(dict, theirs), strict=True):
            for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 0)):
                assert key not in a or math.isclose(a[key], b[key], rel_tol=tolerance), (key, a, b)
    last = max(path.name for path in straight.glob("ckpt_*.pt"))
    a, b = (torch.load(folder / last, weights_only=True) for folder in (out_dir, straight))
    assert a["step"] == b["step"] and a["best_val_loss"] is not None
    if exactly:
        assert all(torch.equal(a["model"][name], weight) for name, weight in b["model"].items())
    present, wanted = ({path.name for path in folder.iterdir() if path.name != "wandb"} for folder in (out_dir, straight))
    assert not [name for name in present if name.startswith(".")], f"left over: {sorted(present)}"
    present, wanted = ({name for name in names if not name.startswith("ckpt_")} for names in (present, wanted))
    assert present == wanted, (sorted(present), sorted(wanted))


def key_of(line: tuple) -> tuple:
    return tuple(pair for pair in line if pair[0] in ("step", "tokens", "split", "bad_steps"))


def differences(ours: list[tuple], theirs: list[tuple]) -> str:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"line {number + 1}: {dict(a)} and {dict(b)}"
    return f"{len(ours)} and {len(theirs)} lines"

"""Runs train.py as `python train.py` would, with a fault at a named place. Started by driver.py, in a process of its own."""

import io
import json
import os
import resource
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import checkpoint
import data.shards
import tracker
from model import GPT

ROOT = Path(__file__).parent.parent.parent
# Where a fault can be put: each is passed many times in a run.
PLACES = ("start-up", "build", "prefetch", "step", "optimizer", "evaluation", "metrics", "checkpoint write", "fsync", "rename",
          "removal")


@dataclass(frozen=True)
class Fault:
    """What happens when a rank comes to a place for the `count`-th time, and once the checkpoint `saved` is the marked one, where
    that is given: it may be written while training goes on. What: kill, term (twice in a row), hang, raise, memory, nan (the
    loss, at "step" alone), poison (a weight, there too), wait (four seconds), clock (the wall clock goes back by a day at every
    look at it)."""

    what: str
    place: str
    count: int = 1
    rank: int = 0
    saved: str = ""


class Injector:
    """Counts what passes each place, notes them for the driver, and lets the fault happen."""

    def __init__(self, fault: Fault | None, note: str):
        self.fault = fault if fault and fault.rank == int(os.environ.get("RANK", 0)) else None
        self.passed: Counter[str] = Counter()
        self.note = os.open(note, os.O_WRONLY | os.O_CREAT)

    def at(self, place: str) -> bool:
        """Whether the fault is due here."""
        self.passed[place] += 1
        os.pwrite(self.note, json.dumps({"place": place, "passed": self.passed}).ljust(400).encode(), 0)
        fault = self.fault
        return fault is not None and place == fault.place and self.passed[place] == fault.count

    def act(self) -> None:
        (marker,) = (Path(argument.partition("=")[2]) / "latest" for argument in sys.argv if argument.startswith("--out_dir="))
        while self.fault.saved and not (marker.exists() and self.fault.saved in marker.read_text()):
            time.sleep(0.005)
        match self.fault.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError("had enough")
            case "memory":
                resource.setrlimit(resource.RLIMIT_AS, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, -1))
                torch.empty(1 << 28).fill_(1)
            case "wait":
                time.sleep(4)

    def around(self, owner: Any, name: str, place: str, thread: str | None = None) -> None:
        """Puts a place before a function, where the thread of that name calls it."""
        function = getattr(owner, name)

        def call(*arguments: Any, **more: Any) -> Any:
            if thread in (None, threading.current_thread().name) and self.at(place):
                self.act()
            return function(*arguments, **more)

        setattr(owner, name, call)

    def install(self) -> None:
        self.around(data.shards, "open_dataset", "start-up")
        self.around(GPT, "__init__", "build")
        self.around(data.shards.TokenStream, "read", "prefetch", thread="loader")
        self.around(torch.optim.AdamW, "step", "optimizer")
        self.around(os, "fsync", "fsync")
        self.around(os, "replace", "rename")
        self.around(Path, "unlink", "removal")
        save, append, forward = torch.save, tracker._append, GPT.forward

        def half_saved(state: Any, file: Any) -> None:
            if self.at("checkpoint write"):
                whole = io.BytesIO()
                save(state, whole)
                file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
                file.flush()
                self.act()
                (file._file if isinstance(file, checkpoint.Unhurried) else file).seek(0)
            save(state, file)

        def half_appended(file: Any, line: str) -> None:
            if self.at("metrics"):
                file.write(line[: len(line) // 2])
                file.flush()
                self.act()
                line = line[len(line) // 2 :]
            append(file, line)

        def looked_at(model: GPT, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            due = self.at("step" if model.training else "evaluation")
            if due and self.fault.what == "poison":
                with torch.no_grad():
                    next(model.parameters())[0] = float("nan")
            elif due:
                self.act()
            logits, loss = forward(model, idx, targets)
            return logits, loss * float("nan") if due and self.fault.what == "nan" else loss

        torch.save, tracker._append, GPT.forward = half_saved, half_appended, looked_at
        if self.fault and self.fault.what == "clock":
            begin, looks = time.time(), iter(range(10**9))
            time.time = lambda: begin - 86_400 * next(looks)


def main(argv: list[str], environment: dict[str, str], output: str, note: str, fault: Fault | None, prepare: Any) -> None:
    """What the process does: stdout and stderr into `output`, then train.py; `prepare` (picklable) is called before."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.update(environment)
    os.chdir(ROOT)
    assert checkpoint.os is os  # what is replaced below is what the product calls
    Injector(fault, note).install()
    if prepare is not None:
        prepare()
    sys.argv = ["train.py", *argv]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

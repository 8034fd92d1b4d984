"""What a run tells: console with progress bar, log.txt, metrics.jsonl, and wandb by flag.

metrics.jsonl is the record of a run. wandb gets the same numbers and may fail at any time without harm.
"""

import json
import math
import os
import platform
import re
import resource
import secrets
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import list_checkpoints, write_aside
from command_line import InputError
from configurator import Config

# Dense bf16 peak in FLOP/s and memory in GB (1e9 bytes) by the words that torch.cuda.get_device_name contains; vendors' data
# sheets. More specific names stand first: "H100 PCIe" before "H100".
GPUS: dict[str, tuple[float, float]] = {
    "GB200": (2500e12, 186),
    "B200": (2250e12, 180),
    "GH200": (989e12, 96),
    "H200 NVL": (835e12, 141),
    "H200": (989e12, 141),
    "H100 PCIe": (756e12, 80),
    "H100 NVL": (835e12, 94),
    "H100": (989e12, 80),
    "H800": (989e12, 80),
    "A100-SXM4-40GB": (312e12, 40),
    "A100-PCIE-40GB": (312e12, 40),
    "A100": (312e12, 80),
    "A800": (312e12, 80),
    "L40S": (362e12, 48),
    "L40": (181e12, 48),
    "L4": (121e12, 24),
    "A10G": (70e12, 24),
    "A10": (125e12, 24),
    "A40": (150e12, 48),
    "A6000": (155e12, 48),
    "RTX 5090": (210e12, 32),
    "RTX 4090": (165e12, 24),
    "RTX 3090": (71e12, 24),
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of a GPU by its name, None for one that the table does not know."""
    if re.search(r"\b(MIG|Laptop|Ti|D)\b", device_name, re.IGNORECASE):  # a slice of a GPU, or a lesser one of the same name
        return None
    whole_words = ((flops, rf"\b{name}\b") for name, (flops, _) in GPUS.items())  # RTX A4000 is no A40
    return next((flops for flops, pattern in whole_words if re.search(pattern, device_name, re.IGNORECASE)), None)


class Clock:
    """Seconds per training step since the last reading, without what ran while it was paused."""

    def __init__(self):
        self.steps, self._start = 0, time.perf_counter()

    @contextmanager
    def paused(self):
        begin = time.perf_counter()
        yield
        self._start += time.perf_counter() - begin

    def read(self) -> float:
        """Seconds per step; starts anew. `steps` is the caller's to count."""
        now = time.perf_counter()
        seconds = (now - self._start) / self.steps
        self.steps, self._start = 0, now
        return seconds


class Profile:
    """torch's profiler over PROFILED_STEPS training steps, or as many as there are, after step config.profile: profile_trace.json
    for chrome://tracing or Perfetto and profile.txt, operators by their own time and by the memory they take, in out_dir. Off
    where that is 0. These steps are slower than others, and so is the line of metrics.jsonl that they are in.

    What a run does between these steps is in it too, and profile.txt names it: torch's profiler, halted on a GPU, mixes up the
    tracks of its trace."""

    def __init__(self, config: Config, device: torch.device, on: bool = True):
        self.first, self._out_dir, self._device = config.profile if on else 0, Path(config.out_dir), device
        self._last = min(self.first + PROFILED_STEPS, config.max_iters)
        self._every = {"evaluation": config.eval_interval, "saving": config.save_interval,
                       "diagnostics": config.diagnostics_interval}
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """To be called with the number of completed steps before each step."""
        if self.first and step == self.first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
            self._profiler.start()

    def after(self, step: int) -> str | None:
        """And after it; what to say when the files are written."""
        return None if self._profiler is None or step < self._last else self._write(step)

    def close(self, step: int) -> None:
        """Writes what there is of a run that ends in between."""
        if self._profiler is not None:
            self._write(step, ["what the run's end took"])

    def _between(self, step: int) -> list[str]:
        """What else a run has done after step `first` and before the end of `step`."""
        found = {what: [str(i) for i in range(self.first + 1, step) if every and i % every == 0]
                 for what, every in self._every.items()}
        return [f"{what} at step {' and '.join(steps)}" for what, steps in found.items() if steps]

    def _write(self, step: int, more: list[str] | None = None) -> str:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        trace = self._out_dir / "profile_trace.json"
        profiler.export_chrome_trace(str(trace.with_suffix(".tmp")))
        os.replace(trace.with_suffix(".tmp"), trace)
        where = self._device.type
        averages = profiler.key_averages()
        tables = (averages.table(sort_by=f"self_{where}_{what}", row_limit=40, max_name_column_width=60)
                  for what in ("time_total", "memory_usage"))
        head = f"steps {self.first + 1} to {step} on {device_name(self._device)}, torch {torch.__version__}; all steps together"
        if between := self._between(step) + (more or []):
            head += f"\nNot of these steps, but in these numbers too: {', '.join(between)}"
        write_aside(self._out_dir / "profile.txt", "\n\n".join((head, *tables)) + "\n")
        return f"profile of steps {self.first + 1} to {step}: {self._out_dir / 'profile.txt'}, {trace}"


def seconds_since_start() -> float | None:
    """Since this process was started, Python's own start and all imports included; None where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_gb(device: torch.device) -> float:
    """Largest use so far in GB (1e9 bytes): of the GPU by tensors, elsewhere of main memory by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({torch.get_num_threads()} threads)"


def environment(device: torch.device) -> dict[str, Any]:
    """What a run ran on, for config.json."""
    return {
        "git_commit": git_commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                     "cuda": torch.version.cuda},
        "hardware": {"device": device_name(device), "cpus": os.cpu_count(), "machine": platform.machine()},
        "command": sys.argv,
    }


def git_commit() -> str | None:
    """The commit of this code, with "-dirty" where tracked files differ from it; None outside git."""
    def git(*arguments: str) -> str:
        # Without optional locks: to refresh the index would make a commit fail that someone makes at that moment. `git describe
        # --dirty` refreshes it all the same (git 2.39).
        command = ["git", "--no-optional-locks", *arguments]
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30, check=True).stdout

    try:
        commit = git("rev-parse", "--verify", "HEAD").strip()
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


_CONSOLE_SECONDS = 5.0
# What wandb says of itself on the console would stand after a run's last words; its own limit for finding a server is 90 s.
_WANDB_DEFAULTS = {"WANDB_SILENT": "true", "WANDB_INIT_TIMEOUT": "30"}
PROFILED_STEPS = 5


class Silent:
    """The tracker of every rank but the first."""

    wandb_id: str | None = None

    def say(self, text: str, often: bool = False) -> None: ...

    def log(self, record: dict[str, Any]) -> None: ...

    def advance(self, steps: int = 1) -> None: ...

    def sync(self) -> None: ...

    def close(self, failed: bool = False) -> None: ...


class Tracker(Silent):
    """Opens the run's files in config.out_dir. Raises OSError, and InputError for a pipe in the place of one, on which the run
    would wait for someone who reads it. `step` is the one that the run continues from and `evaluated` whether its
    evaluation is done: later lines of metrics.jsonl, which the run will write again, are cut off."""

    def __init__(self, config: Config, step: int, evaluated: bool, wandb_id: str | None, info: dict[str, Any]):
        out_dir = Path(config.out_dir)
        path = out_dir / "metrics.jsonl"
        for file in (path, out_dir / "log.txt"):
            if file.is_fifo():
                raise InputError(f"{file} is a pipe, wanted a file")
        self._log = open(out_dir / "log.txt", "a", encoding="utf-8")
        lost = cut_back(path, step, evaluated) if path.exists() else "is not there"
        branched = not list_checkpoints(out_dir)  # from a checkpoint elsewhere, where its record is
        self._metrics = open(path, "a", encoding="utf-8")
        write_aside(out_dir / "config.json", json.dumps(info, indent=2) + "\n")
        self._bar = tqdm(total=config.max_iters, initial=step, unit="step", disable=None, dynamic_ncols=True, smoothing=0.05)
        self._said = -math.inf
        if lost and step and not branched:
            self.say(f"warning: {path} {lost}: the record of the {step:,} steps so far is not complete")
        self.wandb_id = wandb_id
        self._wandb = self._start_wandb(config, info) if config.wandb_log else None

    def say(self, text: str, often: bool = False) -> None:
        """To log.txt and, above the progress bar, to the console; what is said often goes there every few seconds only. A
        console that is gone (`| head`, a terminal closed) does not end the run, and least of all before the checkpoint that
        its SIGHUP asks for."""
        _append(self._log, text)
        if often:
            if time.perf_counter() - self._said < _CONSOLE_SECONDS:
                return
            self._said = time.perf_counter()
        try:
            tqdm.write(text)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # what is left in the old one's buffer would fail again when Python exits

    def log(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl; the same numbers to wandb, those of a list over layers one by one. NaN and infinity, which
        JSON does not have, become null."""
        record = {key: list(map(_finite, value)) if isinstance(value, list) else _finite(value) for key, value in record.items()}
        _append(self._metrics, json.dumps(record))
        if self._wandb is not None:
            split, flat = record.pop("split"), {}
            for key, value in record.items():
                name = key if key in ("step", "tokens") else f"{split}/{key}"
                flat |= {f"{name}/{i}": one for i, one in enumerate(value)} if isinstance(value, list) else {name: value}
            named = {name: value for name, value in flat.items() if value is not None and not isinstance(value, str)}
            try:
                self._wandb.log(named)
            except Exception as error:
                self.say(f"wandb: logging failed ({_brief(error)}); the run goes on with metrics.jsonl alone")
                self._wandb = None

    def advance(self, steps: int = 1) -> None:
        self._bar.update(steps)

    def sync(self) -> None:
        """Puts metrics.jsonl on the disk, so that a checkpoint never outlives the lines before it."""
        os.fsync(self._metrics.fileno())

    def close(self, failed: bool = False) -> None:
        self._bar.close()
        if self._wandb is not None:
            try:
                self._wandb.finish(exit_code=int(failed))
            except Exception as error:
                self.say(f"wandb: closing failed ({_brief(error)})")
        for file in (self._metrics, self._log):
            with suppress(OSError):  # every line was flushed, or its failure raised, when it was written
                file.close()

    def _start_wandb(self, config: Config, info: dict[str, Any]):
        """A wandb run, offline where there is no login or no way to the server, None where wandb does not work at all."""
        self.wandb_id = self.wandb_id or secrets.token_hex(4)
        shape = f"{config.n_layer}x{config.n_embd}"
        dataset = Path(config.dataset).resolve().name
        try:
            import wandb

            os.environ.update(_WANDB_DEFAULTS | os.environ)
            arguments = dict(
                project=config.wandb_project,
                name=config.wandb_run_name or Path(config.out_dir).resolve().name,
                group=config.wandb_group or f"{dataset}-{shape}",
                tags=[config.attention, shape, dataset[:64]],  # wandb refuses longer ones
                id=self.wandb_id,
                resume="allow",
                dir=config.out_dir,
                config=info["config"] | {key: value for key, value in info.items() if key != "config"},
            )
            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
            try:
                run = wandb.init(mode=mode, **arguments)
            except Exception as error:
                if mode != "online":
                    raise
                self.say(f"wandb: no way to the server ({_brief(error)}); logging offline")
                wandb.teardown()  # its service holds the run that it could not begin, and with it the id
                run = wandb.init(mode="offline", **arguments)
            run.define_metric("step")
            run.define_metric("tokens")
            run.define_metric("*", step_metric="step")
            if mode == "online" and not run.offline:
                self.say(f"wandb: {run.url}")
            elif run.offline:
                self.say(f"wandb: offline; upload later with `wandb sync {config.out_dir}/wandb/offline-run-*`")
            return run
        except Exception as error:
            self.say(f"wandb: not available ({_brief(error)}); the run goes on with metrics.jsonl alone")
            return None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append(file: TextIO, line: str) -> None:
    try:
        file.write(line + "\n")
        file.flush()
    except OSError as error:
        raise OSError(f"{file.name} cannot be written: {error.strerror or error}") from error


def cut_back(path: Path, step: int, evaluated: bool) -> str:
    """Removes from a metrics file what comes after `step`, what that step's evaluation left where it is still to come, and a
    line that a crash left unfinished. The rest is untouched; the file is replaced whole or not at all. Returns what is wrong with
    it beyond that, "" if nothing."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    kept, junk = [], 0
    for line in text.splitlines(keepends=True):
        try:
            record = json.loads(line)
            of_step = record["split"] in ("train", "diagnostics")  # the step's own, written before its evaluation begins
            late = not record["step"] <= step or (record["step"] == step and not of_step and not evaluated)
        except (ValueError, KeyError, TypeError, RecursionError):
            junk += line.endswith("\n")
            continue
        if not late and line.endswith("\n"):
            kept.append(line)
    if "".join(kept) != text:
        write_aside(path, "".join(kept))
    return f"had {junk:,} lines that are no records" if junk else "" if kept else "had no records"


def _brief(error: Exception) -> str:
    """An error's first line, without what the environment holds as a secret: it goes to log.txt, which people pass on."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", name.upper()):
            text = text.replace(value, f"<{name}>")
    return re.sub(r"(://)[^/@\s]+@", r"\1", text)  # user and password of a proxy

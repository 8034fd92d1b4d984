"""Starting the runs of experiments (scripts.reproduce --launch): here one after the other, or as Slurm's jobs."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from command_line import InputError, StopRequest
from configurator import as_dict
from data.shards import find_folder, open_dataset
from scripts.experiments import Planned
from scripts.runs import State, last_step, other_data, read_info, state_of

GPUS_PER_NODE = 8  # scripts/slurm/train.sbatch's
POLL_SECONDS = 0.2


@dataclass
class Wanted:
    """A run, the experiments that want it, and how far it is."""

    run: Planned
    folder: Path
    state: State
    experiments: list[str] = field(default_factory=list)


def command(wanted: Wanted, launcher: str, n_gpus: int) -> list[str]:
    """What starts, continues or submits the run."""
    train = [*wanted.run.arguments, f"--out_dir={wanted.folder}", "--init_from=auto"]
    if launcher == "local":
        return [sys.executable, "train.py", *train]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_gpus}", "train.py", *train]
    nodes = [f"--nodes={-(-n_gpus // GPUS_PER_NODE)}"]
    if n_gpus < GPUS_PER_NODE:
        nodes += [f"--gpus-per-node={n_gpus}", f"--export=ALL,GPUS_PER_NODE={n_gpus}"]
    named = [f"--job-name={wanted.run.name}", f"--comment={wanted.folder.resolve()}"]
    return ["sbatch", *nodes, *named, "scripts/slurm/train.sbatch", *train]


def shown(argv: list[str]) -> str:
    """A command as one would type it."""
    text = shlex.join(["python", *argv[1:]] if argv[0] == sys.executable else argv)
    return text.replace("python -m torch.distributed.run", "torchrun", 1)


def data_problems(runs: list[Wanted]) -> list[str]:
    """What is wrong with the data sets of unfinished runs; the quick start's is made when it is wanted."""
    problems = []
    for dataset in dict.fromkeys(w.run.config.dataset for w in runs if w.state.kind in ("missing", "unfinished")):
        try:
            find_folder(dataset)
        except InputError as error:
            if dataset != "quickstart":
                problems.append(str(error))
    return problems


def data_fingerprint(dataset: str) -> str | None:
    """Of the data set of that name, None where there is none that can be opened."""
    try:
        return open_dataset(dataset).fingerprint
    except (InputError, OSError):
        return None


def mixed_data(runs: list[Wanted]) -> list[str]:
    """Warnings of runs that were trained on different data under one name; for where the data set itself is not there."""
    found = []
    for wanted in runs:
        if wanted.state.kind in ("finished", "unfinished"):
            found.append((wanted.folder, read_info(wanted.folder)))
    return other_data(found)


def execute(argv: list[str], log: Path, out: Path, stop: StopRequest, watch: Callable[[], None] = lambda: None,
            output: Path | None = None) -> int:
    """Runs a command, noted in out/commands.txt; returns its exit status. What it says is added to `log`, but for its stdout
    where that is to be `output`. A stop request is passed on, and the command's end waited for; `watch` is called meanwhile."""
    log.parent.mkdir(parents=True, exist_ok=True)
    note(argv, out)
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ  # threads that wait without spinning, as in the quick start
    with ExitStack() as files:
        said = files.enter_context(open(log, "a", encoding="utf-8"))
        said.write(f"# {shlex.join(argv)}\n")
        said.flush()
        stdout = files.enter_context(open(output, "w", encoding="utf-8")) if output else said
        # In a session of its own, so that Ctrl-C in a terminal reaches it once, from here.
        process = subprocess.Popen(argv, stdout=stdout, stderr=said, stdin=subprocess.DEVNULL, env=environment,
                                   start_new_session=True, preexec_fn=_stop_with_parent)
        told = False
        while process.poll() is None:
            if stop.signal and not told:
                told = True
                process.send_signal(signal.SIGINT)
            watch()
            time.sleep(POLL_SECONDS)
    return process.returncode


def _stop_with_parent() -> None:
    """A command whose parent is killed is asked to stop, or it would go on unseen beside the next start (Linux: prctl, 1 is
    PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def note(argv: list[str], out: Path) -> None:
    """Keeps the exact command, which a shell takes as it stands, and when it was started."""
    with open(out / "commands.txt", "a", encoding="utf-8") as file:
        file.write(f"{shlex.join(argv)}  # {datetime.now().isoformat(sep=' ', timespec='seconds')}\n")


def last_words(log: Path) -> str:
    """The last line that is not empty of a log."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def prepare_data(runs: list[Wanted], out: Path, stop: StopRequest) -> None:
    """Makes the quick start's data set where a run wants it and it is not there. Raises InputError where another is missing."""
    if problems := data_problems(runs):
        raise InputError(problems[0])
    if not any(w.run.config.dataset == "quickstart" and w.state.kind in ("missing", "unfinished") for w in runs):
        return
    try:
        find_folder("quickstart")
    except InputError:
        print("data: bytes of the quick start's text, data/quickstart", flush=True)
        log = out / "logs" / "data.log"
        if execute([sys.executable, "-m", "data.local"], log, out, stop) and not stop.signal:
            raise InputError(f"python -m data.local failed: {last_words(log)}") from None


def launch(runs: list[Wanted], args: Namespace, stop: StopRequest) -> list[str]:
    """Makes what is not finished, one after the other, or submits it. Returns what failed, by name, with the reason."""
    failures = [f"{w.run.name}: {w.state.text}" for w in runs if w.state.kind == "wrong"]
    todo = [w for w in runs if w.state.kind in ("missing", "unfinished")]
    print(f"{len(runs)} runs: {len(runs) - len(todo) - len(failures)} finished, {len(todo)} to be made, {len(failures)} wrong; "
          f"logs in {args.out / 'logs'}", flush=True)
    for warning in mixed_data(runs):
        print(f"warning: {warning}", file=sys.stderr)
    if args.launch == "slurm":
        return failures + submit(todo, args)
    bar = tqdm(total=sum(w.run.config.max_iters for w in todo), unit="step", disable=None, dynamic_ncols=True, smoothing=0.02)
    before = 0
    for number, wanted in enumerate(todo, 1):
        if stop.signal:
            break
        log, start = args.out / "logs" / f"{wanted.run.name}.log", time.monotonic()
        bar.set_description(wanted.run.name)

        def watch(wanted: Wanted = wanted, before: int = before) -> None:
            bar.update(before + last_step(wanted.folder) - bar.n)

        status = execute(command(wanted, args.launch, args.n_gpus), log, args.out, stop, watch)
        wanted.state = state_of(wanted.folder, as_dict(wanted.run.config), wanted.run.explicit)
        before += wanted.run.config.max_iters
        done = status == 0 and wanted.state.kind == "finished"
        seconds = time.monotonic() - start
        tqdm.write(f"[{number}/{len(todo)}] {wanted.run.name}: {wanted.state.kind}, {wanted.state.text}, {seconds:.0f} s")
        if not done and not stop.signal:
            reason = wanted.state.text if status == 0 else f"exit status {status}: {last_words(log)}"
            failures.append(f"{wanted.run.name}: {reason} ({log})")
            tqdm.write(f"    failed: {reason}")
    bar.close()
    return failures


def submit(todo: list[Wanted], args: Namespace) -> list[str]:
    """Submits jobs for the runs that are not in Slurm's queue already. Returns what failed."""
    queue = subprocess.run(["squeue", "--me", "--noheader", "--format=%k"], capture_output=True, text=True)
    if queue.returncode:
        raise InputError(f"squeue --me failed: {queue.stderr.strip()}")
    waiting, failures = set(queue.stdout.split("\n")), []
    for wanted in todo:
        if str(wanted.folder.resolve()) in waiting:
            print(f"{wanted.run.name}: in the queue already")
            continue
        argv = command(wanted, "slurm", args.n_gpus)
        note(argv, args.out)
        result = subprocess.run(argv, capture_output=True, text=True)
        print(f"{wanted.run.name}: {(result.stdout or result.stderr).strip()}", flush=True)
        if result.returncode:
            failures.append(f"{wanted.run.name}: sbatch exited with {result.returncode}: {result.stderr.strip()}")
    return failures

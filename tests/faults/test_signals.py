"""Stop signals, to one rank, to all, to the launcher, once and twice: a checkpoint, exit status 0, and nothing left running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.driver import LIMIT, ROOT, Fault, Job, assert_same_run, await_lines, curve, launch, processes_of, run, soak
from tests.faults.inject import PLACES

SLOW = ["--max_iters=100000", "--save_interval=100000", "--eval_interval=100000"]


def await_steps(job: Job, steps: int = 3) -> None:
    deadline = time.monotonic() + LIMIT
    while job.passed().get("optimizer", 0) < steps:
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.02)


@pytest.mark.parametrize("ranks, rank, number", [
    (1, 0, signal.SIGTERM), (1, 0, signal.SIGINT), (1, 0, signal.SIGHUP), (1, 0, signal.SIGUSR1), (2, 1, signal.SIGHUP),
    (2, 0, signal.SIGINT), (2, None, signal.SIGTERM),
])
def test_stop_signal_twice_saves_and_goes_on_later(settings, straight, tmp_path, ranks, rank, number):
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    job = Job([*arguments, *SLOW], tmp_path, ranks=ranks)
    await_steps(job)
    for _ in range(2):
        for one in range(ranks) if rank is None else [rank]:
            job.signal(number, one)
        time.sleep(0.002)
    assert job.wait() == [0] * ranks, job.text()
    assert job.last_line().startswith("stopped on request at step"), job.text()
    step = dict(curve(tmp_path / "run")[-1])["step"]
    assert (tmp_path / "run" / f"ckpt_{step:08d}.pt").exists()
    assert run([*arguments, *SLOW, f"--max_iters={step + 2}"], tmp_path).statuses == [0]
    trained = [dict(line)["step"] for line in curve(tmp_path / "run") if dict(line)["split"] == "train"]
    assert trained == list(range(1, step + 3))


@pytest.mark.slow  # starts four commands from nothing
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
def test_stop_signal_while_a_command_is_being_loaded(settings, tmp_path):
    """As soon as there is a handler, which is before a library of torch is in memory."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}\n')
    train = [sys.executable, "-u", "train.py", *settings]
    module = [sys.executable, "-u", "-m"]
    commands = [(train, signal.SIGINT), (train, signal.SIGHUP),
                ([*module, "data.fineweb", f"--input={texts}", "--tokenizer=byte"], signal.SIGINT),
                ([*module, "scripts.reproduce", "presets", "--scale=tiny"], signal.SIGTERM)]
    outs = [tmp_path / str(i) for i in range(len(commands))]
    processes = [subprocess.Popen([*command, f"--out{'_dir' * (command is train)}={out}"], cwd=ROOT, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                 for (command, _), out in zip(commands, outs, strict=True)]
    try:
        waiting = {process: number for process, (_, number) in zip(processes, commands, strict=True)}
        deadline = time.monotonic() + LIMIT
        while waiting:
            for process in list(waiting):
                folder = Path(f"/proc/{process.pid}")
                if caught(folder) & 1 << signal.SIGHUP - 1:  # Python itself catches SIGINT, to raise KeyboardInterrupt
                    assert "libtorch" not in (folder / "maps").read_text()
                    process.send_signal(waiting.pop(process))
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for process, out in zip(processes, outs, strict=True):
            text, _ = process.communicate(timeout=LIMIT)
            assert process.returncode == 0 and "stopped" in text.splitlines()[-1], text
            assert not list(out.glob("*")), text
    finally:
        for process in processes:
            process.kill()


def caught(process: Path) -> int:
    """The signals for which a process has a handler, as bits."""
    (mask,) = (line.split()[1] for line in (process / "status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(mask, 16)


@pytest.mark.parametrize("place", PLACES)
def test_stop_request_at_every_place_then_auto_equals_the_straight_run(settings, straight, tmp_path, place):
    """Two signals while something is read, computed or written: neither may be lost, nor break what it interrupts."""
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    job = run(arguments, tmp_path, fault=Fault("term", place, 1 if place in ("start-up", "build", "removal") else 2))
    assert job.statuses == [0], job.text()
    assert "stopped" in job.last_line() or place == "removal", job.text()  # which may be the last thing that a run does
    assert run(arguments, tmp_path).statuses == [0]
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.slow  # torchrun starts two ranks
@soak
@pytest.mark.parametrize("number, times", [(signal.SIGHUP, 1), (signal.SIGTERM, 2)])
def test_signal_to_the_launcher(settings, straight, tmp_path, number, times):
    """torchrun hands it to its ranks, which save. A second one makes torchrun give up at once, and nobody outlives it."""
    out_dir = tmp_path / "run"
    process = launch([*settings, *SLOW, f"--out_dir={out_dir}"], ranks=2)
    await_lines(out_dir, 3)
    for _ in range(times):
        os.kill(process.pid, number)
    text, _ = process.communicate(timeout=LIMIT)
    assert process.returncode, "torchrun reports 1 whatever its ranks return"
    assert "stopped on request" in text or times == 2, text
    deadline = time.monotonic() + 10
    while processes_of(str(out_dir)):
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    steps = max(dict(line)["step"] for line in curve(out_dir))
    assert run([*settings, *SLOW, f"--max_iters={steps}", f"--out_dir={out_dir}"], tmp_path, ranks=2).statuses == [0, 0]
    assert not list(out_dir.glob(".*"))

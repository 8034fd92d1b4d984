"""SIGKILL at any place and moment, on one rank and on two; then --init_from=auto comes to the straight run's end."""

import random
import signal
import time

import pytest

from tests.faults.driver import Fault, Job, assert_same_run, kill_group, launch, processes_of, run
from tests.faults.inject import PLACES


def test_kills_at_every_place_then_auto_equals_the_straight_run(settings, straight, tmp_path):
    """One run, killed once at each place."""
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    for number, place in enumerate(PLACES):
        job = run(arguments, tmp_path, fault=Fault("kill", place, 1 + number % 3 * (place not in ("start-up", "build"))))
        assert job.statuses == [-signal.SIGKILL], (place, job.text())
    assert run(arguments, tmp_path).statuses == [0]
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.parametrize("place, before_last", [
    ("checkpoint write", 0), ("metrics", 0), ("metrics", 1), ("removal", 0), *(("fsync", i) for i in range(5)), ("rename", 0),
    ("rename", 1),
])
def test_killed_in_the_last_save(settings, straight, straight_job, tmp_path, place, before_last):
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    job = run(arguments, tmp_path, fault=Fault("kill", place, straight_job.passed()[place] - before_last))
    assert job.statuses == [-signal.SIGKILL], job.text()
    job = run(arguments, tmp_path)
    assert job.statuses == [0], job.text()
    assert_same_run(tmp_path / "run", straight)


def test_killed_in_the_only_save_the_finished_run_leaves_no_temporary(settings, tmp_path):
    """The checkpoint is whole and the run finished; what is half-written is the marker."""
    arguments = [*settings, "--max_iters=2", f"--out_dir={tmp_path}/run"]
    total = run([*arguments[:-1], f"--out_dir={tmp_path}/other"], tmp_path).passed()["fsync"]
    job = run(arguments, tmp_path, fault=Fault("kill", "fsync", total - 1))
    assert job.statuses == [-signal.SIGKILL] and len(list((tmp_path / "run").glob(".*"))) == 1
    job = run(arguments, tmp_path)
    assert job.statuses == [0] and "nothing to do" in job.text()
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.parametrize("seed", range(2))
def test_kills_of_two_ranks_at_random_moments(settings, straight, tmp_path, seed):
    """One of the two, or both, with DDP and with FSDP; the one left alone ends by itself, with the reason on its last line."""
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    rng = random.Random(seed)
    for _ in range(3):
        rank = rng.randrange(2)
        place = rng.choice(["prefetch", "step", "evaluation"] if rank else PLACES)
        parallel = rng.choice(["ddp", "fsdp"])
        job = Job([*arguments, f"--parallel={parallel}"], tmp_path, ranks=2, fault=Fault("kill", place, rng.randint(1, 6), rank))
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 1))
            job.kill()
        statuses = job.wait()
        if statuses[rank] == -signal.SIGKILL and statuses[1 - rank] != -signal.SIGKILL:
            assert statuses[1 - rank] == 1
            assert "another rank" in job.last_line(1 - rank), job.text(1 - rank)
    job = run([*arguments, "--parallel=fsdp"], tmp_path, ranks=2)
    assert job.statuses == [0, 0], job.text()
    assert_same_run(tmp_path / "run", straight, exactly=False)


@pytest.mark.slow  # starts train.py and torchrun from nothing
@pytest.mark.parametrize("ranks, seconds", [(0, 0.5), (2, 5)])
def test_killed_while_starting(settings, straight, tmp_path, ranks, seconds):
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    process = launch(arguments, ranks=ranks)
    time.sleep(seconds)
    kill_group(process)
    assert processes_of(f"{tmp_path}/run") == []
    assert run(arguments, tmp_path).statuses == [0]
    assert_same_run(tmp_path / "run", straight, exactly=not ranks)

"""One rank raises, hangs or runs out of memory: all end in bounded time, with the cause on the last line. And elastic resumes."""

import os
import signal
import time

import pytest

from tests.faults.driver import Fault, Job, assert_same_run, await_lines, free_port, kill_group, launch, processes_of, run, soak


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["start-up", "step", "evaluation", "prefetch"])
def test_a_rank_that_raises_ends_all(settings, tmp_path, place, rank):
    job = run([*settings, f"--out_dir={tmp_path}/run"], tmp_path, ranks=2, limit=30,
              fault=Fault("raise", place, 1 if place == "start-up" else 3, rank))
    assert job.statuses == [1, 1], job.text()
    assert job.last_line(rank) == f"error: rank {rank}: ValueError: had enough"
    other = job.last_line(1 - rank)
    assert "another rank is gone" in other or f"rank {rank}: had enough" in other, job.text()


@pytest.mark.parametrize("place", ["checkpoint write", "metrics"])
def test_rank_0_alone_fails_in_what_it_does_alone(settings, tmp_path, place):
    job = run([*settings, f"--out_dir={tmp_path}/run"], tmp_path, ranks=2, limit=30, fault=Fault("raise", place, 2))
    assert job.statuses == [1, 1], job.text()
    assert "had enough" in job.last_line(0), job.text()
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["step", "evaluation"])
def test_a_rank_that_hangs_ends_the_others(settings, tmp_path, place, rank):
    arguments = [*settings, f"--out_dir={tmp_path}/run", "--dist_timeout=3"]
    job = Job(arguments, tmp_path, ranks=2, fault=Fault("hang", place, 3, rank))
    job.processes[1 - rank].join(30)
    assert job.processes[1 - rank].exitcode == 1, job.text()
    last = job.last_line(1 - rank)
    assert last.startswith(f"error: rank {1 - rank}: another rank did not answer within dist_timeout"), job.text()
    job.signal(signal.SIGCONT, rank)  # a node that comes back finds that it is alone
    assert job.wait(30)[rank] == 1, job.text()
    assert "another rank" in job.last_line(rank), job.text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes(settings, tmp_path, rank):
    place = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = run([*settings, f"--out_dir={tmp_path}/run", "--dist_timeout=2"], tmp_path, environment=place, limit=40)
    assert job.statuses == [1], job.text()
    assert job.last_line().startswith(f"error: rank {rank}: another rank did not answer within dist_timeout"), job.text()


@pytest.mark.parametrize("ranks, rank", [(1, 0), (2, 1)])
def test_out_of_memory(settings, tmp_path, ranks, rank):
    """An address space that is full, as under ulimit -v: the allocator itself refuses."""
    job = run([*settings, f"--out_dir={tmp_path}/run"], tmp_path, ranks=ranks, fault=Fault("memory", "step", 9, rank), limit=30)
    assert job.statuses == [1] * ranks, job.text()
    assert job.last_line(rank).startswith(f"error: rank {rank}: out of memory at step"), job.text()
    assert "with micro_batch_size=2: --micro_batch_size=1 gives the same training" in job.last_line(rank)


@pytest.mark.slow  # torchrun gives a rank that does not listen half a minute
@soak
def test_launcher_ends_a_rank_that_hangs(settings, tmp_path):
    process = launch([*settings, f"--out_dir={tmp_path}/run", "--dist_timeout=3", "--max_iters=100000"], ranks=2)
    try:
        await_lines(tmp_path / "run", 3)
        os.kill(max(processes_of(f"{tmp_path}/run")), signal.SIGSTOP)
        begin = time.monotonic()
        text, _ = process.communicate(timeout=60)
        assert time.monotonic() - begin < 50 and process.returncode == 1, text
        assert "another rank did not answer within dist_timeout" in text
    finally:
        kill_group(process)
    assert processes_of(f"{tmp_path}/run") == []


def test_elastic(settings, straight, tmp_path):
    """1, 2, 4 and 2 ranks in turn: the token ids of the straight run, and its losses but for rounding."""
    arguments = [*settings, "--micro_batch_size=1", f"--out_dir={tmp_path}/run"]
    for ranks, max_iters in ((1, 3), (2, 6), (4, 9), (2, 12)):
        job = run([*arguments, f"--max_iters={max_iters}", "--eval_interval=4"], tmp_path, ranks=ranks)
        assert job.statuses == [0] * ranks, job.text()
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines(keepends=True)
             if '"val"' not in line or any(f'"step": {step},' in line for step in (0, 4, 8, 12))]
    metrics.write_text("".join(lines))  # the evaluations at the ends of the parts, which the straight run has not
    assert_same_run(tmp_path / "run", straight, exactly=False)

"""A disk that is full, in each file that a run writes, or read-only; two runs in one folder; a clock that jumps."""

import functools
import os
import re
import resource
import shutil
import subprocess
import time

import pytest

from tests.faults.driver import Fault, Job, assert_same_run, await_lines, curve, run


def limit_files(size: int) -> None:
    """No file of this process may grow beyond `size` bytes. Python ignores SIGXFSZ: the write fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("file, size, status, more", [
    ("ckpt_00000003.pt", 20_000, 1, []), ("log.txt", 10_001, 2, []),  # 2: before the run begins
    ("metrics.jsonl", 20_000, 1, ["--max_iters=1000", "--save_interval=1000", "--eval_interval=1000"]),
])
@pytest.mark.parametrize("ranks", [1, 2])
def test_file_that_cannot_grow(settings, straight, tmp_path, file, size, status, more, ranks):
    """Whatever does not fit: the reason on the last line, and with room again the run goes on as if nothing had been."""
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    os.mkdir(tmp_path / "run")
    (tmp_path / "run" / "log.txt").write_text("x" * 10_000 * (file == "log.txt"))
    job = run([*arguments, *more], tmp_path, ranks=ranks, prepare=functools.partial(limit_files, size), limit=40)
    assert job.statuses == [status] * ranks, job.text()
    assert f"{file} cannot be written: File too large" in job.last_line(), job.text()
    assert "Traceback" not in job.text(0)
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
    job = run(arguments, tmp_path, ranks=ranks)
    assert job.statuses == [0] * ranks, job.text()
    assert_same_run(tmp_path / "run", straight, exactly=ranks == 1)


@pytest.mark.parametrize("free", [4_096, 40_000, 500_000, 700_000])
def test_small_disk(settings, straight, small_disk, tmp_path, free):
    """A real file system without room, from the first file on or after the first checkpoint."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_048_576 - 8_192 - free))
    arguments = [*settings, f"--out_dir={small_disk}/run"]
    job = run(arguments, tmp_path)
    assert job.statuses[0] in (1, 2), job.text()
    assert job.last_line().startswith("error: ") and "No space left on device" in job.last_line(), job.text()
    assert "Traceback" not in job.text()
    saved = sorted(path.name for path in (small_disk / "run").glob("ckpt_*.pt"))
    ballast.unlink()
    shutil.copytree(small_disk / "run", tmp_path / "run")
    arguments[-1] = f"--out_dir={tmp_path}/run"
    job = run(arguments, tmp_path)
    assert job.statuses == [0], job.text()
    assert not saved or f"continuing from {tmp_path}/run/{saved[-1]}" in job.text()
    assert_same_run(tmp_path / "run", straight)


@pytest.fixture
def frozen(straight, tmp_path):
    """A run folder that not even root may write."""
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    if not shutil.which("chattr") or subprocess.run(["chattr", "-R", "+i", str(folder)], capture_output=True).returncode:
        subprocess.run(["chattr", "-R", "-i", str(folder)], capture_output=True)
        pytest.skip("chattr +i needs root and a file system that knows it")
    yield folder
    subprocess.run(["chattr", "-R", "-i", str(folder)], check=True)


def test_read_only_out_dir(settings, straight, frozen, tmp_path):
    arguments = [*settings, f"--out_dir={frozen}"]
    assert run(arguments, tmp_path).statuses == [0]  # finished
    job = run([*arguments, "--max_iters=20"], tmp_path)
    assert job.statuses == [2] and "[Errno" not in job.text()
    assert re.match(f"error: out_dir={frozen}: {frozen}/[^ ]* cannot be written: Operation not", job.last_line()), job.text()
    job = run([*arguments, "--eval_only=True"], tmp_path)
    assert job.statuses == [0] and "validation loss" in job.last_line()
    assert curve(frozen) == curve(straight)


def test_out_dir_that_cannot_be_made_or_written_is_told_without_the_system_s_numbers(settings, tmp_path):
    """A file where a folder should be, a folder where a file should be."""
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "log.txt").mkdir(parents=True)
    for out_dir, refused, reason in ((tmp_path / "file" / "run", tmp_path / "file" / "run", "Not a directory"),
                                     (tmp_path / "run", tmp_path / "run" / "log.txt", "Is a directory")):
        job = run([*settings, f"--out_dir={out_dir}"], tmp_path)
        assert job.statuses == [2]
        assert job.last_line() == f"error: out_dir={out_dir}: {refused} cannot be written: {reason}", job.text()


def test_read_only_parent(settings, frozen, tmp_path):
    job = run([*settings, f"--out_dir={frozen}/new/run"], tmp_path)
    assert job.statuses == [2] and "Traceback" not in job.text() and "[Errno" not in job.text(), job.text()
    assert re.match(f"error: out_dir={frozen}/new/run: {frozen}/new cannot be written: ", job.last_line()), job.text()


def test_second_run_in_an_out_dir_is_refused_at_any_number_of_ranks(settings, tmp_path):
    arguments = [*settings, f"--out_dir={tmp_path}/run", "--max_iters=100000", "--eval_interval=100000"]
    first = Job(arguments, tmp_path / "first")
    await_lines(tmp_path / "run", 3)
    for ranks in (1, 2):
        second = run(arguments, tmp_path / "second", ranks=ranks)
        assert second.statuses == [2] * ranks, second.text()
        assert "belongs to a run that is still going" in second.text()
    first.kill()
    assert run([*arguments, "--max_iters=1"], tmp_path / "second").statuses == [0]  # nothing keeps a dead run's folder


def test_run_that_began_while_another_was_starting_is_left_alone(settings, straight, tmp_path):
    """The first looks for a run in out_dir, finds none, and takes long to build its model; the second comes and goes."""
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    slow = Job(arguments, tmp_path / "slow", fault=Fault("wait", "build"))
    while slow.place() != "build":
        time.sleep(0.01)
    assert run(arguments, tmp_path / "quick").statuses == [0]
    assert slow.wait() == [2] and "another run has begun there" in slow.last_line(), slow.text()
    assert_same_run(tmp_path / "run", straight)


def test_clock_that_goes_back_changes_nothing(settings, straight, tmp_path):
    """Checkpoints are told apart by their marker before their times of writing."""
    arguments = [*settings, f"--out_dir={tmp_path}/run"]
    run(arguments, tmp_path, fault=Fault("clock", "step"))
    assert_same_run(tmp_path / "run", straight)
    shutil.rmtree(tmp_path / "run")
    run([*arguments, "--max_iters=9"], tmp_path)
    for path in (tmp_path / "run").glob("ckpt_*.pt"):
        os.utime(path, (0, 2**31 * (path.name == "ckpt_00000006.pt")))  # the older one, from the future
    job = run(arguments, tmp_path)
    assert job.statuses == [0] and "ckpt_00000009.pt" in job.text()

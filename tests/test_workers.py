"""data/workers.py: results in order, and an end within seconds whatever kills a worker or the parent, and when."""

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from data import workers
from data.documents import Batch, Block, Position
from data.workers import WorkerDied, Workers
from tests.test_documents import write_jsonl

ROOT = Path(__file__).parents[1]
SECONDS = 20  # in which a run must end; alone on a machine it takes well under one


def batches(texts: list[str]) -> Iterator[tuple[int, Batch]]:
    """One document in each."""
    for i, text in enumerate(texts):
        data = text.encode()
        yield i, Batch(Block(data, np.array([len(data)]), False, i), Position(i + 1), len(data))


def start(n: int) -> Workers:
    return Workers(n, "byte", text_field="text", val_fraction=0.0)


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A hang is a failure and not the end of the suite."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(4 * SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_order_is_that_of_the_batches_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["x" * length for length in (3_000_000, *range(1, 60))]  # the first keeps its worker busy longest
    read = []

    def counted() -> Iterator[tuple[int, Batch]]:
        for file, batch in batches(texts):
            read.append(file)
            yield file, batch

    with start(2) as pool:
        for i, (file, batch, result) in enumerate(pool.tokenize(counted())):
            assert file == i == batch.block.first_row
            assert result.tokens["train"].tolist() == [256, *texts[i].encode()]
            assert len(read) <= i + 2 * workers._BATCHES_AHEAD
    assert i == len(texts) - 1


def test_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_BYTES_AHEAD", 1000)
    read = []
    with start(2) as pool:
        for i, _ in enumerate(pool.tokenize((read.append(b[0]), b)[1] for b in batches(["x" * 900] * 20))):
            assert len(read) <= i + 3


def half_a_result(connection: Connection, *_: object) -> None:
    """A worker killed while it writes: at the beginning of a message, in its length, after a little or most of it."""
    connection.recv()
    message = struct.pack("!i", 1 << 20) + bytes(1 << 20)
    os.write(connection.fileno(), message[: random.Random(os.getpid()).choice((0, 2, 4, 1000, 1 << 18, 1 << 20))])
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_die_within_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_serve", half_a_result)
    for _ in range(4):
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="a worker process died .signal 9"), start(2) as pool:
            list(pool.tokenize(batches(["x"] * 50)))
        assert time.monotonic() - began < SECONDS


def test_workers_killed_at_any_moment() -> None:
    """One of them, at work on large results: whatever it was at, it is said, and leaving ends the other."""
    draw = random.Random(1)
    for _ in range(5):
        with pytest.raises(WorkerDied), start(2) as pool:
            victim = draw.choice(pool._workers)._process
            others = [worker._process for worker in pool._workers]
            results = pool.tokenize(batches(["x" * 1_000_000] * 10_000))
            next(results)
            threading.Timer(draw.uniform(0, 0.2), victim.kill).start()
            for _ in results:
                pass
        assert not any(process.is_alive() for process in others)


def test_given_up_in_the_middle_of_large_results() -> None:
    for taken in (1, 2, 4):
        with start(3) as pool:
            processes = [worker._process for worker in pool._workers]
            results = pool.tokenize(batches(["x" * 2_000_000] * 100))
            for _ in range(taken):
                next(results)
        assert not any(process.is_alive() for process in processes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough to be at work on for longer than a test takes; results of 2 MB."""
    return write_jsonl(tmp_path_factory.mktemp("in") / "a.jsonl", [f"{i} " + "word " * 20_000 for i in range(1500)])


@contextmanager
def command(corpus: Path, out: Path, workers: int = 3) -> Iterator[subprocess.Popen]:
    """At work on large results."""
    process = subprocess.Popen(
        [sys.executable, "-m", "data.fineweb", f"--out={out}", "--input", str(corpus), "--tokenizer=byte", "--val_fraction=0.1",
         f"--workers={workers}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not any(path.stat().st_size > 1 << 20 for path in out.glob(".fineweb_train.tmp")):
            time.sleep(0.005)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()


def children(process: subprocess.Popen) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in found if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers through /proc")
@pytest.mark.parametrize("case", range(3))
def test_workers_killed_while_the_parent_is_stopped(corpus: Path, tmp_path: Path, case: int) -> None:
    with command(corpus, tmp_path / "set") as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1 + 0.1 * case)  # by then their results fill what lies between
        for worker in children(process):
            os.kill(worker, signal.SIGKILL)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "error: a worker process died (signal 9); was it killed for want of memory? (--workers)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("case", range(2))
def test_the_parent_ends_at_any_moment_and_its_workers_with_it(corpus: Path, tmp_path: Path, number: int, case: int) -> None:
    with command(corpus, tmp_path / "set", workers=6) as process:
        time.sleep(0.05 * case)
        process.send_signal(number)
        process.communicate(timeout=SECONDS)  # returns once the workers too have closed their ends
    assert process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL)

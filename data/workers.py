"""Processes that tokenize batches for data.fineweb, so that any of them can be killed at any moment and the run ends.

    with Workers(8, "gpt2", text_field="text", val_fraction=0.0005) as workers:
        for file, batch, result in workers.tokenize(batches):    # in the order of `batches`
            ...

A worker has a socket of its own, of which it alone holds the other end. A worker that dies, even half-way through a result,
thereby ends the parent's reading from it, and a parent that dies ends its workers. The parent has one thread and no locks, so
that an exception out of a signal handler may come anywhere. (concurrent.futures has one pipe for all results, which the parent
itself can write to: where a worker is killed half-way through a result, its shutdown waits for the rest for ever.)
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Self

from command_line import STOP_SIGNALS
from data.documents import Batch, Block, Result, tokenize_batch
from data.tokenizer import get_tokenizer

_BATCHES_AHEAD = 8  # per worker: a document of several MB keeps one worker busy for seconds, and the others need not wait
_BYTES_AHEAD = 1 << 26  # per worker, where documents are larger than batches
_GIVEN = 2  # batches that a worker has at a time: the one it is at, and the one that it goes on with


class WorkerDied(Exception):
    """A worker process has ended by itself or by a signal, which the message tells."""


@dataclass
class _Task:
    file: int
    batch: Batch
    result: Result | None = None


class _Worker:
    def __init__(self, tokenizer: str, text_field: str, val_fraction: float) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of whatever was imported
        self.connection, theirs = context.Pipe()
        self.given: deque[_Task] = deque()
        self._process = context.Process(target=_serve, args=(theirs, tokenizer, text_field, val_fraction), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, task: _Task) -> None:
        try:
            self.connection.send(task.batch.block)
        except OSError:
            raise self._died() from None
        self.given.append(task)

    def receive(self) -> None:
        try:
            result = self.connection.recv()
        except (EOFError, OSError):  # before a message, within one
            raise self._died() from None
        self.given.popleft().result = result

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _died(self) -> WorkerDied:
        self._process.join(5)
        code = self._process.exitcode
        return WorkerDied(f"a worker process died ({f'signal {-code}' if code and code < 0 else f'exit status {code}'})")


class Workers:
    """`n` processes; leaving the `with` block kills them, whatever they are at. Starting them is not to be interrupted."""

    def __init__(self, n: int, tokenizer: str, *, text_field: str, val_fraction: float) -> None:
        self._workers: list[_Worker] = []
        try:
            for _ in range(n):
                self._workers.append(_Worker(tokenizer, text_field, val_fraction))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()

    def tokenize(self, batches: Iterator[tuple[int, Batch]]) -> Iterator[tuple[int, Batch, Result]]:
        """(number of the file, batch, result) in the order of `batches`. Once: what was not taken stays with the workers.
        WorkerDied."""
        waiting: deque[_Task] = deque()
        n_bytes = 0
        with closing(batches):
            for file, batch in batches:
                waiting.append(_Task(file, batch))
                n_bytes += len(batch.block.data)
                self._least_busy(below=_GIVEN).give(waiting[-1])
                self._receive(0)
                while waiting and (waiting[0].result is not None or self._is_enough(len(waiting), n_bytes)):
                    n_bytes -= len(waiting[0].batch.block.data)
                    yield self._finish(waiting.popleft())
            while waiting:
                yield self._finish(waiting.popleft())

    def _is_enough(self, n_batches: int, n_bytes: int) -> bool:
        return n_batches >= _BATCHES_AHEAD * len(self._workers) or n_bytes > _BYTES_AHEAD * len(self._workers)

    def _least_busy(self, below: int) -> _Worker:
        while len((worker := min(self._workers, key=lambda worker: len(worker.given))).given) >= below:
            self._receive(None)
        return worker

    def _finish(self, task: _Task) -> tuple[int, Batch, Result]:
        while task.result is None:
            self._receive(None)
        return task.file, task.batch, task.result

    def _receive(self, timeout: float | None) -> None:
        """The results that are there, or that come within `timeout` seconds (None: however long it takes)."""
        ready = set(wait([worker.connection for worker in self._workers], timeout))
        for worker in self._workers:
            if worker.connection in ready:
                worker.receive()


def _serve(connection: Connection, tokenizer_name: str, text_field: str, val_fraction: float) -> None:
    """A worker's life. The parent alone answers stop signals; when it is gone, however it went, so is the worker."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    blocks: SimpleQueue[Block] = SimpleQueue()

    def listen() -> None:
        """Takes what the parent gives at once: neither waits for the other while both send."""
        try:
            while True:
                blocks.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    tokenizer = get_tokenizer(tokenizer_name)
    with suppress(OSError):  # the parent is gone
        while True:
            connection.send(tokenize_batch(blocks.get(), tokenizer, text_field, val_fraction))

"""Batches: windows of a token stream, each a pure function of (seed, step, slot in the global batch).

    loader = Loader(open_dataset("quickstart").train, block_size=256, global_batch_size=32, micro_batch_size=8, rank=0,
                    world_size=1, seed=1, sampling="random", vocab_size=257)
    with loader.batches(start_step=0) as batches:
        x, y = next(batches)                       # int64 (8, 256) each; four of them make step 0

There is no loader state: a step's windows are the same on resume, at any number of ranks and for every model, and no global
random generator is read or moved.
"""

import hashlib
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from queue import SimpleQueue
from typing import Self

import numpy as np
import torch

from command_line import InputError
from data.shards import TokenStream

SAMPLINGS = ("random", "shuffle")
IGNORE = -1  # target of a row that fills up a validation batch
_QUEUE_DEPTH = 4  # micro-batches read ahead
_RANDOM, _SHUFFLE = 0, 1  # second word of a Philox key: keeps what is drawn from one seed for different ends apart

Batch = tuple[torch.Tensor, torch.Tensor]


class Loader:
    """Training batches of one rank.

    Step s has global_batch_size slots. Micro-step m of rank r takes slots m*(world_size*micro_batch_size) +
    r*micro_batch_size + i, i < micro_batch_size. sampling="random" draws each slot's window with replacement from all places
    of the stream (NanoGPT's way); "shuffle" takes the (n_tokens-1)//block_size windows that follow each other, every one
    once per epoch, in an order that differs between epochs.

    InputError: a stream shorter than block_size+1 tokens, an unknown sampling, a seed outside 0 .. 2**64-1, or a
    global_batch_size that world_size * micro_batch_size does not divide.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        block_size: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        sampling: str,
        vocab_size: int,
        device: str | torch.device = "cpu",
    ) -> None:
        _check_length(stream, block_size)
        if sampling not in SAMPLINGS:
            raise InputError(f"sampling: wanted one of {', '.join(SAMPLINGS)}, found {sampling!r}")
        if not 0 <= seed < 2**64:
            raise InputError(f"seed: wanted 0 to 2**64-1, found {seed}")
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % (world_size * micro_batch_size):
            raise InputError(
                f"global_batch_size: wanted a multiple of world_size {world_size} * micro_batch_size {micro_batch_size}, "
                f"found {global_batch_size}"
            )
        self.stream, self.block_size, self.vocab_size = stream, block_size, vocab_size
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.sampling, self.device = seed, sampling, torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.n_micro_steps = global_batch_size // (world_size * micro_batch_size)

    def starts(self, step: int) -> np.ndarray:
        """First token of each slot's window in step `step`, int64 (global_batch_size,)."""
        if self.sampling == "random":
            n_places = self.stream.n_tokens - self.block_size
            # Modulo favours low places by one part in 2**64 / n_places: 6e-9 for 100B tokens.
            return (_philox(self.seed, _RANDOM, step, self.global_batch_size) % np.uint64(n_places)).astype(np.int64)
        n_windows = (self.stream.n_tokens - 1) // self.block_size
        index = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size, dtype=np.int64)
        epoch, place = np.divmod(index, n_windows)
        window = np.empty_like(place)
        for e in np.unique(epoch):
            window[epoch == e] = permute(place[epoch == e], n_windows, self.seed, int(e))
        return window * self.block_size

    def micro_slots(self, micro_step: int) -> np.ndarray:
        """Slots of the global batch that this rank takes in a micro-step, int64 (micro_batch_size,)."""
        first = (micro_step * self.world_size + self.rank) * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size)

    def batches(self, start_step: int = 0) -> "Batches":
        """Endless (x, y) of this rank, micro-step after micro-step from `start_step` on, read ahead by a thread."""
        return Batches(self, start_step)


class Batches:
    """Iterator over (x, y): int64 (micro_batch_size, block_size) on the loader's device, y the tokens after those of x.

    `digest` adds up, modulo 2**64, a hash of each window that was given out, made of its tokens, its step and its slot. Such a
    sum does not depend on which rank, or which run of several, took a window: added up over ranks it says what a training run
    has seen and in which order. It is of the tokens themselves, and not of their places, which a loader that reads the wrong
    ones, or a shard that has changed under its checksum, would leave as they are. (Hashing takes 3.5 us for a window of 2048
    tokens, in the reading thread: of a step of 256 such windows 0.9 ms.)

    A fault in the reading thread is raised by `next`. InputError: an id that the model's vocabulary does not have. `close`,
    leaving a `with` block, or dropping the iterator ends the thread.
    """

    def __init__(self, loader: Loader, start_step: int) -> None:
        self.digest = 0
        self._device = loader.device
        self._queue: SimpleQueue[tuple[Batch, int] | BaseException] = SimpleQueue()
        self._free = threading.Semaphore(_QUEUE_DEPTH)
        self._stop = threading.Event()
        # The thread must not hold this object, or an iterator that is dropped would never end it.
        arguments = (loader, start_step, self._queue, self._free, self._stop)
        self._waited = 0.0
        self._thread = threading.Thread(target=_read_ahead, args=arguments, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise StopIteration
        start = time.perf_counter()
        item = self._queue.get()
        self._waited += time.perf_counter() - start
        self._free.release()
        if isinstance(item, BaseException):
            self.close()
            raise item
        (x, y), digest = item
        self.digest = (self.digest + digest) % 2**64
        return x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)

    def take_waited(self) -> float:
        """Seconds that `next` has waited for the thread since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """End the reading thread and wait for it."""
        self._stop.set()
        self._free.release()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop.set()
        self._free.release()


def _read_ahead(
    loader: Loader,
    step: int,
    queue: "SimpleQueue[tuple[Batch, int] | BaseException]",
    free: threading.Semaphore,
    stop: threading.Event,
) -> None:
    pin = loader.device.type == "cuda"
    try:
        if pin:
            torch.cuda.set_device(loader.device)  # or pinning would open a context on GPU 0 from every rank
        while True:
            starts = loader.starts(step)
            for micro_step in range(loader.n_micro_steps):
                free.acquire()
                if stop.is_set():
                    return
                slots = loader.micro_slots(micro_step)
                tokens = _tokens(loader.stream, starts[slots], loader.block_size, loader.vocab_size)
                x, y = _inputs_and_targets(tokens)
                batch = (x.pin_memory(), y.pin_memory()) if pin else (x, y)
                queue.put((batch, window_hashes(tokens, step, slots)))
            step += 1
    except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the batch
        queue.put(error)


def validation_batches(
    stream: TokenStream,
    *,
    block_size: int,
    eval_tokens: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    vocab_size: int,
    device: str | torch.device = "cpu",
) -> Iterator[Batch]:
    """This rank's share of the fixed validation windows, as (x, y) of shape (micro_batch_size, block_size), int64.

    eval_tokens // block_size windows, or all there are, lie evenly over the stream; rank r takes windows r, r+world_size, ...
    All ranks get equally many batches of one shape, so that none waits in a collective and nothing is compiled again: the
    rows left over have targets of -1 only, which the loss ignores. A rank's last batch can consist of nothing else, and its
    mean loss is then no number: add up losses weighed by the count of targets >= 0.

    InputError: eval_tokens below block_size, a stream shorter than block_size+1 tokens, an id of vocab_size or more.
    """
    _check_length(stream, block_size)
    if eval_tokens < block_size:
        raise InputError(f"eval_tokens: wanted at least one window of block_size {block_size} tokens, found {eval_tokens}")
    available = (stream.n_tokens - 1) // block_size
    n_windows = min(eval_tokens // block_size, available)
    starts = np.arange(n_windows, dtype=np.int64) * available // n_windows * block_size
    share = starts[rank::world_size]
    n_rows = -(-n_windows // world_size)  # of rank 0, which has the most

    def batches() -> Iterator[Batch]:
        for first in range(0, n_rows, micro_batch_size):
            rows = share[first : first + micro_batch_size]
            x = torch.zeros(micro_batch_size, block_size, dtype=torch.int64)
            y = torch.full_like(x, IGNORE)
            x[: len(rows)], y[: len(rows)] = _inputs_and_targets(_tokens(stream, rows, block_size, vocab_size))
            yield x.to(device), y.to(device)

    return batches()


def permute(place: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a keyed permutation of 0 .. n-1 takes each of `place` (int64), in O(1) memory.

    A Feistel network permutes the numbers below the next power of two; what lands outside 0 .. n-1 is permuted again until it
    is inside (cycle walking), which keeps the whole a permutation.
    """
    bits = (n - 1).bit_length()
    low_bits = np.uint64(bits - bits // 2)
    low_mask, high_mask = (np.uint64((1 << half) - 1) for half in (bits - bits // 2, bits // 2))
    keys = _round_keys(seed, epoch)
    value = place.astype(np.uint64)
    outside = np.arange(len(value))
    while len(outside):
        high, low = value[outside] >> low_bits, value[outside] & low_mask
        for high_key, low_key in keys:
            high ^= _mix(low ^ high_key) & high_mask
            low ^= _mix(high ^ low_key) & low_mask
        value[outside] = high << low_bits | low
        outside = outside[value[outside] >= n]
    return value.astype(np.int64)


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> np.ndarray:
    return _philox(seed, _SHUFFLE, epoch, 8).reshape(4, 2)


def _mix(value: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer: every output bit depends on every input bit."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


def _philox(seed: int, purpose: int, number: int, count: int) -> np.ndarray:
    """The first `count` uint64 of the stream that (seed, purpose, number) names.

    Philox is a counter-based generator, its raw output the same in every version of numpy. `number` is the counter's second
    word: the generator itself counts in the first, so that the streams of two numbers never overlap.
    """
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, number, 0, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def _check_length(stream: TokenStream, block_size: int) -> None:
    if stream.n_tokens < block_size + 1:
        raise InputError(
            f"block_size: {block_size} needs {block_size + 1} tokens, but the {stream.split} split "
            f"({stream.shards[0].path.parent}) has {stream.n_tokens}"
        )


def window_hashes(tokens: np.ndarray, step: int, slots: np.ndarray) -> int:
    """Sum modulo 2**64 of a hash of each window, uint16 (n, block_size + 1), at its slot (n,) of the step."""
    person, total = step.to_bytes(16, "little"), 0
    for row, slot in zip(tokens.astype("<u2", copy=False), slots, strict=True):
        digest = hashlib.blake2b(row, digest_size=8, person=person, salt=int(slot).to_bytes(16, "little")).digest()
        total += int.from_bytes(digest, "little")
    return total % 2**64


def _tokens(stream: TokenStream, starts: np.ndarray, block_size: int, vocab_size: int) -> np.ndarray:
    """The block_size + 1 tokens from each start on, uint16 (len(starts), block_size + 1)."""
    tokens = np.empty((len(starts), block_size + 1), dtype=np.uint16)
    for row, start in enumerate(starts):
        tokens[row] = stream.read(int(start), block_size + 1)
    if tokens.size and tokens.max() >= vocab_size:
        row, column = np.argwhere(tokens >= vocab_size)[0]
        path, offset = stream.locate(int(starts[row] + column))
        raise InputError(f"{path}: token {offset} has id {tokens[row, column]}, but the model's vocab_size is {vocab_size}")
    return tokens


def _inputs_and_targets(tokens: np.ndarray) -> Batch:
    """x, y of shape (n, block_size), int64: all tokens of a window but the last, and all but the first."""
    tokens = tokens.astype(np.int64)
    return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())

"""data/loader.py: windows against a plain restatement, permutation, ranks, restart, the reading thread."""

import gc
import hashlib
import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import InputError
from data.loader import IGNORE, Loader, permute, validation_batches, window_hashes
from data.shards import Dataset, ShardWriter, TokenStream, open_dataset, write_meta

N_TOKENS, T, G = 1000, 16, 12
TOKENS = np.random.Generator(np.random.PCG64(0)).integers(0, 300, N_TOKENS, dtype=np.uint16)


def _dataset(folder: Path, tokens: np.ndarray, shard_tokens: int = 137) -> Dataset:
    splits = {}
    for split in ("train", "val"):
        with ShardWriter(folder, "x", split, eot=299, shard_tokens=shard_tokens) as writer:
            writer.write(tokens)
            splits[split] = writer.close()
    write_meta(folder, tokenizer="byte", vocab_size=300, eot=299, splits=splits)
    return open_dataset(folder)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return _dataset(tmp_path, TOKENS)


def _loader(stream: TokenStream, **changes: object) -> Loader:
    settings = dict(
        block_size=T, global_batch_size=G, micro_batch_size=3, rank=0, world_size=1, seed=7, sampling="random", vocab_size=300
    )
    return Loader(stream, **settings | changes)


def _take(loader: Loader, n: int, start_step: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with loader.batches(start_step) as batches:
        return [next(batches) for _ in range(n)]


@pytest.mark.parametrize("sampling", ["random", "shuffle"])
def test_batches_are_the_windows_at_starts(dataset: Dataset, sampling: str) -> None:
    loader = _loader(dataset.train, sampling=sampling)
    batches = _take(loader, 3 * 4)
    for step in range(3):
        starts = loader.starts(step)
        assert starts.dtype == np.int64 and starts.shape == (G,)
        for slot, start in enumerate(starts):
            x, y = batches[4 * step + slot // 3]
            assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (3, T) and x.is_contiguous()
            assert x[slot % 3].tolist() == TOKENS[start : start + T].tolist()
            assert y[slot % 3].tolist() == TOKENS[start + 1 : start + T + 1].tolist()


@pytest.mark.parametrize("sampling", ["random", "shuffle"])
def test_digest_is_of_tokens_steps_and_slots_at_any_number_of_ranks(dataset: Dataset, sampling: str) -> None:
    def digest(steps: range, world_size: int = 1, micro_batch_size: int = 3, stream: TokenStream = dataset.train) -> int:
        """Of some steps over all ranks."""
        total = 0
        for rank in range(world_size):
            changes = dict(sampling=sampling, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
            loader = _loader(stream, **changes)
            with loader.batches(steps.start) as batches:
                assert batches.digest == 0
                for _ in range(len(steps) * loader.n_micro_steps):
                    next(batches)
                total += batches.digest
        return total % 2**64

    expected = 0
    for step in range(5):
        for slot, start in enumerate(_loader(dataset.train, sampling=sampling).starts(step)):
            window = b"".join(int(token).to_bytes(2, "little") for token in TOKENS[start : start + T + 1])
            key = {"person": step.to_bytes(16, "little"), "salt": slot.to_bytes(16, "little")}
            expected += int.from_bytes(hashlib.blake2b(window, digest_size=8, **key).digest(), "little")
    assert digest(range(5)) == expected % 2**64
    assert digest(range(5), 2, 2) == digest(range(5), 4, 1) == digest(range(5), 1, 12) == digest(range(5))
    assert (digest(range(2)) + digest(range(2, 5), 2)) % 2**64 == digest(range(5))  # stopped and continued on two ranks
    assert len({digest(range(n)) for n in range(6)}) == 6


def test_digest_tells_order_and_every_token() -> None:
    windows, slots = TOKENS[: G * (T + 1)].reshape(G, T + 1), np.arange(G)
    base = window_hashes(windows, 3, slots)
    others = [window_hashes(windows, 4, slots), window_hashes(windows[::-1], 3, slots), window_hashes(windows, 3, slots + 1)]
    for i in range(0, windows.size, 7):
        changed = windows.copy()
        changed.ravel()[i] ^= 1
        others.append(window_hashes(changed, 3, slots))
    assert len({base, *others}) == 1 + len(others)
    assert window_hashes(windows[::-1], 3, slots[::-1]) == base


def test_random_starts_restated_slot_by_slot(dataset: Dataset) -> None:
    loader = _loader(dataset.train, seed=2**64 - 1)
    for step in (0, 1, 10**9):
        philox = np.random.Philox(key=2**64 - 1, counter=step << 64)  # numpy's 128-bit key, 256-bit counter
        assert loader.starts(step).tolist() == [philox.random_raw() % (N_TOKENS - T) for _ in range(G)]


def test_random_starts_do_not_depend_on_batch_or_ranks(dataset: Dataset) -> None:
    small = _loader(dataset.train).starts(5)
    large = _loader(dataset.train, global_batch_size=96, micro_batch_size=4, world_size=8, rank=3).starts(5)
    assert large[:G].tolist() == small.tolist()
    assert _loader(dataset.train, seed=8).starts(5).tolist() != small.tolist()
    assert len({tuple(_loader(dataset.train).starts(step)) for step in range(200)}) == 200


def test_random_starts_are_uniform_and_reach_both_ends(dataset: Dataset) -> None:
    n_places = N_TOKENS - T
    starts = np.concatenate([_loader(dataset.train, global_batch_size=1200).starts(step) for step in range(100)])
    assert starts.min() == 0 and starts.max() == n_places - 1
    counts = np.bincount(starts, minlength=n_places)
    expected = len(starts) / n_places
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - (n_places - 1)) < 5 * np.sqrt(2 * (n_places - 1))
    by_step = starts.reshape(100, 1200).astype(float)
    neighbours = np.corrcoef(by_step[:-1].ravel(), by_step[1:].ravel())[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(by_step[1:].size)


def test_large_streams(dataset: Dataset) -> None:
    stream = TokenStream.__new__(TokenStream)  # 100B tokens, no file
    stream.split, stream.n_tokens = "train", 103_000_000_000
    for sampling in ("random", "shuffle"):
        starts = np.concatenate([_loader(stream, sampling=sampling, block_size=2048).starts(step) for step in range(500)])
        assert 0 <= starts.min() and starts.max() + 2049 <= stream.n_tokens
        assert len(set(starts.tolist())) == len(starts)
        assert abs(starts.mean() / stream.n_tokens - 0.5) < 0.02


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 997, 1000, 1024, 1025, 65536, 65537])
def test_permutation_is_one(n: int) -> None:
    for epoch in range(3):
        assert np.array_equal(np.sort(permute(np.arange(n), n, 1, epoch)), np.arange(n))
    assert permute(np.array([], dtype=np.int64), n, 1, 0).size == 0


def test_permutations_differ_between_epochs_and_seeds_and_look_random() -> None:
    n = 1000
    orders = [permute(np.arange(n), n, seed, epoch) for seed in range(5) for epoch in range(5)]
    for i, one in enumerate(orders):
        assert np.mean(np.diff(one) == 1) < 0.01
        for other in orders[:i]:
            assert np.mean(one == other) < 0.01  # 0.001 expected
        assert abs(np.corrcoef(one, np.arange(n))[0, 1]) < 0.15
    # Every one of three windows comes first about equally often.
    firsts = Counter(int(permute(np.array([0]), 3, 0, epoch)[0]) for epoch in range(3000))
    assert all(abs(firsts[i] - 1000) < 130 for i in range(3))


def test_shuffle_visits_every_window_once_per_epoch(dataset: Dataset) -> None:
    n_windows = (N_TOKENS - 1) // T
    loader = _loader(dataset.train, sampling="shuffle")
    seen = np.concatenate([loader.starts(step) for step in range(n_windows)])  # G epochs, borders inside of steps
    for epoch in seen.reshape(G, n_windows):
        assert sorted(epoch) == [T * i for i in range(n_windows)]
    assert len({tuple(epoch) for epoch in seen.reshape(G, n_windows)}) == G


def test_shuffle_of_one_window(tmp_path: Path) -> None:
    stream = _dataset(tmp_path, TOKENS[: T + 1]).train
    assert _loader(stream, sampling="shuffle").starts(0).tolist() == [0] * G
    assert _loader(stream, sampling="random").starts(0).tolist() == [0] * G


@pytest.mark.parametrize("sampling", ["random", "shuffle"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_a_step(dataset: Dataset, sampling: str, world_size: int) -> None:
    alone = torch.cat([x for x, _ in _take(_loader(dataset.train, sampling=sampling), 8)])
    shares = []
    for rank in range(world_size):
        loader = _loader(dataset.train, sampling=sampling, rank=rank, world_size=world_size)
        shares.append(torch.cat([x for x, _ in _take(loader, 2 * loader.n_micro_steps)]))
    # The slots of the ranks side by side, micro-step after micro-step, are the single rank's order itself.
    together = torch.stack([share.view(-1, 3, T) for share in shares], dim=1).reshape(-1, T)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("sampling", ["random", "shuffle"])
def test_restart_sees_what_the_straight_run_saw(dataset: Dataset, sampling: str) -> None:
    loader = _loader(dataset.train, sampling=sampling)
    straight, restarted = _take(loader, 20), _take(loader, 8, start_step=3)
    for old, new in zip(straight[12:], restarted, strict=True):
        assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])


def test_no_global_generator_is_moved_or_read(dataset: Dataset) -> None:
    def states() -> tuple:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), np.random.get_state()[2], random.getstate()  # noqa: NPY002

    before = states()
    first = _take(_loader(dataset.train), 8)
    settings = dict(block_size=T, eval_tokens=100, micro_batch_size=2, rank=0, world_size=1, vocab_size=300)
    list(validation_batches(dataset.val, **settings))
    assert states() == before
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    second = _take(_loader(dataset.train), 8)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


def _reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_thread_ends_when_closed_and_when_dropped(dataset: Dataset) -> None:
    batches = _loader(dataset.train).batches()
    next(batches)
    time.sleep(0.05)  # the queue is full now and the thread waits
    start = time.perf_counter()
    batches.close()
    assert time.perf_counter() - start < 1 and not _reading_threads()
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)

    with pytest.raises(RuntimeError), _loader(dataset.train).batches() as batches:
        next(batches)
        raise RuntimeError
    assert not _reading_threads()

    batches = _loader(dataset.train).batches()
    next(batches)
    del batches
    gc.collect()
    for thread in _reading_threads():
        thread.join(timeout=5)
    assert not _reading_threads()


def test_reading_ahead_is_bounded(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    n_reads = 0
    read = TokenStream.read

    def counted(self: TokenStream, start: int, length: int) -> np.ndarray:
        nonlocal n_reads
        n_reads += 1
        return read(self, start, length)

    monkeypatch.setattr(TokenStream, "read", counted)
    with _loader(dataset.train).batches() as batches:
        time.sleep(0.2)
        assert n_reads == 4 * 3
        next(batches)
        time.sleep(0.2)
        assert n_reads == 5 * 3


def test_fault_in_the_thread_reaches_the_consumer(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> np.ndarray:
        raise OSError("disk gone")

    monkeypatch.setattr(TokenStream, "read", fail)
    with _loader(dataset.train).batches() as batches, pytest.raises(OSError, match="disk gone"):
        next(batches)
    assert not _reading_threads()


def test_id_outside_the_vocabulary_is_located(tmp_path: Path) -> None:
    tokens = np.zeros(300, dtype=np.uint16)
    tokens[150] = 299
    stream = _dataset(tmp_path, tokens, shard_tokens=100).train
    loader = _loader(stream, vocab_size=299, sampling="shuffle")
    with pytest.raises(InputError, match=r"x_train_000001\.bin: token 50 has id 299.* vocab_size is 299"):
        _take(loader, 8)
    settings = dict(block_size=T, eval_tokens=300, micro_batch_size=2, rank=0, world_size=1)
    with pytest.raises(InputError, match="token 50 has id 299"):
        list(validation_batches(stream, vocab_size=299, **settings))
    assert len(list(validation_batches(stream, vocab_size=300, **settings))) == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": N_TOKENS}, "block_size: 1000 needs 1001 tokens, but the train split .* has 1000"),
        ({"sampling": "sequential"}, "sampling: wanted one of random, shuffle, found 'sequential'"),
        ({"seed": -1}, "seed: .*-1"),
        ({"seed": 2**64}, "seed: "),
        ({"global_batch_size": 10}, "global_batch_size: wanted a multiple of world_size 1 [*] micro_batch_size 3, found 10"),
        ({"world_size": 3}, "global_batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size 0"),
    ],
)
def test_bad_settings(dataset: Dataset, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _loader(dataset.train, **changes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("eval_tokens", [T, 5 * T + 3, 10**9])
def test_validation_counts_every_window_once(dataset: Dataset, world_size: int, micro_batch_size: int, eval_tokens: int) -> None:
    available = (N_TOKENS - 1) // T
    n_windows = min(eval_tokens // T, available)
    windows, n_batches = [], set()
    for rank in range(world_size):
        settings = dict(eval_tokens=eval_tokens, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)
        batches = list(validation_batches(dataset.val, block_size=T, vocab_size=300, **settings))
        n_batches.add(len(batches))
        for x, y in batches:
            assert x.shape == y.shape == (micro_batch_size, T) and x.dtype == y.dtype == torch.int64
            for row_x, row_y in zip(x, y, strict=True):
                if (row_y == IGNORE).any():
                    assert (row_y == IGNORE).all() and (row_x == 0).all()
                else:
                    windows.append((*row_x.tolist(), row_y[-1].item()))
    expected = [tuple(TOKENS[T * i : T * i + T + 1].tolist()) for i in range(available)]
    places = sorted(expected.index(window) for window in windows)
    assert len(places) == len(set(places)) == n_windows
    assert places[0] == 0 and set(np.diff(places)) <= {available // n_windows, -(-available // n_windows)}
    assert len(n_batches) == 1


def test_validation_refuses_at_the_call(dataset: Dataset) -> None:
    settings = dict(micro_batch_size=2, rank=0, world_size=1, vocab_size=300)
    with pytest.raises(InputError, match="eval_tokens: wanted at least one window of block_size 16 tokens, found 15"):
        validation_batches(dataset.val, block_size=T, eval_tokens=T - 1, **settings)
    with pytest.raises(InputError, match="val split"):
        validation_batches(dataset.val, block_size=N_TOKENS, eval_tokens=10**6, **settings)

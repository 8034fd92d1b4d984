"""data/duplicates.py against sets of tuples, with borders of chunks and shards everywhere in the documents, and its memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data import duplicates
from data.duplicates import Cutter, Duplicates
from data.shards import HEADER_BYTES, Shard, TokenStream
from tests.test_shards import _foreign_shard

EOT = 3
CHUNKS = (1, 2, 3, 5, 16, 31, 32, 33, 64, 1000)


def _documents(tokens: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Start and tokens of the documents, one token after the other."""
    found: list[tuple[int, list[int]]] = []
    for place, token in enumerate(tokens):
        if token == EOT:
            found.append((place, []))
        if found:
            found[-1][1].append(token)
    return [(start, tuple(document)) for start, document in found]


def _cut(tokens: np.ndarray, chunk: int) -> list[duplicates.Documents]:
    cutter = Cutter(EOT)
    parts = [cutter.feed(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)] + [cutter.finish()]
    assert cutter.n_eot == np.count_nonzero(tokens == EOT)
    return parts


def _stream(folder: Path, split: str, tokens: np.ndarray, shard_tokens: int) -> TokenStream:
    shards = []
    for i, start in enumerate(range(0, len(tokens), shard_tokens)):
        part = tokens[start : start + shard_tokens]
        _foreign_shard(folder / f"x_{split}_{i:06d}.bin", part)
        shards.append(Shard(folder / f"x_{split}_{i:06d}.bin", len(part), HEADER_BYTES))
    return TokenStream(split, shards)


def _random(rng: np.random.Generator) -> np.ndarray:
    """Documents of 1 to 90 tokens out of few kinds, so that many are equal, and many equal but for one token."""
    kinds = [rng.integers(0, 3, n) for n in (0, 0, 1, 2, 14, 15, 16, 30, 31, 32, 33, 47, 89)]
    parts = [rng.integers(0, 3, rng.integers(0, 5))]
    for kind in rng.integers(0, len(kinds), 60):
        body = kinds[kind].copy()
        if len(body) and rng.random() < 0.5:
            body[rng.integers(len(body))] ^= 1
        parts += [np.array([EOT]), body]
    return np.concatenate(parts).astype(np.uint16)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_documents_are_those_of_a_loop_over_tokens(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(duplicates, "CHUNK_TOKENS", chunk)
    keys: dict[tuple[int, ...], int] = {}
    for seed in range(20):
        tokens = _random(np.random.default_rng(seed))
        parts = _cut(tokens, chunk)
        starts, lengths, part_keys = (
            np.concatenate([getattr(part, name) for part in parts]).tolist() for name in ("starts", "lengths", "keys")
        )
        wanted = _documents(tokens.tolist())
        assert list(zip(starts, lengths, strict=True)) == [(start, len(document)) for start, document in wanted]
        for key, (_, document) in zip(part_keys, wanted, strict=True):
            edges = (len(document), *document[: duplicates.EDGE], *document[-duplicates.EDGE :])
            assert keys.setdefault(edges, key) == key  # the same however the stream was cut
    assert len(set(keys.values())) == len(keys) > 100


def test_keys_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = _random(np.random.default_rng(1))
    seen = set()
    for chunk in CHUNKS:
        monkeypatch.setattr(duplicates, "CHUNK_TOKENS", chunk)
        seen.add(np.concatenate([part.keys for part in _cut(tokens, chunk)]).tobytes())
    assert len(seen) == 1


def test_gap_takes_the_documents_beside_it() -> None:
    cutter = Cutter(EOT)
    first = cutter.feed(np.array([EOT, 1, EOT, 2], dtype=np.uint16))
    cutter.gap(10)
    second = cutter.feed(np.array([1, EOT, 0, EOT, 1], dtype=np.uint16))
    last = cutter.finish()
    assert [part.starts.tolist() for part in (first, second, last)] == [[0], [15], [17]]
    assert [part.lengths.tolist() for part in (first, second, last)] == [[2], [2], [2]]
    cutter.gap(1)
    assert cutter.finish().starts.tolist() == []


@pytest.mark.parametrize(("chunk", "held"), [(1, 1000), (7, 1000), (7, 20), (32, 1000), (32, 7), (1000, 1), (1000, 1000)])
def test_duplicates_are_those_of_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, held: int) -> None:
    monkeypatch.setattr(duplicates, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(duplicates, "HELD_DOCUMENTS", held)
    n_found = n_other = 0
    for seed in range(1 if held == 1 else 3):
        rng = np.random.default_rng(seed)
        both = _random(rng), _random(rng)
        train_tokens = np.concatenate([both[0], _random(np.random.default_rng(seed))])  # so that both sides share kinds
        val_tokens = np.concatenate([both[1], both[0][: len(both[0]) // 3]])
        val, train = _stream(tmp_path, "val", val_tokens, 50), _stream(tmp_path, "train", train_tokens, 11)
        first_in_train: dict[tuple[int, ...], int] = {}
        for start, document in _documents(train_tokens.tolist()):
            first_in_train.setdefault(document, start)
        wanted = {start: first_in_train.get(document, -1) for start, document in _documents(val_tokens.tolist())}
        found = {}
        for first in range(0, len(wanted), held):
            search = Duplicates(val, train, first)
            for part in _cut(val_tokens, chunk):
                search.add(part)
            search.sort()
            for part in _cut(train_tokens, chunk):
                search.look(part)
            found |= dict(zip(search.starts.tolist(), search.found_at.tolist(), strict=True))
        assert found == wanted
        n_found += sum(place >= 0 for place in wanted.values())
        n_other += sum(place < 0 for place in wanted.values())
    assert n_found > 20 and n_other > 20


def test_documents_alike_at_both_ends_are_told_apart_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template with one number in its middle: one key for all, each document of train is still digested only once."""

    def template(numbers: range) -> np.ndarray:
        rows = np.ones((len(numbers), 60), dtype=np.uint16)
        rows[:, 0], rows[:, 30], rows[:, 31] = EOT, np.array(numbers) % 251 + 4, np.array(numbers) // 251 + 4
        return rows.ravel()

    val, train = template(range(1000)), template(range(900, 2900))
    streams = _stream(tmp_path, "val", val, 10**9), _stream(tmp_path, "train", train, 10**9)
    reads = 0
    read = TokenStream.read

    def count(self: TokenStream, start: int, length: int) -> np.ndarray:
        nonlocal reads
        reads += 1
        return read(self, start, length)

    monkeypatch.setattr(TokenStream, "read", count)
    search = Duplicates(*streams, 0)
    for part in _cut(val, duplicates.CHUNK_TOKENS):
        search.add(part)
    search.sort()
    for part in _cut(train, duplicates.CHUNK_TOKENS):
        search.look(part)
    assert len(set(search._keys.tolist())) == 1
    assert search.found_at[np.argsort(search.starts)].tolist() == [-1] * 900 + [60 * i for i in range(100)]
    assert reads <= 1000 + 2000 + 2 * 100


def test_equal_keys_are_not_yet_equal_documents(tmp_path: Path) -> None:
    val, train = (np.array([EOT, *[1] * 30, middle, *[1] * 30], dtype=np.uint16) for middle in (2, 4))
    search = Duplicates(_stream(tmp_path, "val", val, 10), _stream(tmp_path, "train", train, 20), 0)
    search.add(_cut(val, 100)[1])
    search.sort()
    other = _cut(train, 100)[1]
    assert search._keys.tolist() == other.keys.tolist()
    search.look(other)
    assert search.found_at.tolist() == [-1]


@pytest.mark.parametrize("length", [1, 700])
def test_memory_has_a_bound(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """The module's sizes divided by 16; documents of one token are the worst there are."""
    monkeypatch.setattr(duplicates, "CHUNK_TOKENS", duplicates.CHUNK_TOKENS // 16)
    monkeypatch.setattr(duplicates, "HELD_DOCUMENTS", duplicates.HELD_DOCUMENTS // 16)
    n_documents = 3 * duplicates.HELD_DOCUMENTS // (1 if length == 1 else 10)
    chunk = np.ones(duplicates.CHUNK_TOKENS, dtype=np.uint16)
    tracemalloc.start()
    try:
        cutter, stream = Cutter(EOT), TokenStream("val", [Shard(Path("none"), 10**9, 0)])
        search = Duplicates(stream, stream, 0)
        for offset in range(0, n_documents * length, len(chunk)):
            chunk[:] = 1
            chunk[-offset % length :: length] = EOT
            search.add(cutter.feed(chunk))
        search.add(cutter.finish())
        search.sort()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(search.starts) == min(duplicates.HELD_DOCUMENTS, cutter.n_eot)
    assert 16 * peak < 200e6

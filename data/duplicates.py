"""Documents of a token stream, and those of val that are in train as well, found in one pass over each.

    search = Duplicates(val, train, 0)             # data.verify has the passes
    for tokens in chunks_of_val: search.add(cutter.feed(tokens))

Memory: a few arrays of CHUNK_TOKENS, and about 100 bytes for each document of val that is held, of which there are at most
HELD_DOCUMENTS at a time: where val has more, the search is made again for the next. Train only passes through.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.shards import TokenStream

CHUNK_TOKENS = 1 << 19
HELD_DOCUMENTS = 1 << 20  # 0.05% of FineWeb-100B has about 75,000
EDGE = 16  # tokens of a document's beginning, and of its end, that its key is made of


@dataclass(frozen=True)
class Documents:
    """Whole documents, EOT included: place in the split's stream, length, and a 64-bit key made of the length and the first
    and last EDGE tokens. Equal documents have equal keys. All (n,): int64, int64, uint64."""

    starts: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray


class Cutter:
    """Cuts a stream that arrives in chunks of at most CHUNK_TOKENS into documents: from an EOT to before the next, or to the
    end. What precedes the first EOT, or is next to tokens that cannot be read, is not a whole document.

    Of a document that goes over the border of chunks no more than its first and last EDGE tokens are kept, however long it is:
    in `_block` they lie before the next chunk as if the middle were not there, so that the same two windows give its key.
    """

    def __init__(self, eot: int) -> None:
        self.n_eot = 0
        self._eot, self._offset = eot, 0
        self._start: int | None = None  # of the document that has not ended
        self._carried = 0
        # EDGE before the tokens and EDGE behind them, for windows at either end, which _keys cuts to the document
        self._block = np.zeros(EDGE + 2 * EDGE + CHUNK_TOKENS + EDGE, dtype=np.uint16)
        self._windows = np.lib.stride_tricks.sliding_window_view(self._block, EDGE)

    def feed(self, tokens: np.ndarray) -> Documents:
        """The documents that end within these next tokens of the stream, or where they begin."""
        eots = np.flatnonzero(tokens == self._eot)
        self.n_eot += len(eots)
        begin = EDGE + self._carried
        end = begin + len(tokens)
        self._block[begin:end] = tokens
        starts, heads = eots + self._offset, eots + begin  # in the stream, in the block
        if self._start is not None:
            starts, heads = np.append(self._start, starts), np.append(EDGE, heads)
        self._offset += len(tokens)
        documents = self._cut(starts, heads)
        if len(starts):
            self._start, first = int(starts[-1]), int(heads[-1])
            if end - first > 2 * EDGE:
                self._block[EDGE : 2 * EDGE] = self._block[first : first + EDGE]
                self._block[2 * EDGE : 3 * EDGE] = self._block[end - EDGE : end]
            else:
                self._block[EDGE : EDGE + end - first] = self._block[first:end]
            self._carried = min(end - first, 2 * EDGE)
        return documents

    def gap(self, n_tokens: int) -> None:
        """The next tokens cannot be read: the document before them and the one behind are not whole."""
        self._start, self._carried = None, 0
        self._offset += n_tokens

    def finish(self) -> Documents:
        """The last document, which ends with the stream."""
        if self._start is None:
            return self._cut(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        return self._cut(np.array([self._start, self._offset]), np.array([EDGE, EDGE + self._carried]))

    def _cut(self, starts: np.ndarray, heads: np.ndarray) -> Documents:
        lengths = np.diff(starts)
        return Documents(starts[:-1], lengths, _keys(lengths, self._windows[heads[:-1]], self._windows[heads[1:] - EDGE]))


def _keys(lengths: np.ndarray, heads: np.ndarray, tails: np.ndarray) -> np.ndarray:
    """heads, tails (n, EDGE): tokens from a document's beginning on, and up to its end; what is not its own is cut off."""
    short = np.flatnonzero(lengths < EDGE)
    outside = np.arange(EDGE) >= lengths[short, None]
    heads[short] = np.where(outside, 0, heads[short])
    tails[short] = np.where(outside[:, ::-1], 0, tails[short])
    keys = lengths.astype(np.uint64)
    for word in itertools.chain(heads.view(np.uint64).T, tails.view(np.uint64).T):
        keys ^= word
        keys *= np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio (Knuth, multiplicative hashing); wraps
        keys ^= keys >> np.uint64(29)
    return keys


@dataclass
class Found:
    """Documents of val that are in train as well: how many, their tokens, and of the first (place in val's stream, first place
    in train's, length)."""

    n: int
    n_tokens: int
    examples: list[tuple[int, int, int]]

    def add(self, other: "Found") -> None:
        """Those found among the documents that come after."""
        self.n += other.n
        self.n_tokens += other.n_tokens
        self.examples += other.examples


class Duplicates:
    """Documents of val looked for in train: numbers `first` to `first` + HELD_DOCUMENTS - 1 of val.

    `add` all documents of val, `sort`, then `look` at all documents of train. A document of val that is found is not looked
    for again, and candidates (equal keys) are told apart by a digest, each computed once, before they are compared token by
    token: time grows with the candidates and not with their pairs, even where all documents begin and end alike.
    """

    def __init__(self, val: TokenStream, train: TokenStream, first: int) -> None:
        self._val, self._train, self._first = val, train, first
        self._n_seen = 0
        self._parts: list[Documents] = []

    def add(self, documents: Documents) -> None:
        n = len(documents.starts)
        part = slice(max(0, self._first - self._n_seen), max(0, self._first + HELD_DOCUMENTS - self._n_seen))
        self._n_seen += n
        if part.start < n and part.stop > 0:
            self._parts.append(Documents(documents.starts[part], documents.lengths[part], documents.keys[part]))

    def sort(self) -> None:
        def joined(name: str, dtype: type) -> np.ndarray:
            return np.concatenate([np.empty(0, dtype=dtype), *(getattr(part, name) for part in self._parts)])

        self._keys = joined("keys", np.uint64)
        order = np.argsort(self._keys, kind="stable")
        self._keys = self._keys[order]
        self.starts, self.lengths = joined("starts", np.int64)[order], joined("lengths", np.int64)[order]
        self._parts = []
        self.found_at = np.full(len(order), -1, dtype=np.int64)  # in train
        self._digests = np.zeros(len(order), dtype=np.uint64)  # 0: not computed
        self._missing = np.zeros(len(order), dtype=np.int32)  # by first document of a key: how many were not found
        firsts = np.flatnonzero(np.append(True, self._keys[1:] != self._keys[:-1])[: len(order)])
        self._missing[firsts] = np.diff(firsts, append=len(order))

    def look(self, documents: Documents) -> None:
        if not len(self._keys):
            return
        places = np.minimum(np.searchsorted(self._keys, documents.keys), len(self._keys) - 1)
        candidates = np.flatnonzero((self._keys[places] == documents.keys) & (self._missing[places] > 0))
        columns = (column[candidates].tolist() for column in (places, documents.starts, documents.lengths))
        for at, start, length in zip(*columns, strict=True):
            if self._missing[at]:
                self._compare(at, start, length)

    def found(self, n_examples: int) -> Found:
        found = np.flatnonzero(self.found_at >= 0)
        first = found[np.argsort(self.starts[found])][:n_examples]
        examples = zip(*(column[first].tolist() for column in (self.starts, self.found_at, self.lengths)), strict=True)
        return Found(len(found), int(self.lengths[found].sum()), list(examples))

    def _compare(self, at: int, start: int, length: int) -> None:
        end = at + int(np.searchsorted(self._keys[at:], self._keys[at], side="right"))
        alike = at + np.flatnonzero(self.found_at[at:end] < 0)
        alike = alike[self.lengths[alike] == length]
        if len(alike) > 1:
            for number in alike[self._digests[alike] == 0].tolist():
                self._digests[number] = _digest(self._val, int(self.starts[number]), length)
            alike = alike[self._digests[alike] == np.uint64(_digest(self._train, start, length))]
        for number in alike.tolist():
            if _equal(self._val, int(self.starts[number]), self._train, start, length):
                self.found_at[number] = start
                self._missing[at] -= 1


def _pieces(stream: TokenStream, start: int, length: int) -> Iterator[np.ndarray]:
    for offset in range(0, length, CHUNK_TOKENS):
        yield stream.read(start + offset, min(CHUNK_TOKENS, length - offset))


def _digest(stream: TokenStream, start: int, length: int) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for piece in _pieces(stream, start, length):
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little") | 1


def _equal(a: TokenStream, a_start: int, b: TokenStream, b_start: int, length: int) -> bool:
    both = zip(_pieces(a, a_start, length), _pieces(b, b_start, length), strict=True)
    return all(np.array_equal(piece, other) for piece, other in both)

"""Tokenizers: text to uint16 ids and back, the same interface for GPT-2's BPE and for plain bytes.

    from data.tokenizer import get_tokenizer
    tokenizer = get_tokenizer("byte")              # "gpt2" needs OpenAI's vocabulary, "byte" needs nothing
    ids = tokenizer.encode(["hello", "world"])     # one uint16 array per text, without EOT
    tokenizer.decode(ids[0])                       # "hello"
"""

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from command_line import InputError

EOT_TEXT = "<|endoftext|>"

# tiktoken keeps a download under the sha1 of its URL, so these are the names under which it looks for OpenAI's two files.
GPT2_CACHE_FILES = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}
_LOAD_DEADLINE_S = 20.0  # both files together have 1.5 MB; tiktoken's own download has no time limit

# What \s means in tiktoken's pattern: Unicode's White_Space, to which Python's \s would add U+001C to U+001F.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LAST_BOUNDARY = re.compile(f".*[^{_SPACE}](?=[{_SPACE}])", re.DOTALL)
_LONG_RUN = re.compile(f"(?<![{_SPACE}])[{_SPACE}]{{1000,}}+(?=[^{_SPACE}])")
_RUN_CHECK_CHARS = 100_000  # shorter texts cannot hold a run that hurts


class Tokenizer(ABC):
    """Ids 0 .. vocab_size-1, all below 65536; `eot` is the id that precedes each document."""

    name: str
    vocab_size: int
    eot: int

    def encode(self, texts: Iterable[str]) -> list[np.ndarray]:
        """One uint16 array per text. No EOT is added, and "<|endoftext|>" inside a text is ordinary text. Lone surrogates
        become U+FFFD."""
        return [self._encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, EOT becomes "<|endoftext|>".
        InputError: an id outside 0 .. vocab_size-1, such as one of the padding rows of a model's embedding."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            raise InputError(f"cannot decode id {wrong[0]}: tokenizer {self.name} has ids 0 to {self.vocab_size - 1}")
        return self._decode(ids.tolist()).decode("utf-8", errors="replace")

    @abstractmethod
    def _encode(self, text: str) -> np.ndarray:
        """The uint16 ids of one text."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> bytes:
        """The bytes of ids that are all in the vocabulary."""


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and EOT."""

    name, vocab_size, eot = "byte", 257, 256

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint16)

    def _decode(self, ids: list[int]) -> bytes:
        return b"".join(EOT_TEXT.encode() if i == self.eot else bytes((i,)) for i in ids)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE by tiktoken: the ids of `encode_ordinary`, also for texts on which that panics."""

    name, vocab_size, eot = "gpt2", 50257, 50256

    def __init__(self) -> None:
        self._encoding = _load_gpt2()

    def _encode(self, text: str) -> np.ndarray:
        if len(text) < _RUN_CHECK_CHARS:
            return self._encode_part(text)
        parts = [self._encode_part(part) for part in _cut_long_runs(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_part(self, text: str) -> np.ndarray:
        try:
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            ids = self._encoding.encode_to_numpy(_replace_surrogates(text), disallowed_special=())
        return ids.astype(np.uint16)  # cannot wrap: every id is below 50257

    def _decode(self, ids: list[int]) -> bytes:
        return self._encoding.decode_bytes(ids)


TOKENIZERS: dict[str, type[Tokenizer]] = {"gpt2": GPT2Tokenizer, "byte": ByteTokenizer}
NAMES = tuple(TOKENIZERS)


def get_tokenizer(name: str) -> Tokenizer:
    """Tokenizer "gpt2" or "byte". InputError: another name, or GPT-2's vocabulary is neither cached nor to be had."""
    if name not in TOKENIZERS:
        raise InputError(f"tokenizer: wanted one of {', '.join(NAMES)}, found {name!r}")
    return TOKENIZERS[name]()


def split_text(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text that arrives in chunks of any size into pieces whose ids, joined, are those of the whole text.

    A cut is made only between a character and white space after it. No piece of GPT-2's pattern reaches over such a place
    (all are either white space alone or end with their last other character) and its look-ahead sees white space only. A
    stretch without such a place is kept whole, however long.
    """
    held: list[str] = []  # what came without a place to cut
    before = ""  # its last character
    newest = ""  # cut only when more follows, so that a short text stays whole
    for chunk in chunks:
        if not chunk:
            continue
        match = _LAST_BOUNDARY.match(before + newest)
        if match:
            cut = match.end() - len(before)
            yield "".join(held) + newest[:cut]
            held, newest = [], newest[cut:]
        held.append(newest)
        before, newest = newest[-1:], chunk
    if newest:
        yield "".join(held) + newest


def _cut_long_runs(text: str) -> Iterator[str]:
    """Cut before the last character of every long run of white space that something follows.

    The pattern's `\\s+(?!\\S)` backtracks over such a run, and from 999,999 characters on its stack overflows. It ends up
    matching all but the last character of the run, which is what `\\s++$` matches, without backtracking, where the text
    ends at that place.
    """
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end() - 1]
        start = run.end() - 1
    yield text[start:]


def utf8(text: str) -> bytes:
    """The bytes that a text stands for: its surrogates are replaced as tokenizing replaces them."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return _replace_surrogates(text).encode("utf-8")


def _replace_surrogates(text: str) -> str:
    """Surrogate pairs become the character that they mean, lone ones U+FFFD (as tiktoken does)."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _load_gpt2() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise InputError(f"tokenizer gpt2 needs the package tiktoken ({error}); tokenizer byte needs nothing") from None

    outcome: list[Any] = []

    def load() -> None:
        try:
            outcome.append(tiktoken.get_encoding("gpt2"))
        except Exception as error:  # noqa: BLE001 - reported by the caller, whatever it is
            outcome.append(error)

    # On a machine whose network swallows packets the download would hang for minutes: it is given up on here, and the
    # thread ends with the process.
    thread = threading.Thread(target=load, name="load-gpt2-vocabulary", daemon=True)
    thread.start()
    thread.join(_LOAD_DEADLINE_S)
    if outcome and not isinstance(outcome[0], Exception):
        return outcome[0]
    reason = type(outcome[0]).__name__ if outcome else f"no answer within {_LOAD_DEADLINE_S:.0f} s"
    folder = os.environ.get("TIKTOKEN_CACHE_DIR")
    raise InputError(
        f"tokenizer gpt2: its vocabulary is not in TIKTOKEN_CACHE_DIR ({folder or 'not set'}) and could not be downloaded "
        f"({reason}). Offline: put OpenAI's files into a folder, "
        + ", ".join(f"{file} as {cached}" for file, cached in GPT2_CACHE_FILES.items())
        + ", and set TIKTOKEN_CACHE_DIR to that folder. --tokenizer=byte needs nothing"
    )

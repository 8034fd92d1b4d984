"""data/tokenizer.py: ids against tiktoken itself, odd texts, what happens without a vocabulary."""

import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken

import data.tokenizer
from command_line import InputError
from data.tokenizer import EOT_TEXT, GPT2_CACHE_FILES, get_tokenizer, split_text

ODD_TEXTS = [
    "",
    "hello world",
    "a\x00b\x00",
    EOT_TEXT + "x" + EOT_TEXT,
    "don't  stop\r\n\r\n\tnow   ",
    "naïve 日本語 🙂 e\u0301",
    "lone \ud800 and \udc00 end \ud83d",
    "pair \ud83d\ude42",
    "\ufefftext",
    " \u3000\u2028\x85\x1c\x1d x",
]
WELL_FORMED = [text for text in ODD_TEXTS if not re.search("[\ud800-\udfff]", text)]


@pytest.fixture(params=["byte", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, gpt2_vocabulary: Path) -> data.tokenizer.Tokenizer:
    return get_tokenizer(request.param)


@pytest.fixture
def gpt2(gpt2_vocabulary: Path) -> data.tokenizer.Tokenizer:
    return get_tokenizer("gpt2")


def test_round_trip(tokenizer: data.tokenizer.Tokenizer) -> None:
    for text, ids in zip(WELL_FORMED, tokenizer.encode(WELL_FORMED), strict=True):
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot not in ids


def test_surrogates_become_replacement_characters_and_pairs_are_joined(tokenizer: data.tokenizer.Tokenizer) -> None:
    lone, pair = tokenizer.encode(["lone \ud800 and \udc00 end \ud83d", "pair \ud83d\ude42"])
    assert tokenizer.decode(lone) == "lone \ufffd and \ufffd end \ufffd"
    assert tokenizer.decode(pair) == "pair 🙂"


def test_every_id_decodes_and_no_other(tokenizer: data.tokenizer.Tokenizer) -> None:
    assert tokenizer.decode(np.arange(tokenizer.vocab_size)).endswith(EOT_TEXT)
    for i in range(tokenizer.vocab_size):
        tokenizer.decode([i])
    assert tokenizer.decode([]) == ""
    for wrong in (tokenizer.vocab_size, -1):
        with pytest.raises(InputError, match=f"id {wrong}:"):
            tokenizer.decode([0, wrong])


def test_known_ids(gpt2_vocabulary: Path) -> None:
    gpt2, byte = get_tokenizer("gpt2"), get_tokenizer("byte")
    assert (gpt2.vocab_size, gpt2.eot, byte.vocab_size, byte.eot) == (50257, 50256, 257, 256)
    assert gpt2.encode(["hello world"])[0].tolist() == [31373, 995]
    assert byte.encode(["hé"])[0].tolist() == [0x68, 0xC3, 0xA9]
    assert byte.decode([0x68, 0xC3, 256]) == "h\ufffd" + EOT_TEXT


def test_gpt2_gives_tiktokens_ordinary_ids(gpt2: data.tokenizer.Tokenizer) -> None:
    reference = tiktoken.get_encoding("gpt2")
    for text, ids in zip(ODD_TEXTS, gpt2.encode(ODD_TEXTS), strict=True):
        assert ids.tolist() == reference.encode_ordinary(text), repr(text)


LONG_RUNS = ["a" * 1_000_000, " " * 1_000_000, "\n" * 1_000_000 + "a", "1" * 1_000_000]


@pytest.mark.parametrize("text", LONG_RUNS, ids=lambda text: repr(text[-2:]))
def test_long_runs_neither_panic_nor_take_minutes(tokenizer: data.tokenizer.Tokenizer, text: str) -> None:
    start = time.perf_counter()
    ids = tokenizer.encode([text])[0]
    assert time.perf_counter() - start < 30
    assert tokenizer.decode(ids) == text


def test_white_space_before_a_word_splits_as_gpt2s_pattern_says(gpt2: data.tokenizer.Tokenizer) -> None:
    space, word = gpt2.encode([" ", " word"])
    ids = gpt2.encode([" " * 1_000_000 + "word"])[0]
    assert ids.tolist() == space.tolist() * 999_999 + word.tolist()


SPACES = [chr(i) for i in range(0x10000) if chr(i).isspace()]
UNITS = [*SPACES, *"    \n\n", "a", "b", "don't", "'s", "'", "12", "½", "!", "é", "日", "\x00", "\u200b", "<|endoftext|>"]


def _random_text(rng: random.Random, n_units: int, longest_run: int) -> str:
    return "".join(rng.choice(UNITS) * rng.choice((1, 1, 1, 2, 5, rng.randint(1, longest_run))) for _ in range(n_units))


def test_cutting_long_runs_keeps_the_ids(gpt2: data.tokenizer.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tiktoken.get_encoding("gpt2")
    monkeypatch.setattr(data.tokenizer, "_RUN_CHECK_CHARS", 0)
    rng = random.Random(0)
    n_cut = 0
    for _ in range(60):
        text = _random_text(rng, 40, 3000)
        n_cut += len(list(data.tokenizer._cut_long_runs(text))) > 1
        assert gpt2.encode([text])[0].tolist() == reference.encode_ordinary(text)
    assert n_cut > 20


def test_split_text_keeps_the_ids(gpt2: data.tokenizer.Tokenizer) -> None:
    rng = random.Random(1)
    n_pieces = 0
    for _ in range(300):
        text = _random_text(rng, 60, 20)
        chunks, place = [], 0
        while place < len(text):
            size = rng.randint(0, 40)
            chunks.append(text[place : place + size])
            place += size
        pieces = list(split_text(chunks))
        n_pieces += len(pieces)
        assert "".join(pieces) == text
        assert np.concatenate(gpt2.encode(pieces)).tolist() == gpt2.encode([text])[0].tolist()
    assert n_pieces > 1500  # or the test would show little
    assert list(split_text([])) == [] == list(split_text([""]))
    assert list(split_text(["abc", " de", "f ", " gh", "i"])) == ["abc", " def", "  ghi"]
    assert list(split_text(["all of a short text"])) == ["all of a short text"]


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="gpt2, byte.*'gpt3'"):
        get_tokenizer("gpt3")


def test_without_vocabulary_or_network_says_how_to_place_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", refuse)
    _check_advice(tmp_path, monkeypatch, "ConnectionError")


def test_a_network_that_does_not_answer_is_given_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.tokenizer, "_LOAD_DEADLINE_S", 0.1)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: time.sleep(2))
    _check_advice(tmp_path, monkeypatch, "no answer within")


def _check_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    start = time.perf_counter()
    with pytest.raises(InputError) as caught:
        get_tokenizer("gpt2")
    assert time.perf_counter() - start < 2
    wanted = ["TIKTOKEN_CACHE_DIR", str(tmp_path), reason, "--tokenizer=byte", *GPT2_CACHE_FILES, *GPT2_CACHE_FILES.values()]
    assert [word for word in wanted if word not in str(caught.value)] == []
    get_tokenizer("byte")

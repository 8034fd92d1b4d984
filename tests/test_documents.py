"""data/documents.py: what comes out of parquet and jsonl files, from any row on, damaged or not."""

import hashlib
import io
import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command_line import InputError
from data import documents, hub
from data.documents import Block, DocumentError, Position, count_rows, document_hash, local_source, read_batches, tokenize_batch
from data.tokenizer import ByteTokenizer, get_tokenizer

BEGINNING = Position()
ODD = ["plain", "", "<|endoftext|> in a text", "nul \0 in it", "ü 漢字 🏳️‍🌈", "x" * 5000, " \n\t ", "ends in a space ", "\r\n"]


def words(n: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abc é漢\n", k=draw.randrange(1, 60))) for _ in range(n)]


def write_parquet(path: Path, texts: list[str | None], row_group: int = 100, kind: pa.DataType | None = None, **more) -> Path:
    column = pa.array(texts, kind or pa.string())
    pq.write_table(pa.table({"text": column, "id": [str(i) for i in range(len(texts))]}), path, row_group_size=row_group, **more)
    return path


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def never(reason: str, seconds: float) -> None:
    raise AssertionError(reason)


def read(path: Path, start: Position = BEGINNING, skip_bad: bool = False) -> list[documents.Batch]:
    return list(read_batches(local_source(path.name, path), start, "text", skip_bad=skip_bad, pause=never))


def texts_of(batches: list[documents.Batch]) -> list[str]:
    found = []
    for batch in batches:
        begin = 0
        for end in batch.block.ends:
            raw = batch.block.data[begin:end]
            found.append(json.loads(raw)["text"] if batch.block.is_json else raw.decode())
            begin = end
    return found


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_parquet_gives_its_texts(tmp_path, kind):
    texts = ODD + words(1000)
    batches = read(write_parquet(tmp_path / "a.parquet", texts, kind=kind))
    assert texts_of(batches) == texts
    assert [batch.block.first_row for batch in batches] == [0, *(batch.next.row for batch in batches[:-1])]
    assert batches[-1].bytes_done == (tmp_path / "a.parquet").stat().st_size


def test_jsonl_gives_its_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_BYTES", 500)
    texts = ODD + words(300)
    assert texts_of(read(write_jsonl(tmp_path / "a.jsonl", texts))) == texts
    without_end = tmp_path / "b.jsonl"
    without_end.write_bytes((tmp_path / "a.jsonl").read_bytes()[:-1])
    assert texts_of(read(without_end)) == texts


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_goes_on_after_every_batch(tmp_path, monkeypatch, write):
    monkeypatch.setattr(documents, "BATCH_BYTES", 700)
    monkeypatch.setattr(documents, "_ROWS_PER_READ", 33)
    path = write(tmp_path / f"a.{'parquet' if write is write_parquet else 'jsonl'}", texts := words(400))
    batches = read(path)
    assert len(batches) > 20
    for i, batch in enumerate(batches):
        assert texts_of(batches[: i + 1]) + texts_of(read(path, batch.next)) == texts


def test_blocks_are_cut_by_bytes_and_a_long_document_is_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_BYTES", 100)
    batches = read(write_parquet(tmp_path / "a.parquet", ["a" * 60, "b" * 30, "c" * 5000, "d", "e"]))
    assert [len(batch.block.data) for batch in batches] == [90, 5000, 2]


def test_tokens_split_and_counts():
    texts = ODD + words(500)
    data = [text.encode() for text in texts]
    block = Block(b"".join(data), np.cumsum([len(d) for d in data]), False, 0)
    result = tokenize_batch(block, ByteTokenizer(), "text", 0.3)
    for split, found in result.tokens.items():
        wanted = []
        for text in texts:
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            is_val = int.from_bytes(digest, "little") / 2**64 < 0.3
            if text and is_val == (split == "val"):
                wanted += [256, *text.encode()]
        assert found.dtype == np.uint16 and found.tolist() == wanted
    assert (result.n_documents, result.n_empty, result.bad) == (len(texts) - 1, 1, [])


def test_the_split_is_even_and_of_the_text_alone():
    hashes = np.array([document_hash(text) for text in {*words(20_000)}], dtype=np.uint64)
    share = (hashes < np.uint64(0.05 * 2**64)).mean()
    assert abs(share - 0.05) < 5 * (0.05 * 0.95 / len(hashes)) ** 0.5
    assert document_hash("same") == document_hash("same") != document_hash("same ")


def test_hard_documents_of_gpt2(gpt2_vocabulary):
    """Against Hugging Face's encoder, an implementation of its own."""
    from tokenizers import ByteLevelBPETokenizer
    folder = Path(gpt2_vocabulary)
    encoder = ByteLevelBPETokenizer(str(folder / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"),
                                    str(folder / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"))
    texts = [*ODD, "a" * 1_000_000, "word " * 1_000_000, "\n" * 300_000 + "x"]
    data = [text.encode() for text in texts]
    block = Block(b"".join(data), np.cumsum([len(d) for d in data]), False, 0)
    result = tokenize_batch(block, get_tokenizer("gpt2"), "text", 0.0)
    wanted = [i for text in texts if text for i in (50256, *encoder.encode(text).ids)]
    assert result.tokens["train"].tolist() == wanted


def test_surrogates_in_json_become_replacement_characters():
    line = b'{"text": "a \\ud800 b \\ud83d\\ude00"}\n'
    result = tokenize_batch(Block(line, np.array([len(line)]), True, 0), ByteTokenizer(), "text", 0.0)
    assert bytes(result.tokens["train"][1:].tolist()).decode() == "a \ufffd b \U0001f600"


@pytest.mark.parametrize("line, said", [
    (b"{", "not JSON"), (b"[1]", "found list"), (b'{"body": ""}', "no field 'text'; it has body"),
    (b'{"text": 3}', "wanted a string, found int"), (b'{"text": null}', "found NoneType"), (b'{"text": "\xff"}', "not UTF-8"),
    (b"[" * 100_000, "not JSON"),
])
def test_bad_lines_are_named(line, said):
    good = b'{"text": "good"}\n'
    data = good + b"\n" + line + b"\n" + good
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
    result = tokenize_batch(Block(data, ends, True, 10), ByteTokenizer(), "text", 0.0)
    ((row, reason),) = result.bad
    assert row == 12 and said in reason
    assert result.n_documents == 2 and result.n_empty == 0


def test_a_byte_order_mark_is_dropped_at_the_beginning(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "x"}\n')
    (batch,) = read(path)
    assert tokenize_batch(batch.block, ByteTokenizer(), "text", 0.0).tokens["train"].tolist() == [256, ord("x")]


def test_null_and_broken_utf8_in_parquet(tmp_path):
    texts = ["one", None, "three"]
    (batch,) = read(write_parquet(tmp_path / "a.parquet", texts))
    result = tokenize_batch(batch.block, ByteTokenizer(), "text", 0.0)
    assert result.bad == [(1, "'text' is null, wanted a string")] and result.n_documents == 2
    (batch,) = read(write_parquet(tmp_path / "b.parquet", ["one", "two", "three"], use_dictionary=False, compression="none"))
    data = batch.block.data.replace(b"two", b"t\xffo")
    result = tokenize_batch(Block(data, batch.block.ends, False, 7), ByteTokenizer(), "text", 0.0)
    assert result.bad == [(8, "not UTF-8 (byte 0xff)")]


def damage(path: Path, group: int) -> None:
    """Overwrite the text of one row group with zeros: its pages no longer decompress."""
    column = pq.ParquetFile(path).metadata.row_group(group).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(bytes(column.total_compressed_size))


def test_a_damaged_row_group(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", texts := words(500))
    damage(path, 2)
    with pytest.raises(DocumentError, match=r"a\.parquet: row 200: not readable as parquet"):
        read(path)
    batches = read(path, skip_bad=True)
    assert texts_of(batches) == texts[:200] + texts[300:]
    left_out = [entry for batch in batches for entry in batch.unreadable]
    assert [entry[:2] for entry in left_out] == [(200, 300)]
    for batch in batches:  # the same when it goes on from anywhere, and never listed twice
        after = read(path, batch.next, skip_bad=True)
        done = [entry for b in batches[: batches.index(batch) + 1] for entry in b.unreadable]
        assert [*done, *(entry for b in after for entry in b.unreadable)] == left_out


def test_the_last_row_group_damaged(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", texts := words(250))
    damage(path, 2)
    batches = read(path, skip_bad=True)
    assert texts_of(batches) == texts[:200] and batches[-1].unreadable[0][:2] == (200, 250)
    assert batches[-1].next == Position(250)


def test_what_is_no_parquet_or_has_no_text(tmp_path):
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"PAR1 not at all PAR1")
    with pytest.raises(InputError, match=r"a\.parquet: not readable as parquet"):
        count_rows(local_source("a.parquet", broken), "text", 1)
    good = write_parquet(tmp_path / "b.parquet", ["x"])
    with pytest.raises(InputError, match=r"b\.parquet: no column 'body'; it has text, id \(--text_field\)"):
        count_rows(local_source("b.parquet", good), "body", 1)
    pq.write_table(pa.table({"text": [1, 2]}), good)
    with pytest.raises(InputError, match=r"column 'text': wanted strings, found int64"):
        count_rows(local_source("b.parquet", good), "text", 1)


def test_rows_are_counted_up_to_what_is_enough(tmp_path):
    texts = ["x" * 700_000, *words(3000), "x" * 700_000, *words(3000)]
    assert count_rows(local_source("a.parquet", write_parquet(tmp_path / "a.parquet", texts)), "text", 1) == 6002
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    assert count_rows(local_source("a", path), "text", 10_000) == 6002
    assert 10 <= count_rows(local_source("a", path), "text", 10) < 3100
    assert count_rows(local_source("a", path), "text", 0) == 0
    os.truncate(path, path.stat().st_size - 1)  # the last line has no end
    assert count_rows(local_source("a", path), "text", 10_000) == 6002
    assert count_rows(local_source("b", write_jsonl(tmp_path / "b.jsonl", [])), "text", 10) == 0


def test_identity_follows_content(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", words(100))
    before = local_source("a", path).identity
    assert local_source("b", path).identity == before
    write_parquet(path, words(100, seed=1))
    assert local_source("a", path).identity != before


class Flaky:
    """A file on the hub: breaks off after `limit` bytes read, then comes back, some times over."""

    def __init__(self, data: bytes, faults: int, limit: int):
        self.data, self.faults, self.limit, self.opened = data, faults, limit, 0

    def open(self, url: str, size: int) -> io.BytesIO:
        self.opened += 1
        outer = self

        class Handle(io.BytesIO):
            left = outer.limit

            def read(self, n: int = -1) -> bytes:
                found = super().read(n)
                Handle.left -= len(found)
                if Handle.left < 0 and outer.faults:
                    outer.faults -= 1
                    raise ConnectionResetError("gone")
                return found

        return Handle(self.data)


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_the_network_is_asked_again_and_no_document_comes_twice(tmp_path, monkeypatch, write):
    monkeypatch.setattr(documents, "BATCH_BYTES", 700)
    path = write(tmp_path / f"a.{'parquet' if write is write_parquet else 'jsonl'}", texts := words(400))
    size = path.stat().st_size
    flaky = Flaky(path.read_bytes(), faults=3, limit=size // 8)
    monkeypatch.setattr(hub, "open_file", flaky.open)
    monkeypatch.setattr(hub, "is_transient", lambda error: isinstance(error, ConnectionError))
    pauses = []
    source = documents.Source(path.name, f"hf://{path.name}", size, "")
    batches = list(read_batches(source, Position(), "text", skip_bad=False, pause=lambda *pause: pauses.append(pause)))
    assert texts_of(batches) == texts and flaky.faults == 0 and flaky.opened == len(pauses) + 1
    assert all("no answer from the hub (gone)" in reason for reason, _ in pauses)


def test_a_network_that_stays_away(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", words(10))
    flaky = Flaky(path.read_bytes(), faults=100, limit=0)
    monkeypatch.setattr(hub, "open_file", flaky.open)
    monkeypatch.setattr(hub, "is_transient", lambda error: isinstance(error, ConnectionError))
    source = documents.Source(path.name, f"hf://{path.name}", 1, "")
    pauses = []
    with pytest.raises(DocumentError, match=r"a\.jsonl: row 0: no answer from the hub \(gone\) \(after 8 more attempts\)"):
        list(read_batches(source, Position(), "text", skip_bad=False, pause=lambda _, seconds: pauses.append(seconds)))
    assert pauses == sorted(pauses) and len(pauses) == 8

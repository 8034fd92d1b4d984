"""data/shards.py: the format byte by byte, reading over borders, every fault."""

import hashlib
import json
import os
import pickle
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

import data.shards
from command_line import InputError
from data.shards import META, UNFINISHED, Dataset, ShardWriter, begin, main, open_dataset, write_meta

EOT = 256
TOKENS = np.random.Generator(np.random.PCG64(0)).integers(0, 257, 2500, dtype=np.uint16)
TOKENS[0] = EOT


def _write(folder: Path, splits: dict[str, np.ndarray], shard_tokens: int = 700) -> None:
    entries = {}
    begin(folder, {"source": "test"})
    for split, tokens in splits.items():
        with ShardWriter(folder, "x", split, eot=EOT, shard_tokens=shard_tokens) as writer:
            for part in np.array_split(tokens, 7):
                writer.write(part)
            entries[split] = writer.close()
    write_meta(folder, tokenizer="byte", vocab_size=257, eot=EOT, splits=entries, source="test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _write(tmp_path / "set", {"train": TOKENS, "val": TOKENS[:300]})
    return tmp_path / "set"


def _foreign_shard(path: Path, tokens: np.ndarray, magic: int = 20240520, version: int = 1, count: int | None = None) -> None:
    """llm.c's format, written from its description."""
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    path.write_bytes(header + b"".join(struct.pack("<H", token) for token in tokens))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Writing


def test_shard_files_byte_by_byte(folder: Path) -> None:
    assert sorted(_files(folder)) == [META, *(f"x_train_{i:06d}.bin" for i in range(4)), "x_val_000000.bin"]
    for i in range(4):
        part = TOKENS[700 * i : 700 * (i + 1)]
        _foreign_shard(folder / "reference", part)
        content = (folder / f"x_train_{i:06d}.bin").read_bytes()
        assert content == (folder / "reference").read_bytes()
        entry = json.loads((folder / META).read_text())["splits"]["train"][i]
        assert entry == {
            "file": f"x_train_{i:06d}.bin",
            "tokens": len(part),
            "documents": int((part == EOT).sum()),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def test_meta_says_what_the_folder_is(folder: Path) -> None:
    meta = json.loads((folder / META).read_text())
    splits = meta.pop("splits")
    assert meta == {
        "format_version": 1, "tokenizer": "byte", "vocab_size": 257, "eot": 256, "dtype": "uint16", "source": "test"
    }  # fmt: skip
    assert sorted(splits) == ["train", "val"]


@pytest.mark.parametrize("tokens", [[-1], [65536], [2**40], [1.0], [[1, 2]]])
def test_ids_that_would_wrap_are_refused(tmp_path: Path, tokens: list) -> None:
    with ShardWriter(tmp_path, "x", "train", eot=EOT) as writer, pytest.raises(InputError, match="tokens: wanted"):
        writer.write(np.array(tokens))
    assert _files(tmp_path) == {}


def test_other_integer_types_and_strided_rows_are_written(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "x", "train", eot=EOT) as writer:
        writer.write(np.array([0, 65535], dtype=np.int64))
        writer.write(np.arange(10, dtype=np.uint16)[::3])
        writer.write(np.array([], dtype=np.float64))
        assert writer.n_tokens == 6
        writer.close()
    content = (tmp_path / "x_train_000000.bin").read_bytes()
    assert np.frombuffer(content[1024:], "<u2").tolist() == [0, 65535, 0, 3, 6, 9]


def _writer(folder: Path, shard_tokens: int = 100) -> ShardWriter:
    return ShardWriter(folder, "x", "train", eot=EOT, shard_tokens=shard_tokens)


def test_an_unfinished_shard_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="stop"), _writer(tmp_path) as writer:
        writer.write(TOKENS[:250])
        assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["x_train_000000.bin", "x_train_000001.bin"]
        raise OSError("stop")
    assert sorted(_files(tmp_path)) == [".x_train.tmp", "x_train_000000.bin", "x_train_000001.bin"]


@pytest.mark.parametrize("saved", [0, 1, 99, 100, 101, 250, 300])
@pytest.mark.parametrize("lost", [0, 1, 60, 350])
def test_goes_on_from_any_saved_state(tmp_path: Path, saved: int, lost: int) -> None:
    """What was written after `save` is dropped, shards that became complete since included."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        folder.mkdir()
    with _writer(straight) as writer:
        writer.write(TOKENS[:700])
        wanted = writer.close()
    with _writer(broken) as writer:
        writer.write(TOKENS[:saved])
        state = json.loads(json.dumps(writer.save()))
        writer.write(TOKENS[saved : saved + lost])
    with _writer(broken) as writer:
        writer.resume(state)
        assert writer.n_tokens == saved
        writer.write(TOKENS[saved:700])
        assert writer.close() == wanted and writer.n_tokens == 700
    assert _files(broken) == _files(straight)


@pytest.mark.parametrize("gone, said", [("x_train_000001.bin", "missing"), (".x_train.tmp", "of an unfinished shard, found 0")])
def test_a_saved_state_whose_files_are_gone(tmp_path: Path, gone: str, said: str) -> None:
    with _writer(tmp_path) as writer:
        writer.write(TOKENS[:250])
        state = writer.save()
    (tmp_path / gone).unlink()
    with pytest.raises(InputError, match=f"{gone}.*{said}"), _writer(tmp_path) as writer:
        writer.resume(state)


def test_failed_meta_leaves_the_old_one_and_the_mark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _files(folder)
    begin(folder, {})

    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_meta(folder, tokenizer="byte", vocab_size=257, eot=EOT, splits={})
    after = _files(folder)
    assert after.pop(UNFINISHED) and after == before


@pytest.mark.parametrize("shard_tokens", [0, -5, 2**31])
def test_shard_size_has_bounds(tmp_path: Path, shard_tokens: int) -> None:
    with pytest.raises(InputError, match=f"shard_tokens: .*found {shard_tokens}"):
        ShardWriter(tmp_path, "x", "train", eot=EOT, shard_tokens=shard_tokens)


# Reading


def test_stream_reads_over_borders(folder: Path) -> None:
    stream = open_dataset(folder).train
    assert stream.n_tokens == 2500
    rng = np.random.Generator(np.random.PCG64(1))
    for _ in range(300):
        start, end = sorted(rng.integers(0, 2501, 2).tolist())
        tokens = stream.read(start, end - start)
        assert tokens.dtype == np.uint16 and np.array_equal(tokens, TOKENS[start:end])
    for start, length in ((-1, 2), (0, 2501), (2500, 1), (5, -1)):
        with pytest.raises(IndexError):
            stream.read(start, length)
    assert stream.read(2500, 0).tolist() == stream.read(0, 0).tolist() == []


def test_locate(folder: Path) -> None:
    stream = open_dataset(folder).train
    for offset in (0, 699, 700, 1400, 2499):
        assert stream.locate(offset) == (folder / f"x_train_{offset // 700:06d}.bin", offset % 700)
    with pytest.raises(IndexError):
        stream.locate(2500)


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    for i in range(1250):
        _foreign_shard(tmp_path / f"x_train_{i:06d}.bin", TOKENS[2 * i : 2 * i + 2])
    _foreign_shard(tmp_path / "x_val_000000.bin", TOKENS[:2])
    before = len(os.listdir("/proc/self/fd"))
    dataset = open_dataset(tmp_path)
    assert len(dataset.train.shards) == 1250
    assert np.array_equal(dataset.train.read(0, 2500), TOKENS)
    assert len(os.listdir("/proc/self/fd")) <= before + data.shards._MAX_OPEN_FILES
    dataset.train.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert np.array_equal(dataset.train.read(3, 9), TOKENS[3:12])


def test_threads_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.shards, "_MAX_OPEN_FILES", 2)
    _write(tmp_path, {"train": TOKENS, "val": TOKENS}, shard_tokens=100)
    stream = open_dataset(tmp_path).train
    wrong: list[object] = []

    def read(seed: int) -> None:
        rng = np.random.Generator(np.random.PCG64(seed))
        try:
            for start in rng.integers(0, 2300, 500).tolist():
                if not np.array_equal(stream.read(start, 150), TOKENS[start : start + 150]):
                    wrong.append(start)
        except Exception as error:  # noqa: BLE001
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_reads_that_the_system_cuts_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, length, offset: pread(handle, min(length, 33), offset))
    assert np.array_equal(open_dataset(folder).train.read(650, 800), TOKENS[650:1450])


def test_file_truncated_after_opening(folder: Path) -> None:
    stream = open_dataset(folder).train
    os.truncate(folder / "x_train_000001.bin", 1024 + 20)
    assert np.array_equal(stream.read(700, 10), TOKENS[700:710])
    with pytest.raises(InputError, match=r"x_train_000001\.bin: truncated since it was opened, no token 10"):
        stream.read(700, 11)


def test_fingerprint_follows_content_not_place(folder: Path, tmp_path: Path) -> None:
    dataset = open_dataset(folder)
    assert (dataset.tokenizer, dataset.vocab_size) == ("byte", 257)
    folder.rename(tmp_path / "moved")
    assert open_dataset(str(tmp_path / "moved")).fingerprint == dataset.fingerprint
    other = TOKENS.copy()
    other[-1] ^= 1
    _write(tmp_path / "other", {"train": other, "val": TOKENS[:300]})
    assert open_dataset(tmp_path / "other").fingerprint != dataset.fingerprint


def _foreign(folder: Path) -> Dataset:
    folder.mkdir()
    for i in range(3):
        _foreign_shard(folder / f"fineweb_train_{i:06d}.bin", TOKENS[1000 * i : 1000 * (i + 1)])
    _foreign_shard(folder / "fineweb_val_000000.bin", TOKENS[:10])
    _foreign_shard(folder / "val_train_tokens_val_0.bin", TOKENS[10:20])
    (folder / ".fineweb_train_000009.bin").write_bytes(b"hidden")
    (folder / "notes.txt").write_text("not a shard")
    return open_dataset(folder)


def test_llmc_folder_without_meta(tmp_path: Path) -> None:
    dataset = _foreign(tmp_path / "fineweb")
    assert np.array_equal(dataset.train.read(0, 2500), TOKENS) and dataset.train.n_tokens == 2500
    assert np.array_equal(dataset.val.read(0, 20), TOKENS[:20]) and dataset.val.n_tokens == 20
    assert (dataset.meta, dataset.tokenizer, dataset.vocab_size) == (None, None, None)


def test_nanogpt_folder_without_headers(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (os.mkdir, (str(tmp_path / "unpickled"),))

    TOKENS.tofile(tmp_path / "train.bin")
    TOKENS[:7].tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    dataset = open_dataset(tmp_path)
    assert np.array_equal(dataset.train.read(0, 2500), TOKENS) and dataset.val.read(0, 7).tolist() == TOKENS[:7].tolist()
    assert dataset.vocab_size is None and not (tmp_path / "unpickled").exists()


def test_name_under_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.shards, "DATA_FOLDER", folder.parent)
    assert open_dataset("set").folder == folder
    with pytest.raises(InputError, match=r"no folder 'nothing'.*Prepared under data/: set\. Make one: python -m data\.f"):
        open_dataset("nothing")
    with pytest.raises(InputError, match="no folder ''"):
        open_dataset("")


# Faults


def _edit_meta(folder: Path, **changes: object) -> None:
    (folder / META).write_text(json.dumps(json.loads((folder / META).read_text()) | changes))


def _edit_header(path: Path, index: int, value: int) -> None:
    with open(path, "r+b") as file:
        file.seek(4 * index)
        file.write(struct.pack("<i", value))


SHARD = "x_train_000001.bin"


def _shards_edit(folder: Path, **changes: object) -> None:
    splits = json.loads((folder / META).read_text())["splits"]
    splits["train"][1] |= changes
    _edit_meta(folder, splits=splits)


FAULTS = {
    "missing shard": (lambda f: (f / SHARD).unlink(), f"{SHARD}: missing, but listed in {META}"),
    "no header": (lambda f: os.truncate(f / SHARD, 1000), f"{SHARD}: header: wanted 1024 bytes, the file has 1000"),
    "empty file": (lambda f: os.truncate(f / SHARD, 0), f"{SHARD}: header"),
    "magic": (lambda f: _edit_header(f / SHARD, 0, 20240801), f"{SHARD}: magic number: wanted 20240520, found 20240801"),
    "version": (lambda f: _edit_header(f / SHARD, 1, 2), f"{SHARD}: version: wanted 1, found 2"),
    "no tokens": (lambda f: _edit_header(f / SHARD, 2, 0), f"{SHARD}: token count: wanted at least 1, found 0"),
    "negative": (lambda f: _edit_header(f / SHARD, 2, -1), f"{SHARD}: token count: wanted at least 1, found -1"),
    "truncated": (lambda f: os.truncate(f / SHARD, 1024 + 1398), f"{SHARD}: truncated: 700 tokens take 2424 bytes"),
    "trailing": (lambda f: os.truncate(f / SHARD, 1024 + 1402), f"{SHARD}: trailing bytes"),
    "other count": (lambda f: _shards_edit(f, tokens=699), f"{SHARD}: token count: {META} says 699, the header 700"),
    "odd file name": (lambda f: _shards_edit(f, file="../x.bin"), f"{META}: splits.train[1].file: wanted a file name"),
    "dtype": (lambda f: _edit_meta(f, dtype="uint32"), f"{META}: dtype: wanted 'uint16', found 'uint32'"),
    "format version": (lambda f: _edit_meta(f, format_version=2), f"{META}: format_version: wanted 1, found 2"),
    "tokenizer": (lambda f: _edit_meta(f, tokenizer=None), f"{META}: tokenizer"),
    "vocab_size": (lambda f: _edit_meta(f, vocab_size="257"), f"{META}: vocab_size"),
    "empty split": (lambda f: _edit_meta(f, splits={"train": [], "val": []}), f"{META}: splits.train: wanted a list of shards"),
    "not JSON": (lambda f: (f / META).write_text("{"), f"{META}: not JSON"),
    "not an object": (lambda f: (f / META).write_text("[]"), f"{META}: content: wanted an object, found 'list'"),
    "unfinished": (lambda f: (f / META).rename(f / UNFINISHED), f"{UNFINISHED}: this data set was never finished"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_file(folder: Path, fault: str) -> None:
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(InputError) as caught:
        open_dataset(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_faults_of_folders_without_meta(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no train shards; wanted \*_train_\*\.bin, or train\.bin"):
        open_dataset(tmp_path)
    _foreign_shard(tmp_path / "a_train_0.bin", TOKENS[:9])
    with pytest.raises(InputError, match="no val shards"):
        open_dataset(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match=r"val\.bin: wanted uint16 tokens, two bytes each, found 3 bytes"):
        open_dataset(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"")
    with pytest.raises(InputError, match="found 0 bytes"):
        open_dataset(tmp_path)
    _foreign_shard(tmp_path / "val.bin", TOKENS[:9])
    with pytest.raises(InputError, match=r"val\.bin: has a shard's header"):
        open_dataset(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"abcd")
    assert open_dataset(tmp_path).val.read(0, 2).tolist() == [0x6261, 0x6463]
    (tmp_path / "train.bin").write_bytes(b"abcd")
    with pytest.raises(InputError, match=r"holds both train\.bin and a_train_0\.bin"):
        open_dataset(tmp_path)


# Commands


@pytest.mark.parametrize("argv", [[], ["verify"], ["check", "x"], ["verify", "/nowhere/at/all"], ["verify", "x", "--fast"]])
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1

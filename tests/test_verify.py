"""data/verify.py: every fault planted, alone and together; statistics and duplicates as reported; inspect."""

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import data.shards
import data.verify
from command_line import InputError
from data import duplicates
from data.shards import META, UNFINISHED, main
from data.tokenizer import ByteTokenizer
from tests.test_shards import EOT, FAULTS, SHARD, TOKENS, _edit_header, _edit_meta, _files, _foreign_shard, _shards_edit, _write

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _write(tmp_path / "set", {"train": TOKENS, "val": _packed([5, 6], [], [7])})
    return tmp_path / "set"


def _packed(*documents: list[int], eot: int = EOT) -> np.ndarray:
    return np.array([token for document in documents for token in (eot, *document)], dtype=np.uint16)


def _faults(folder: Path, capsys: Capture) -> list[str]:
    """The faults that verify lists, which may read but change nothing."""
    before = _files(folder)
    status = main(["verify", str(folder)])
    faults = [line.removeprefix("fault: ") for line in capsys.readouterr().err.splitlines() if line.startswith("fault: ")]
    assert status == bool(faults) and _files(folder) == before
    return faults


def _report(folder: Path, capsys: Capture) -> list[str]:
    """What verify prints about a folder without faults."""
    assert main(["verify", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def _put(path: Path, place: int, *ids: int) -> None:
    with open(path, "r+b") as file:
        file.seek(1024 + 2 * place)
        file.write(struct.pack(f"<{len(ids)}H", *ids))


# Faults


def test_good_folder(folder: Path, capsys: Capture) -> None:
    n = int((TOKENS == EOT).sum())
    ends = np.diff(np.append(np.flatnonzero(TOKENS == EOT), len(TOKENS)))
    assert _report(folder, capsys) == [
        f"train: 2,500 tokens in 4 shards, {n} documents of {2500 / n:.1f} tokens on average "
        f"({ends.min()} to {ends.max()}, EOT included), {(ends == 1).sum()} empty; begins with EOT",
        "val: 6 tokens in 1 shards, 3 documents of 2.0 tokens on average (1 to 3, EOT included), 1 empty; begins with EOT",
        "duplicates: 0 of 3 val documents (0 tokens) are in train as well, token for token",
        f"{folder}: good: highest id 256, vocabulary 257",
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_headers_sizes_and_meta(folder: Path, fault: str, capsys: Capture) -> None:
    spoil, message = FAULTS[fault]
    spoil(folder)
    assert any(message in line for line in _faults(folder, capsys))
    assert main(["inspect", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def _overwrite_val(folder: Path, tokens: np.ndarray, **meta: object) -> None:
    """A finished folder with another val, as if made so."""
    _write(folder, {"train": TOKENS, "val": tokens})
    _edit_meta(folder, **meta)


def _list_twice(folder: Path) -> None:
    splits = json.loads((folder / META).read_text())["splits"]
    _edit_meta(folder, splits={"train": splits["train"], "val": splits["train"][3:]})
    (folder / "x_val_000000.bin").unlink()


SINGLE_FAULTS = {
    "id": (lambda f: _put(f / SHARD, 5, 257), ["id 257: tokenizer byte has a vocabulary of 257", "sha256"]),
    "checksum": (lambda f: _put(f / SHARD, 0, (int(TOKENS[700]) + 1) % 250), [f"{SHARD}: sha256: {META} says"]),
    "checksum of the header": (lambda f: _edit_header(f / SHARD, 200, 1), [f"{SHARD}: sha256"]),
    "documents": (lambda f: _shards_edit(f, documents=99), [f"{SHARD}: documents: {META} says 99, the file has "]),
    "count of an otherwise good shard": (lambda f: _shards_edit(f, tokens=3), ["token count: meta.json says 3, the header 700"]),
    "not listed": (lambda f: _foreign_shard(f / "y_val_0.bin", TOKENS[:3]), [f"y_val_0.bin: not listed in {META}"]),
    "raw file": (lambda f: (f / "train.bin").write_bytes(b"ab"), [f"train.bin: not listed in {META}"]),
    "listed twice": (_list_twice, ["x_train_000003.bin: listed 2 times"]),
    "vocabulary of another tokenizer": (
        lambda f: _edit_meta(f, vocab_size=50257), [f"{META}: vocab_size: 50257, but tokenizer byte has 257"]
    ),
    "vocabulary of GPT-2": (
        lambda f: _edit_meta(f, tokenizer="gpt2"),
        [f"{META}: vocab_size: 257, but tokenizer gpt2 has 50257", f"{META}: eot: 256, but tokenizer gpt2 has 50256"],
    ),
    "EOT outside of an unknown vocabulary": (
        lambda f: _edit_meta(f, tokenizer="mine", vocab_size=256), [f"{META}: eot: wanted an id below vocab_size 256, found 256"]
    ),
    "all documents": (lambda f: _edit_meta(f, counts={"documents": 7}), [f"{META}: counts.documents: 7, the shards have "]),
    "counts that are none": (lambda f: _edit_meta(f, counts=["7"]), [f"{META}: counts.documents: ['7'], the shards have "]),
    "mark": (lambda f: (f / UNFINISHED).write_text("{}"), [f"{UNFINISHED}: a run writes here or was stopped"]),
    "no EOT first": (lambda f: _overwrite_val(f, TOKENS[1:9]), ["x_val_000000.bin: begins with id", "wanted EOT 256"]),
    "duplicates": (
        lambda f: _overwrite_val(f, TOKENS[:400], split_by="hash"),
        ["val documents (", "in train as well, token for token, though a hash of the text chose the split"],
    ),
    "no checksum hides nothing": (lambda f: (_shards_edit(f, sha256="0"), _put(f / SHARD, 5, 300)), ["id 300", "sha256"]),
}


@pytest.mark.parametrize("name", SINGLE_FAULTS)
def test_faults_of_content(folder: Path, name: str, capsys: Capture) -> None:
    plant, wanted = SINGLE_FAULTS[name]
    plant(folder)
    faults = "\n".join(_faults(folder, capsys))
    assert all(part in faults for part in wanted)


def test_every_fault_is_listed(folder: Path, capsys: Capture) -> None:
    _overwrite_val(folder, np.append(TOKENS[1:400], [EOT] * 700).astype(np.uint16))
    _put(folder / "x_train_000000.bin", 699, 257)
    (folder / "x_train_000001.bin").unlink()
    os.truncate(folder / "x_train_000002.bin", 1030)
    _edit_header(folder / "x_train_000002.bin", 1, 7)
    _put(folder / "x_train_000003.bin", 0, *[EOT] * 400)
    _foreign_shard(folder / "y_train_000000.bin", TOKENS[:3])
    (folder / UNFINISHED).write_text("{}")
    wanted = [
        f"{UNFINISHED}: a run writes",
        "y_train_000000.bin: not listed",
        "x_train_000001.bin: missing",
        "x_train_000002.bin: version: wanted 1, found 7",
        "x_train_000002.bin: truncated",
        "x_val_000000.bin: begins with id",
        "x_train_000000.bin: id 257: tokenizer byte has a vocabulary of 257",
        "x_train_000000.bin: sha256",
        "x_train_000003.bin: sha256",
        "x_train_000003.bin: documents",
    ]
    faults = _faults(folder, capsys)
    assert len(faults) == len(wanted) and all(part in fault for part, fault in zip(wanted, faults, strict=True))
    assert main(["verify", str(folder)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"{folder}: {len(wanted)} faults"


@pytest.mark.parametrize("usable", [True, False])
def test_faults_of_shards_beside_a_bad_meta(folder: Path, usable: bool, capsys: Capture) -> None:
    """Where meta.json cannot be used its own faults are all listed, and the files are checked by their names."""
    if usable:
        _edit_meta(folder, tokenizer=7, vocab_size=0, dtype="int8", eot=-1)
    else:
        (folder / META).rename(folder / UNFINISHED)
    os.truncate(folder / SHARD, 1030)
    _edit_header(folder / "x_val_000000.bin", 0, 1)
    faults = _faults(folder, capsys)
    keys = ("tokenizer", "vocab_size", "eot", "dtype") if usable else (f"{UNFINISHED}: this data set was never finished",)
    wanted = [*keys, f"{SHARD}: truncated", "x_val_000000.bin: magic number"]
    assert len(faults) == len(wanted) and all(part in fault for part, fault in zip(wanted, faults, strict=True))


def test_faults_of_a_folder_without_meta(tmp_path: Path, capsys: Capture) -> None:
    _foreign_shard(tmp_path / "a_train_0.bin", TOKENS[:9], count=8)
    (tmp_path / "train.bin").write_bytes(b"abc")
    wanted = ["holds both", "no val shards", "a_train_0.bin: trailing bytes", "train.bin: wanted uint16 tokens"]
    faults = _faults(tmp_path, capsys)
    assert len(faults) == len(wanted) and all(part in fault for part, fault in zip(wanted, faults, strict=True))


@pytest.mark.parametrize("trouble", ["truncated", "unreadable"])
def test_file_that_fails_while_it_is_read(
    folder: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The others are checked nevertheless, and no document is made up of what lies on both sides."""
    monkeypatch.setattr(duplicates, "CHUNK_TOKENS", 100)
    _put(folder / "x_train_000003.bin", 0, 300)
    read_shard = data.verify._read_shard

    def failing(shard: data.shards.Shard, *more: object) -> object:
        for number, tokens in enumerate(read_shard(shard, *more)):
            if shard.path.name == SHARD and number == 2:
                if trouble == "unreadable":
                    raise OSError(5, "Input/output error")
                return
            yield tokens

    monkeypatch.setattr(data.verify, "_read_shard", failing)
    assert main(["verify", str(folder)]) == 1
    out, err = capsys.readouterr()
    reason = {"truncated": "ended at token 200 of 700", "unreadable": "could not be read on at token 200 (Input/output error)"}
    for part in (f"{SHARD}: {reason[trouble]}", "x_train_000003.bin: id 300", "x_train_000003.bin: sha256", "3 faults"):
        assert part in err
    eots = np.flatnonzero(TOKENS == EOT)
    before, after = eots[eots < 900], np.append(eots[eots >= 1400], len(TOKENS))
    lengths = np.append(np.diff(before), np.diff(after))
    lines = f"train: 2,500 tokens in 4 shards, {len(before) + len(after) - 1} documents of {lengths.mean():.1f} tokens on average"
    assert lines in out


def test_documents_beside_a_missing_shard_are_not_whole(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, {"train": _packed([1, 1], [2, 2, 2], [3], [4, 4, 4, 4]), "val": _packed([2, 4], [3, 9], [1, 1])}, 5)
    (tmp_path / "x_train_000001.bin").unlink()  # EOT 1 1 EOT 2 | 2 2 EOT 3 EOT | 4 4 4 4
    assert main(["verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "x_train_000001.bin: missing" in err and "1 fault" in err
    assert "train: 9 tokens in 2 shards, 2 documents of 3.0 tokens on average (3 to 3, EOT included)" in out
    assert "1 of 3 val documents (3 tokens)" in out
    (tmp_path / "x_train_000002.bin").unlink()
    assert main(["verify", str(tmp_path)]) == 1
    assert "train: 5 tokens in 1 shards, 2 documents of 3.0 tokens on average (3 to 3, EOT" in capsys.readouterr().out


def test_chunks_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    _overwrite_val(folder, TOKENS[:400])
    _put(folder / SHARD, 3, 300)
    main(["verify", str(folder)])
    whole = capsys.readouterr()
    for chunk, held in ((1, 1000), (7, 1), (100, 2), (700, 1000)):
        monkeypatch.setattr(duplicates, "CHUNK_TOKENS", chunk)
        monkeypatch.setattr(duplicates, "HELD_DOCUMENTS", held)
        main(["verify", str(folder)])
        small = capsys.readouterr()
        assert small.out == whole.out
        assert [line for line in small.err.splitlines() if "fault" in line] == [
            line for line in whole.err.splitlines() if "fault" in line
        ]


def test_memory_does_not_grow_with_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "CHUNK_TOKENS", 1 << 12)
    monkeypatch.setattr(duplicates, "HELD_DOCUMENTS", 900)
    peaks = []
    for times in (1, 8):
        tokens = np.tile(np.array([EOT, *range(99)], dtype=np.uint16), 1000 * times)
        tokens[5::100] = np.arange(len(tokens) // 100) % 256
        _write(tmp_path / f"{times}", {"train": tokens, "val": tokens[::-1].copy()}, shard_tokens=50_000 * times)
        tracemalloc.start()
        data.verify.verify(tmp_path / f"{times}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] and peaks[1] < tokens.nbytes


# Duplicates and EOT


def test_duplicates_are_shown_with_their_places(tmp_path: Path, capsys: Capture) -> None:
    text = [list(f"document {i}".encode()) for i in range(20)]
    val = _packed(text[15], text[11], [], text[3], [*text[3], 1])
    _write(tmp_path, {"train": _packed(*text[:12], [], text[3]), "val": val}, shard_tokens=30)
    out = _report(tmp_path, capsys)
    at = out.index(
        "duplicates: 3 of 5 val documents (24 tokens) are in train as well, token for token; "
        "not a fault, the split was not by hash; the first:"
    )
    # in train: ten documents of 11 tokens, two of 12, one of 1
    assert out[at + 1 : at + 4] == [
        "  x_val_000000.bin token 12 = x_train_000004.bin token 2, 12 tokens: 'document 11'",
        "  x_val_000000.bin token 24 = x_train_000004.bin token 14, 1 tokens: ''",
        "  x_val_000000.bin token 25 = x_train_000001.bin token 3, 11 tokens: 'document 3'",
    ]


@pytest.mark.parametrize("how", ["hash", "position", None])
def test_duplicates_are_a_fault_where_a_hash_excludes_them(folder: Path, how: str | None, capsys: Capture) -> None:
    _overwrite_val(folder, TOKENS[:400], **({"split_by": how} if how else {}))
    faults = _faults(folder, capsys)
    if how == "hash":
        assert len(faults) == 1 and "though a hash of the text chose the split" in faults[0]
    else:
        assert faults == []


def test_only_a_few_duplicates_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(duplicates, "HELD_DOCUMENTS", 3)
    documents = _packed(*([i] for i in range(20)))
    _write(tmp_path, {"train": documents, "val": documents})
    out = _report(tmp_path, capsys)
    assert any("20 of 20 val documents (40 tokens)" in line for line in out)
    shown = [line for line in out if " = x_train" in line]
    assert [line.split()[2] for line in shown] == ["0", "2", "4", "6", "8"]


def test_eot_of_gpt2_shards_is_assumed(tmp_path: Path, capsys: Capture) -> None:
    """The public FineWeb shards: one stream cut by position, val first, so that train begins inside a document."""
    stream = _packed([1, 2], [3], [4, 5, 6], [], [7, 8], [3], eot=50256)
    _foreign_shard(tmp_path / "fineweb_val_000000.bin", stream[:7])
    _foreign_shard(tmp_path / "fineweb_train_000001.bin", stream[7:10])
    _foreign_shard(tmp_path / "fineweb_train_000002.bin", stream[10:])
    assert _report(tmp_path, capsys) == [
        "train: 8 tokens in 2 shards, 3 documents of 2.0 tokens on average (1 to 3, EOT included), 1 empty; "
        "begins inside a document; EOT 50256 is assumed",
        "val: 7 tokens in 1 shards, 3 documents of 2.3 tokens on average (2 to 3, EOT included), 0 empty; "
        "begins with EOT; EOT 50256 is assumed",
        "duplicates: 1 of 3 val documents (2 tokens) are in train as well, token for token; "
        "not a fault, the split was not by hash; the first:",
        "  fineweb_val_000000.bin token 3 = fineweb_train_000002.bin token 3, 2 tokens: '3'",
        f"{tmp_path}: good: highest id 50256, no {META}: checksums and vocabulary not checked",
    ]


@pytest.mark.parametrize("raw", [True, False])
def test_eot_that_is_not_known(tmp_path: Path, raw: bool, capsys: Capture) -> None:
    """NanoGPT's files end documents with EOT and say nothing; other shards may hold any tokenizer's ids."""
    tokens = _packed([1, 2], [3], eot=50256)
    if raw:
        tokens.tofile(tmp_path / "train.bin")
        tokens.tofile(tmp_path / "val.bin")
    else:
        _foreign_shard(tmp_path / "x_train_0.bin", tokens[1:])
        _foreign_shard(tmp_path / "x_val_0.bin", tokens[1:])
    out = _report(tmp_path, capsys)
    assert [f"documents unknown: no {META} says which id is EOT" in line for line in out] == [True, True, False]
    assert main(["inspect", str(tmp_path)]) == 0
    assert "  begins 50256 1 2 50256 3" if raw else "  begins 1 2 50256 3" in capsys.readouterr().out


def test_left_over_files_are_named_and_no_fault(folder: Path, capsys: Capture) -> None:
    names = [".meta.json.tmp", ".x_train.tmp", ".x.spool", "x_train_000004.bin.part", ".y_train_0.bin"]
    for name in [*names, "README.md", ".gitignore"]:
        (folder / name).write_bytes(b"x")
    lines = [line for line in _report(folder, capsys) if line.startswith("left over: ")]
    assert [Path(line.split()[2]).name for line in lines] == sorted(names)


def test_checksums_that_meta_does_not_give(folder: Path, capsys: Capture) -> None:
    splits = json.loads((folder / META).read_text())["splits"]
    del splits["val"][0]["sha256"], splits["train"][2]["sha256"]
    _edit_meta(folder, splits=splits)
    assert _report(folder, capsys)[-1].endswith("vocabulary 257, 2 shards without a checksum")


def test_counts_and_vocabularies_that_are_right(folder: Path, capsys: Capture) -> None:
    n = int((TOKENS == EOT).sum()) + 3
    _edit_meta(folder, counts={"documents": n, "empty": 5, "skipped": 0})
    assert _faults(folder, capsys) == []
    _edit_meta(folder, counts={"documents": n + 1})
    assert _faults(folder, capsys) == [f"{folder / META}: counts.documents: {n + 1}, the shards have {n}"]
    (folder / "x_train_000001.bin").unlink()  # whose documents nobody can count
    assert len(_faults(folder, capsys)) == 1
    _edit_meta(folder, counts={"skipped": 1}, tokenizer="mine", vocab_size=300)
    assert len(_faults(folder, capsys)) == 1


def test_names_of_every_kind_break_no_line(folder: Path, capsys: Capture) -> None:
    for name in (b"a\nb_train_0.bin", b"\x1b[2J_train_0.bin", b"\xff_train_0.bin"):
        (folder / os.fsdecode(name)).write_bytes(b"")
    _edit_meta(folder, tokenizer="my\n\x1b\ud800", vocab_size=6)
    assert main(["verify", str(folder)]) == 1
    said = capsys.readouterr()
    *faults, count = said.err[said.err.index("fault: ") :].rstrip("\n").split("\n")
    assert len(faults) >= 4 and all(line.startswith("fault: ") for line in faults)
    assert all(line.isprintable() for line in [*said.out.split("\n"), *faults, count])
    for path in folder.glob("*_train_0.bin"):
        path.unlink()
    assert main(["inspect", str(folder)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_reader_that_has_had_enough(folder: Path, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "data.shards", command, str(folder)], cwd=Path(__file__).parents[1],
                              stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert done.returncode == 0 and "Error" not in done.stderr


# Inspect


def test_inspect(tmp_path: Path, capsys: Capture) -> None:
    document = _packed(list(b"hello\n\tworld"))
    _write(tmp_path / "set", {"train": np.tile(document, 4), "val": _packed([], list(b"x" * 400))}, shard_tokens=25)
    assert main(["inspect", str(tmp_path / "set")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'set'}: fingerprint ")
    assert lines[1:7] == [
        "tokenizer byte, vocabulary 257, EOT 256",
        "train: 52 tokens in 3 shards, the last of 2, 4 documents of 13.0 tokens on average, EOT included",
        "  first document (12 tokens):",
        "    | hello",
        "    | \\tworld",
        "val: 402 tokens in 17 shards, the last of 2, 2 documents of 201.0 tokens on average, EOT included",
    ]
    assert lines[7:] == ["  first document (400 tokens, of which 300):", *(f"    | {'x' * n}" for n in (110, 110, 80))]


def test_inspect_without_the_vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def missing(name: str) -> ByteTokenizer:
        raise InputError(f"tokenizer {name} is not here")

    monkeypatch.setattr(data.verify, "get_tokenizer", missing)
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "ids instead of text: tokenizer byte is not here" in out and "    | 5 6\n" in out
    _foreign_shard(folder / "x_val_000000.bin", _packed([5, 6], eot=50256))
    (folder / META).unlink()
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "begins with 50256: GPT-2 is assumed" in out and "ids instead of text: tokenizer gpt2" in out
    assert "val: 3 tokens in 1 shards, documents not counted\n  first document (2 tokens):\n    | 5 6" in out


def test_inspect_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    tokens = np.tile(_packed([1] * 99), 30_000)
    _write(tmp_path, {"train": tokens, "val": tokens[:100]}, shard_tokens=1_000_000)
    n_read = 0
    pread = os.pread

    def count(*arguments: int) -> bytes:
        nonlocal n_read
        n_read += arguments[1]
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", count)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "train: 3,000,000 tokens in 3 shards, the last of 1,000,000, 30,000 documents of 100.0 tokens" in out
    assert n_read < 2_300_000 < tokens.nbytes


@pytest.mark.parametrize("tokens", [[EOT] * 9, [EOT, 1], [1, 2, 3], [1, EOT]])
def test_inspect_of_odd_beginnings(tmp_path: Path, tokens: list[int], capsys: Capture) -> None:
    _write(tmp_path, {"train": np.array(tokens), "val": np.array(tokens)}, shard_tokens=10)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("first document (1 tokens):" if tokens == [EOT, 1] else "no document begins in the first") == 2
